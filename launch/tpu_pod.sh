#!/usr/bin/env bash
# Trains on one Cloud TPU slice, of one host or many: makes it, installs nca_jax on its hosts, starts the job, shows
# its log, and does that again when the TPU was preempted, until the job has ended.
#
#   bash launch/tpu_pod.sh --name=NAME --zone=ZONE --type=v5litepod-16 --workdir=gs://BUCKET/PATH [OPTION ...] -- \
#     --config=configs/medmcqa.py:qwen3_8b [--config.KEY=VALUE ...]
#
#   --dry-run             prints the commands, to read or to paste; needs neither gcloud nor an account
#   --queued              asks for the TPU by a queued resource, which waits until there is one
#   --spot                a TPU that is cheaper and may be taken away
#   --delete              removes the TPU when the job has ended, however it ended
#   --version=IMAGE       software image of the TPU VM (default: Google's for JAX on that type)
#   --project=... --network=... --subnetwork=... --service-account=...   as of gcloud
#   --repo=URL [--ref=BRANCH_OR_TAG]   clones on the hosts; default: sends the last commit of this checkout
#
# A token in HF_TOKEN reaches the job through a file that only you can read, and is never printed. Ctrl-C leaves the job
# alone; the same command follows it again. Exits with the job's exit code.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=tpu_common.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/tpu_common.sh"

tpu_options "" "$@"
set_commands "${option[name]}"
launch
