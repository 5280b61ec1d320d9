# shellcheck shell=bash
# Sourced by tpu_pod.sh and tpu_multislice.sh: makes TPU VMs, runs launch/worker.sh on all of them, and starts over
# when they are preempted. Only what `run` and `ask` are given reaches gcloud.
#
#   NCA_JAX_POLL   seconds between looks at the state of the TPU (default 30)

# shellcheck source-path=SCRIPTDIR source=common.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
# shellcheck source-path=SCRIPTDIR source=options.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/options.sh"

poll="${NCA_JAX_POLL:-30}"
# On each host, in the home directory: what was committed, its environment, and log and exit code of the job.
checkout=nca_jax job=nca_jax_job
# shellcheck disable=SC2016
worker='NCA_JAX_EXTRA=tpu NCA_JAX_VENV="$HOME/nca_jax_venv" bash nca_jax/launch'

# tpu_options VALUES ARGUMENT...: the options of both scripts and those in VALUES; sets the globals from them.
tpu_options() {
  parse_options "$1 name zone type workdir project version network subnetwork service-account repo ref" \
    "queued spot delete" "${@:2}"
  need_options name zone type workdir
  [[ "${option[workdir]}" == gs://* || "${option[workdir]}" == /* ]] ||
    fail "--workdir=${option[workdir]} is not shared by the hosts: give gs://BUCKET/PATH, or the full path of a mount."
  job_arguments
  where=("--zone=${option[zone]}" ${option[project]:+"--project=${option[project]}"} --quiet)
  dry_run || command -v gcloud >/dev/null || fail "gcloud is not installed; --dry-run prints the commands without it."
}

# The software image that Google recommends for JAX on a type of TPU.
tpu_version() {
  case "${option[version]:+given}${option[type]}" in
    given*) say "${option[version]}" ;;
    v6e-*) say v2-alpha-tpuv6e ;;
    v5p-*) say v2-alpha-tpuv5 ;;
    v5litepod-*) say v2-alpha-tpuv5-lite ;;
    v2-* | v3-* | v4-*) say tpu-ubuntu2204-base ;;
    *) fail "which software image --type=${option[type]} needs is not known here: pass --version=..." ;;
  esac
}

# set_commands NODE...: the names of the TPUs; more than one are the slices of one queued resource.
set_commands() {
  nodes=("$@")
  local version common=("--accelerator-type=${option[type]}" "${where[@]}") name
  version="$(tpu_version)"
  [ -z "${option[spot]:-}" ] || common+=(--spot)
  for name in network subnetwork service-account; do
    [ -z "${option["$name"]:-}" ] || common+=("--$name=${option["$name"]}")
  done
  if [ $# -gt 1 ]; then
    resource=queued-resources
    create=("--runtime-version=$version" "--node-count=$#" "--node-prefix=${option[name]}" "${common[@]}")
  elif [ -n "${option[queued]:-}" ]; then
    resource=queued-resources
    create=("--runtime-version=$version" "--node-id=${option[name]}" "${common[@]}")
  else
    resource=tpu-vm
    create=("--version=$version" "${common[@]}")
  fi
  create=(gcloud compute tpus "$resource" create "${option[name]}" "${create[@]}")
  remove=(gcloud compute tpus "$resource" delete "${option[name]}" "${where[@]}")
  look=(gcloud compute tpus "$resource" describe "${option[name]}" "--format=value(state)" "${where[@]}")
  if [ "$resource" = queued-resources ]; then
    remove+=(--force) # its TPUs too
    look=(gcloud compute tpus "$resource" describe "${option[name]}" "--format=value(state.state)" "${where[@]}")
  fi
}

# One word for a state of a TPU or a queued resource: ready, waiting, lost (deleted and made anew), absent.
meaning() {
  case "$1" in
    READY | ACTIVE) say ready ;;
    PREEMPTED | TERMINATED | STOPPED | SUSPENDED | FAILED) say lost ;;
    "") say absent ;;
    *) say waiting ;;
  esac
}

ask() { meaning "$("$@" 2>/dev/null || true)"; }

# What has become of the TPU: the meaning of its state. A dry run imagines that it is made at once.
state() {
  local answer="$imagined" node
  dry_run || answer="$(ask "${look[@]}")"
  if [ "$resource" = queued-resources ] && [ "$answer" = ready ] && ! dry_run; then
    for node in "${nodes[@]}"; do # where a preemption may show first
      case "$(ask gcloud compute tpus tpu-vm describe "$node" "--format=value(state)" "${where[@]}")" in
        lost) answer=lost ;;
        absent | waiting) [ "$answer" = lost ] || answer=waiting ;;
      esac
    done
  fi
  say "$answer"
}

imagined=absent was_ready=""
# Returns when the TPU is ready. Capacity may be short for hours after a preemption; only a first request must succeed.
acquire() {
  local requested=""
  note "the TPU: made unless it is there, deleted first if it was preempted, waited for"
  while true; do
    case "$(state)" in
      ready)
        was_ready=yes
        return
        ;;
      waiting) say "waiting for ${option[name]}" ;;
      lost)
        [ -z "$requested" ] || [ -n "$was_ready" ] ||
          fail "the request for ${option[name]} failed; this says why: $(quoted "${look[@]}" --format=json)"
        say "${option[name]} was preempted or has failed: deleting it"
        "${remove[@]}" || true
        ;;
      absent)
        requested=yes
        if run "${create[@]}"; then
          [ "$resource" = tpu-vm ] || note "until this says ACTIVE: $(quoted "${look[@]}")"
          imagined=ready
          continue
        fi
        [ -n "$was_ready" ] ||
          fail "gcloud could not create ${option[name]}, see above; with --queued it waits its turn."
        ;;
    esac
    sleep "$poll"
  done
}

# remote NODE WORKERS COMMAND: the command in a shell on hosts of a TPU; WORKERS is a number or all.
remote() { run gcloud compute tpus tpu-vm ssh "$1" "--worker=$2" "--command=$3" "${where[@]}"; }

# On all hosts of all slices.
everywhere() {
  local node
  for node in "${nodes[@]}"; do remote "$node" all "$1" || return 1; done
}

# Only what is committed goes there, so that the log of a run can name the code it ran.
copy() {
  local upload="$cache/launch/${option[name]}" node files=() status=0
  run mkdir -p "$upload"
  if [ -z "${option[repo]:-}" ]; then
    [ -z "$(git -C "$root" status --porcelain 2>/dev/null)" ] || say "# uncommitted changes are not copied"
    run git -C "$root" archive --format=tar.gz "--output=$upload/checkout.tar.gz" HEAD || return 1
    files+=("$upload/checkout.tar.gz")
  fi
  if [ -n "${HF_TOKEN:-}" ]; then
    # In a file of the user's own, never in a command line, where every user of a host could read it.
    # shellcheck disable=SC2016
    local write='(umask 077 && printf "HF_TOKEN=%q\n" "$HF_TOKEN" >"$0/environment")'
    run bash -c "$write" "$upload" || return 1
    files+=("$upload/environment")
  fi

  # Hosts may not let one in yet.
  for _ in 1 2 3 4 5; do
    if everywhere "mkdir -p $job && rm -rf $checkout"; then
      status=0
      break
    fi
    status=1
    sleep "$poll"
  done
  [ "$status" = 0 ] || return 1
  if [ "${#files[@]}" -gt 0 ]; then
    for node in "${nodes[@]}"; do
      run gcloud compute tpus tpu-vm scp "${files[@]}" "$node:$job/" --worker=all "${where[@]}" || status=1
    done
    run rm -rf "$upload"
  fi
  return "$status"
}

install() {
  local get="mkdir $checkout && tar -xzf $job/checkout.tar.gz -C $checkout"
  [ -z "${option[repo]:-}" ] ||
    get="$(quoted git clone --quiet --depth=1 ${option[ref]:+"--branch=${option[ref]}"} "${option[repo]}" "$checkout")"
  everywhere "$get && $worker/worker.sh --install"
}

start() {
  everywhere "$worker/detached.sh start $job bash $checkout/launch/worker.sh $(quoted "${arguments[@]}")"
}

job_running() {
  note "if worker 0 says that the job is running there, what comes before the log is left out:"
  note "  bash $checkout/launch/detached.sh running $job"
  ! dry_run && remote "${nodes[0]}" 0 "bash $checkout/launch/detached.sh running $job" >/dev/null 2>&1
}

# train: runs the job to its end, however many TPUs that takes; returns its exit code.
train() {
  local code
  while true; do
    acquire
    if ! job_running; then
      note "what is committed, to all hosts"
      if ! { copy && note "the environment, on all hosts" && install && note "the job, on all hosts" && start; }; then
        [ "$(state)" != ready ] || fail "could not set up the hosts of ${option[name]}, see above; it is still there."
        continue
      fi
    fi
    note "the log of worker 0, until the job ends or the TPU is lost"
    remote "${nodes[0]}" 0 "bash $checkout/launch/detached.sh follow $job" || true
    if dry_run; then return; fi
    code="$(remote "${nodes[0]}" 0 "cat $job/exit_code" 2>/dev/null | tr -dc 0-9)" || true
    case "$code" in
      0 | 2) return "$code" ;;
      75) say "the job was told to stop; going on" ;;
      "") say "the connection to ${option[name]} is lost; looking what has become of it" ;;
      # A crash, unless it was for want of another slice.
      *) if [ "$(state)" = ready ]; then return "$code"; fi ;;
    esac
    sleep "$poll"
  done
}

# launch: all of it; exits with the job's exit code.
launch() {
  local code=0 summary="${option[workdir]%/}/summary.txt"
  trap 'say "left; the job goes on, and the same command follows it again" >&2; exit 130' INT
  train || code=$?
  if dry_run; then
    note "exit code 75, or none because the TPU was preempted: all of the above again, after"
    note "  $(quoted "${remove[@]}")"
    note "any other exit code but 0: ends with it"
  fi
  if [ "$code" = 0 ]; then
    case "$summary" in
      gs://*) run gcloud storage cat "$summary" ;;
      *) remote "${nodes[0]}" 0 "cat $(quoted "$summary")" ;;
    esac
  else
    say "the job ended with exit code $code; its log is in ~/$job/log on worker 0 of ${nodes[0]}" >&2
  fi
  if [ -n "${option[delete]:-}" ]; then
    note "--delete, however the job ended"
    run "${remove[@]}"
  else
    say "# ${option[name]} is still there and costs money; to remove it: $(quoted "${remove[@]}")"
  fi
  exit "$code"
}
