#!/usr/bin/env bash
# Makes the environments that benchmarks.side_by_side compares, and the model in the cache. Runs twice without harm.
#
#   bash benchmarks/setup.sh
#
# What the peers need never enters requirements.txt: torch, transformers, TRL go to .venv-peers, google-tunix, which
# wants other versions of what we use too, to .venv-tunix; ours is that of launch/common.sh.
#
# Environment: see launch/common.sh; and
#   PEERS_PIP   options of pip for .venv-peers, such as the index of PyTorch's CPU wheels: on Linux the default wheel
#               brings several GB of CUDA libraries, which this comparison does not use
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=../launch/common.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/../launch/common.sh"

# peers_environment FOLDER PACKAGE...: installs only if the packages changed since last time.
peers_environment() {
  local folder="$root/$1" log="$root/$1/install.log" packages=("${@:2}") options
  if [ "$(cat "$folder/packages" 2>/dev/null)" = "${packages[*]}" ]; then return; fi
  need_disk "$folder" 8 "$1"
  say "environment: ${packages[*]} in $folder"
  mkdir -p "$folder"
  find_python || fail "no Python >= 3.11 found: install one, or set PYTHON to its path."
  "$base" -m venv "$folder" >"$log" 2>&1 || fail "$base -m venv failed (Debian: apt install python3-venv), log: $log"
  read -r -a options <<<"${PEERS_PIP:-}"
  "$folder/bin/python" -m pip install --no-input ${options[@]+"${options[@]}"} "${packages[@]}" >>"$log" 2>&1 ||
    fail "pip could not install ${packages[*]} (is there network?), log: $log"
  printf '%s' "${packages[*]}" >"$folder/packages"
}

peers_environment .venv-peers torch==2.13.0 transformers==5.24.0 trl==1.16.0 accelerate==1.15.0 datasets==5.2.0
peers_environment .venv-tunix google-tunix==0.1.7 jax==0.10.2 flax==0.12.8
use_environment requirements.txt
(cd "$root" && "$python" -m nca_jax.models.packaged)
say "ready: JAX_PLATFORMS=cpu $python -m benchmarks.side_by_side --quick"
