# shellcheck shell=bash
# Sourced by the scripts of this folder, by .ci/run and by the commit hooks: messages, and one virtual environment.
#
#   PYTHON         the Python to build the environment with (default: the first of python3, python3.13, ... that fits)
#   NCA_JAX_VENV   where the environment lies (default: .venv-<Python version> in the repository)
#   NCA_JAX_CACHE  models and compiled programs (default: ~/.cache/nca_jax, or below XDG_CACHE_HOME)
#   NCA_JAX_EXTRA  what to compute on: tpu, cuda13 (the extras of jax that bring their libraries), or empty for the CPU

root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"

say() { printf '%s\n' "$*"; }

# The same exit code as a UserError: what happened is not a bug of nca_jax.
fail() {
  printf 'error: %s\n' "$*" >&2
  exit 2
}

# A platform that is named must come up: without that, jax goes on quietly on the CPU. gcsfs reads and writes gs://.
case "${NCA_JAX_EXTRA:-}" in
  "") platforms=cpu extra=() ;;
  tpu) platforms=tpu,cpu extra=("jax[tpu]" gcsfs) ;;
  cuda13) platforms=cuda,cpu extra=("jax[cuda13]") ;;
  *) fail "NCA_JAX_EXTRA=$NCA_JAX_EXTRA is not an extra of jax that nca_jax runs on: set it to tpu or cuda13." ;;
esac
export JAX_PLATFORMS="${JAX_PLATFORMS-$platforms}"
cache="${NCA_JAX_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/nca_jax}"
# Compiled programs outlive the process: the second start of a job does not compile again.
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$cache/xla}"

# need_disk PATH GIGABYTES PURPOSE: fails unless the disk that will hold PATH has room. PATH need not exist.
need_disk() {
  local directory="$1" free
  while [ ! -d "$directory" ]; do directory="$(dirname -- "$directory")"; done
  free="$(df -Pk -- "$directory" | awk 'NR == 2 {printf "%d", $4 / 1000000}')"
  [ "$free" -ge "$2" ] || fail "too little disk for $3: $2 GB needed, $free GB free at $directory."
}

# Prints "3.12" for a Python that runs and is new enough, else fails quietly.
python_version() {
  "$1" -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit(1); print(f"{v[0]}.{v[1]}")' 2>/dev/null
}

# Sets $base and $version to the first Python that fits, else fails quietly.
find_python() {
  local candidates=(python3 python3.13 python3.12 python3.11)
  [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
  for base in "${candidates[@]}"; do
    if version="$(python_version "$base")"; then return; fi
  done
  return 1
}

# use_environment REQUIREMENTS: sets $venv and $python; installs only if the requirement files changed since last time.
use_environment() {
  local base version wanted stamp log plus="${extra[*]+ ${extra[*]}}"
  find_python || fail "no Python >= 3.11 found${PYTHON:+ at PYTHON=$PYTHON}: install one, or set PYTHON to its path."

  venv="${NCA_JAX_VENV:-$root/.venv-$version}"
  [[ "$venv" == /* ]] || venv="$PWD/$venv"
  python="$venv/bin/python"
  stamp="$venv/nca_jax-requirements"
  wanted="$(cd "$root" && cat requirements.txt requirements-dev.txt constraints.txt | cksum)"
  if [ -x "$python" ]; then
    [ "$(python_version "$python")" = "$version" ] ||
      fail "$venv is not of Python $version: remove it, or set NCA_JAX_VENV to another path."
    # An environment for development has everything that a run needs, and one for an accelerator what the CPU needs.
    case "$(cat "$stamp" 2>/dev/null)" in "$wanted $1$plus"* | "$wanted requirements-dev.txt$plus"*) return ;; esac
  fi

  # Up to 3 GB when installed, and the wheels lie beside it while pip works.
  need_disk "$venv" 5 "the virtual environment"
  say "environment: Python $version in $venv (1 to 3 GB; the first time takes minutes)"
  mkdir -p "$venv" || fail "cannot create $venv: set NCA_JAX_VENV to a directory of yours."
  log="$venv/nca_jax-install.log"
  "$base" -m venv "$venv" >"$log" 2>&1 || fail "$base -m venv failed (Debian: apt install python3-venv), log: $log"
  (cd "$root" &&
    "$python" -m pip install --no-input -r "$1" ${extra[@]+"${extra[@]}"} -c constraints.txt) >>"$log" 2>&1 ||
    fail "pip could not install $1 (is there network?), log: $log"
  printf '%s' "$wanted $1$plus" >"$stamp"
}

# dev_tool NAME ARGUMENT...: a command of the development environment.
dev_tool() {
  use_environment requirements-dev.txt
  "$venv/bin/$1" "${@:2}"
}
