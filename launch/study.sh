#!/usr/bin/env bash
# The laptop study: which anchor does what, over methods, tasks and seeds, on SmolLM2-135M-Instruct. docs/study.md.
#
#   bash launch/study.sh [--quick] [--only=PATTERN ...] [--config.NAME=VALUE ...]
#
#   --quick        one task, one seed, four methods
#   --only...      the runs whose names match, such as '*seed=0': a part of the grid, for machines that share it
#   --config...    passed on to all runs
#   RUNS           where the results go (default: runs/study, or runs/study_quick, in the repository)
#
# It says how long it takes before it starts. The same command again continues what was stopped, however it was stopped,
# and tries again what has failed. In the background: bash launch/detached.sh start DIRECTORY bash launch/study.sh
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

grid=full
if [ "${1:-}" = --quick ]; then
  grid=quick
  shift
fi
default=study
[ "$grid" = full ] || default="study_$grid"
runs="${RUNS:-$root/runs/$default}"
[[ "$runs" == /* ]] || runs="$PWD/$runs"

use_environment requirements.txt
cd "$root"
# A run's checkpoint is 1.6 GB, of which three are kept, and its item lines and the model's small files some MB.
need_disk "$runs" 8 "the runs in $runs"
"$python" -m nca_jax.models.packaged
failed=0
"$python" -m nca_jax.study --config=configs/study.py --workdir="$runs" --grid="$grid" "$@" || failed=$?
[ "$failed" -ne 2 ] || exit 2
"$python" -m nca_jax.study_tables "$runs"
say "what it says: $runs/tables/study.md"
exit "$failed"
