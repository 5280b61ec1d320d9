#!/usr/bin/env bash
# Runs a command on this host beyond the end of the ssh session that starts it.
#
#   bash launch/detached.sh start DIRECTORY COMMAND [ARGUMENT ...]   leaves alone what DIRECTORY has running already
#   bash launch/detached.sh running DIRECTORY                        exits with 0 if it runs, with 1 if not
#   bash launch/detached.sh follow DIRECTORY                         prints the log from its end until the command ends
#
# DIRECTORY holds the log, log.before of the last start, and exit_code once the command has ended. Lines NAME=VALUE in
# DIRECTORY/environment become its environment: for what must not stand in a command line.
set -euo pipefail

action="$1" directory="$(mkdir -p -- "$2" && cd -- "$2" && pwd)"
shift 2

# The command and all that it started hold the lock; the kernel lets go of it when the last of them is gone.
lock="$directory/lock"
touch "$lock"
running() { ! flock --shared --nonblock "$lock" true; }

case "$action" in
  start)
    if running; then
      echo "already running, log: $directory/log"
      exit 0
    fi
    rm -f "$directory/exit_code"
    [ ! -e "$directory/log" ] || mv "$directory/log" "$directory/log.before"
    if [ -e "$directory/environment" ]; then
      set -a
      # shellcheck source=/dev/null
      . "$directory/environment"
      set +a
    fi
    # shellcheck disable=SC2016
    setsid nohup flock --nonblock "$lock" bash -c '
      code=0
      "${@:2}" || code=$?
      printf "%s\n" "$code" >"$1/exit_code.tmp"
      mv "$1/exit_code.tmp" "$1/exit_code"' detached "$directory" "$@" >>"$directory/log" 2>&1 </dev/null &
    echo "started, log: $directory/log"
    ;;
  running) running ;;
  follow)
    tail -n 100 -f "$directory/log" &
    flock --shared "$lock" true
    sleep 0.3 # what tail has not read yet
    kill $!
    ;;
esac
