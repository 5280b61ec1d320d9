# shellcheck shell=bash
# Sourced by the scripts of this folder, by .ci/run and by the commit hooks: messages, and one virtual environment.
#
#   PYTHON         the Python to build the environment with (default: the first of python3, python3.13, ... that fits)
#   NCA_JAX_VENV   where the environment lies (default: .venv-<Python version> in the repository)
#   NCA_JAX_CACHE  models and compiled programs (default: ~/.cache/nca_jax, or below XDG_CACHE_HOME)

root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"

export JAX_PLATFORMS="${JAX_PLATFORMS-cpu}"
cache="${NCA_JAX_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/nca_jax}"
# Compiled programs outlive the process: the second start of a job does not compile again.
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$cache/xla}"

say() { printf '%s\n' "$*"; }

# The same exit code as a UserError: what happened is not a bug of nca_jax.
fail() {
  printf 'error: %s\n' "$*" >&2
  exit 2
}

# need_disk PATH GIGABYTES PURPOSE: fails unless the disk that will hold PATH has room. PATH need not exist.
need_disk() {
  local directory="$1" free
  while [ ! -d "$directory" ]; do directory="$(dirname -- "$directory")"; done
  free="$(df -Pk -- "$directory" | awk 'NR == 2 {printf "%d", $4 / 1000000}')"
  [ "$free" -ge "$2" ] || fail "too little disk for $3: $2 GB needed, $free GB free at $directory."
}

# Prints "3.12" for a Python that runs and is new enough, else fails quietly.
python_version() {
  "$1" -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit(1); print(f"{v[0]}.{v[1]}")' 2>/dev/null
}

# use_environment REQUIREMENTS: sets $venv and $python; installs only if the requirement files changed since last time.
use_environment() {
  local candidates=(python3 python3.13 python3.12 python3.11) candidate base="" version="" wanted stamp log
  [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
  for candidate in "${candidates[@]}"; do
    if version="$(python_version "$candidate")"; then
      base="$candidate"
      break
    fi
  done
  [ -n "$base" ] || fail "no Python >= 3.11 found${PYTHON:+ at PYTHON=$PYTHON}: install one, or set PYTHON to its path."

  venv="${NCA_JAX_VENV:-$root/.venv-$version}"
  [[ "$venv" == /* ]] || venv="$PWD/$venv"
  python="$venv/bin/python"
  stamp="$venv/nca_jax-requirements"
  wanted="$(cd "$root" && cat requirements.txt requirements-dev.txt constraints.txt | cksum)"
  if [ -x "$python" ]; then
    [ "$(python_version "$python")" = "$version" ] ||
      fail "$venv is not of Python $version: remove it, or set NCA_JAX_VENV to another path."
    # An environment for development has everything that a run needs.
    case "$(cat "$stamp" 2>/dev/null)" in "$wanted $1" | "$wanted requirements-dev.txt") return ;; esac
  fi

  # About 1 GB when installed, and the wheels lie beside it while pip works.
  need_disk "$venv" 2 "the virtual environment"
  say "environment: Python $version in $venv (about 1 GB; the first time takes minutes)"
  mkdir -p "$venv" || fail "cannot create $venv: set NCA_JAX_VENV to a directory of yours."
  log="$venv/nca_jax-install.log"
  "$base" -m venv "$venv" >"$log" 2>&1 || fail "$base -m venv failed (Debian: apt install python3-venv), log: $log"
  (cd "$root" && "$python" -m pip install --no-input -r "$1" -c constraints.txt) >>"$log" 2>&1 ||
    fail "pip could not install $1 (is there network?), log: $log"
  printf '%s' "$wanted $1" >"$stamp"
}

# dev_tool NAME ARGUMENT...: a command of the development environment.
dev_tool() {
  use_environment requirements-dev.txt
  "$venv/bin/$1" "${@:2}"
}
