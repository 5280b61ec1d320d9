#!/usr/bin/env bash
# What every host of a job runs: makes the environment, then trains, and starts again whenever that can help.
#
#   bash launch/worker.sh [--install] ARGUMENT...
#
#   --install          makes the environment and stops
#   ARGUMENT...        for python -m nca_jax.main; relative paths are meant from the repository
#
#   NCA_JAX_EXTRA      what to compute on: tpu, cuda13, or empty for the CPU
#   NCA_JAX_VENV       an environment that something else made is used as it is (an image, the one of a test)
#   NCA_JAX_RETRIES    how often to start again after a crash (default 3)
#   NCA_JAX_PAUSE      seconds before starting again (default 10), in which the other hosts notice and stop as well
#
# The processes of a job find each other by themselves on Cloud TPU, GKE and Slurm; elsewhere set
# JAX_COORDINATOR_ADDRESS=HOST:PORT of the first one, JAX_NUM_PROCESSES, and JAX_PROCESS_ID, counted from 0.
#
# Exits with 0 (finished), 2 (input that cannot work), 75 (this script was told to stop: the same command goes on
# later), or the code of the last crash. SIGTERM and SIGINT reach the training once, as SIGTERM, and are waited for.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

retries="${NCA_JAX_RETRIES:-3}"
pause="${NCA_JAX_PAUSE:-10}"

if [ -x "${NCA_JAX_VENV:-}/bin/python" ] && [ ! -e "$NCA_JAX_VENV/nca_jax-install.log" ]; then
  python="$(cd -- "$NCA_JAX_VENV" && pwd)/bin/python"
else
  if [ "${NCA_JAX_EXTRA:-}" = tpu ] && ! find_python; then
    # The software images of Cloud TPU come with Python 3.10; uv brings a newer one into the home directory.
    say "environment: no Python >= 3.11 here, fetching one"
    python3 -m pip install --user --quiet uv || fail "pip could not install uv (is there network on this host?)."
    python3 -m uv python install --quiet 3.13 || fail "uv could not fetch Python 3.13 (is there network on this host?)."
    PYTHON="$(python3 -m uv python find 3.13)"
  fi
  use_environment requirements.txt
fi
if [ "${1:-}" = --install ]; then exit 0; fi
cd "$root"

child="" stopping=""
# Only the first signal is passed on: a second one would kill the training while it saves.
stop() {
  [ -z "$stopping" ] || return 0
  stopping=yes
  [ -z "$child" ] || kill -TERM "$child" 2>/dev/null || true
}
trap stop TERM INT

# Waits for the child to end and sets $code. A signal to this script interrupts `wait` but not the child; bash keeps the
# code of a child that has ended.
await() {
  while kill -0 "$child" 2>/dev/null; do wait "$child" || true; done
  code=0
  wait "$child" || code=$?
}

crashes=0
while true; do
  # In a process group of its own: a signal to the whole group of this script, as Slurm and Ctrl-C send, would reach
  # the training a second time.
  set -m
  "$python" -m nca_jax.main "$@" &
  child=$!
  set +m
  [ -z "$stopping" ] || kill -TERM "$child" 2>/dev/null || true # the signal came before there was a child
  await

  case "$code" in 0 | 2) exit "$code" ;; esac
  [ -z "$stopping" ] || exit 75
  if [ "$code" -ne 75 ]; then
    if [ "$crashes" -ge "$retries" ]; then
      say "worker: exit code $code, and no restart is left of $retries" >&2
      exit "$code"
    fi
    crashes=$((crashes + 1))
  fi
  say "worker: exit code $code, starting again in $pause s ($crashes of $retries restarts after crashes)" >&2
  sleep "$pause" &
  child=$!
  [ -z "$stopping" ] || kill "$child"
  await
  [ -z "$stopping" ] || exit 75
done
