#!/usr/bin/env bash
# Trains on TPU slices of a GKE cluster, as a JobSet (launch/gke/jobset.yaml) that kubectl applies.
#
#   bash launch/gke.sh --name=NAME --image=IMAGE --accelerator=tpu-v5-lite-podslice --topology=4x4 \
#     --workdir=gs://BUCKET/PATH [OPTION ...] -- --config=configs/medmcqa.py:qwen3_8b [--config.KEY=VALUE ...]
#
#   --dry-run              prints the manifest and applies nothing
#   --image=IMAGE          made from launch/Dockerfile with EXTRA=tpu, in a registry that the cluster reads
#   --accelerator=...      of the node pool, its label cloud.google.com/gke-tpu-accelerator: tpu-v4-podslice,
#                          tpu-v5-lite-podslice, tpu-v5p-slice, tpu-v6e-slice, ...
#   --topology=...         of one slice, its label cloud.google.com/gke-tpu-topology
#   --slices=N             how many (default 1); more are one replica of the model each
#   --chips=N              of one host (default 4, or all of a smaller topology)
#   --spot                 only on spot nodes
#   --restarts=N           after crashes (default 10); after exit code 75 and evictions it restarts without counting
#   --grace=SECONDS        to save in when told to stop (default 300)
#   --namespace=...        of Kubernetes (default: the one that kubectl uses)
#   --service-account=...  of Kubernetes, that may read and write the workdir (default: default)
#   --hf-secret=...        Kubernetes secret whose key HF_TOKEN is the token, if it exists (default: hf-token)
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
# shellcheck source-path=SCRIPTDIR source=options.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/options.sh"

parse_options \
  "name image accelerator topology workdir slices chips restarts grace namespace service-account hf-secret" "spot" "$@"
need_options name image accelerator topology workdir
job_arguments
# Pods are called NAME-slice-SLICE-HOST-..., in at most 63 characters.
[[ "${option[name]}" =~ ^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$ ]] ||
  fail "--name=${option[name]} is no name for a job: up to 40 lower-case letters, digits and dashes, a letter first."
[[ "${option[accelerator]}" =~ ^[a-z0-9-]+$ ]] ||
  fail "--accelerator=${option[accelerator]} is no label like tpu-v6e-slice."
[[ "${option[topology]}" =~ ^[1-9][0-9]*(x[1-9][0-9]*)+$ ]] ||
  fail "--topology=${option[topology]} is not like 4x4 or 2x2x4."
slices="${option[slices]:-1}" restarts="${option[restarts]:-10}" grace="${option[grace]:-300}"
total=$((${option[topology]//x/*}))
chips="${option[chips]:-$((total < 4 ? total : 4))}"
for number in "$slices" "$restarts" "$grace" "$chips"; do
  [[ "$number" =~ ^[0-9]{1,6}$ ]] || fail "$number is not a number; --slices, --chips, --restarts and --grace are."
done
[ "$slices" -ge 1 ] || fail "--slices=$slices leaves nothing to run on."
((chips > 0 && total % chips == 0)) ||
  fail "--topology=${option[topology]} has $total chips, not a multiple of --chips=$chips."
hosts=$((total / chips))
[ "$slices" = 1 ] || [ "$hosts" -gt 1 ] || fail "GKE joins only slices of several hosts; this topology has one host."
dry_run || command -v kubectl >/dev/null || fail "kubectl is not installed; --dry-run prints the manifest without it."
command -v python3 >/dev/null || fail "python3 is not installed."

selector="\"cloud.google.com/gke-tpu-accelerator\": \"${option[accelerator]}\""
selector+=", \"cloud.google.com/gke-tpu-topology\": \"${option[topology]}\""
[ -z "${option[spot]:-}" ] || selector+=', "cloud.google.com/gke-spot": "true"'
manifest="$(python3 "$root/launch/gke/fill.py" "$root/launch/gke/jobset.yaml" \
  "name=${option[name]}" "image=${option[image]}" "slices:=$slices" "hosts:=$hosts" "chips:=$chips" \
  "restarts:=$restarts" "grace:=$grace" "node_selector:={$selector}" \
  "service_account=${option[service-account]:-default}" "hf_secret=${option[hf-secret]:-hf-token}" \
  arguments -- "${arguments[@]}")"

apply=(kubectl ${option[namespace]:+"--namespace=${option[namespace]}"} apply -f -)
note "to apply it, give this to: $(quoted "${apply[@]}")"
if dry_run; then say "$manifest"; else "${apply[@]}" <<<"$manifest"; fi
