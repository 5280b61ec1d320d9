# shellcheck shell=bash
# Sourced by the scripts that start jobs elsewhere: options, and commands that a dry run prints instead.

# quoted WORD...: the words as a line that a shell reads as these words.
quoted() {
  local word line="" quote="'\\''"
  for word; do
    [[ "$word" =~ ^[A-Za-z0-9_./:=@%+,-]+$ ]] || word="'${word//\'/"$quote"}'"
    line+="${line:+ }$word"
  done
  printf '%s' "$line"
}

# usage: the comment at the head of the running script.
usage() { awk 'NR > 1 && !/^#/ {exit} NR > 1 && !/^#SBATCH/ {sub(/^# ?/, ""); print}' "$0"; }

# parse_options VALUES FLAGS ARGUMENT...: reads --NAME=VALUE and --FLAG into option[NAME], and what follows a lone --
# into arguments. VALUES and FLAGS list the names; --dry-run and --help there always are.
parse_options() {
  ((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] >= 404)) ||
    fail "this needs bash 4.4 or newer (macOS: brew install bash)."
  local values=" $1 " flags=" $2 dry-run " name
  shift 2
  declare -gA option=()
  declare -ga arguments=()
  while [ $# -gt 0 ]; do
    name="${1#--}"
    name="${name%%=*}"
    case "$1" in
      --)
        arguments=("${@:2}")
        return
        ;;
      --help)
        usage
        exit 0
        ;;
      --*=*)
        [[ "$values" == *" $name "* ]] || fail "there is no option --$name=...; --help lists them."
        option["$name"]="${1#*=}"
        ;;
      --*)
        [[ "$values" != *" $name "* ]] || fail "--$name needs a value, as in --$name=...; --help tells which."
        [[ "$flags" == *" $name "* ]] || fail "there is no option --$name; --help lists them."
        option["$name"]=yes
        ;;
      *) fail "$1 is not an option; arguments of nca_jax.main come after a lone --." ;;
    esac
    shift
  done
}

# need_options NAME...: fails unless each was given a value.
need_options() {
  local name
  for name; do
    [ -n "${option["$name"]:-}" ] || fail "--$name=... is missing; --help tells what it is."
  done
}

# job_arguments: what nca_jax.main gets, --workdir among it.
job_arguments() {
  [[ " ${arguments[*]} " == *" --config"[=\ ]* ]] ||
    fail "the job's --config=... is missing: arguments of nca_jax.main come after a lone --."
  [[ " ${arguments[*]} " != *" --workdir"[=\ ]* ]] || fail "--workdir=... belongs before the lone --, once."
  arguments+=("--workdir=${option[workdir]}")
}

dry_run() { [ -n "${option[dry-run]:-}" ]; }

# run COMMAND...: runs it or, in a dry run, prints it as it could be pasted.
run() { if dry_run; then say "$(quoted "$@")"; else "$@"; fi; }

# note TEXT: what a dry run cannot know.
note() { if dry_run; then say "# $*"; fi; }
