#!/usr/bin/env bash
# Trains on TPU slices of a GKE cluster that Google's xpk manages (written for xpk 1.16).
#
#   bash launch/xpk.sh --name=NAME --cluster=CLUSTER --type=v5litepod-16 --image=IMAGE --workdir=gs://BUCKET/PATH \
#     [OPTION ...] -- --config=configs/medmcqa.py:qwen3_8b [--config.KEY=VALUE ...]
#
#   --image=IMAGE        made from launch/Dockerfile with EXTRA=tpu, in a registry that the cluster reads
#   --slices=N           how many (default 1); more are one replica of the model each
#   --restarts=N         restarts of all pods after a host was lost or told to stop (default 100)
#   --grace=SECONDS      to save in when told to stop (default 300)
#   --project=... --zone=...   of the cluster (default: those of gcloud)
#   --dry-run            prints the command
#
# Each host runs launch/worker.sh, which restarts what crashes in place. A token in HF_TOKEN is not printed, but xpk
# writes it into the workload, where all who may read workloads of the cluster see it.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
# shellcheck source-path=SCRIPTDIR source=options.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/options.sh"

parse_options "name cluster type image workdir slices restarts grace project zone" "" "$@"
need_options name cluster type image workdir
job_arguments
dry_run || command -v xpk >/dev/null ||
  fail "xpk is not installed: pip install xpk; --dry-run prints the command without it."

# exec, so that the signal to stop reaches worker.sh and not a shell around it.
command=(xpk workload create
  "--workload=${option[name]}"
  "--cluster=${option[cluster]}"
  ${option[project]:+"--project=${option[project]}"}
  ${option[zone]:+"--zone=${option[zone]}"}
  "--tpu-type=${option[type]}"
  "--num-slices=${option[slices]:-1}"
  "--docker-image=${option[image]}"
  "--max-restarts=${option[restarts]:-100}"
  # Beside these, xpk restarts on 42 and 127 to 255, which a killed host shows; 2 ends the workload at once.
  --restart-on-exit-codes=75
  "--termination-grace-period-seconds=${option[grace]:-300}"
  "--command=exec bash launch/worker.sh $(quoted "${arguments[@]}")")

if [ -n "${HF_TOKEN:-}" ]; then
  # A name without a value: xpk takes the value from its own environment.
  names="$cache/launch/${option[name]}.env"
  run mkdir -p "$cache/launch"
  # shellcheck disable=SC2016
  run bash -c 'echo HF_TOKEN >"$0"' "$names"
  command+=("--env-file=$names")
fi
run "${command[@]}"
