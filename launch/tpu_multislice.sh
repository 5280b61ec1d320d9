#!/usr/bin/env bash
# Trains on several Cloud TPU slices of one type, joined by the data-center network: one replica of the model per slice,
# which is what nca_jax makes of them by itself.
#
#   bash launch/tpu_multislice.sh --slices=2 --name=NAME --zone=ZONE --type=v5litepod-16 --workdir=gs://BUCKET/PATH \
#     [OPTION ...] -- --config=configs/medmcqa.py:qwen3_8b [--config.KEY=VALUE ...]
#
#   --slices=N    how many; their TPUs are called NAME-0, NAME-1, ..., and one queued resource NAME asks for them
#
#   --dry-run     prints the commands
#
# All other options, and what happens on preemption, are those of launch/tpu_pod.sh; --queued is always so.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=tpu_common.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/tpu_common.sh"

tpu_options slices "$@"
need_options slices
[[ "${option[slices]}" =~ ^([2-9]|[1-9][0-9]+)$ ]] || fail "--slices=${option[slices]} is not a number from 2 on."
slices=()
for ((i = 0; i < option[slices]; i++)); do slices+=("${option[name]}-$i"); done
set_commands "${slices[@]}"
launch
