#!/usr/bin/env bash
# Runs the tests in an environment of their own.
#
#   bash launch/test.sh [--all] [PYTEST ARGUMENT ...]
#
#   --all   also the tests marked slow: real model, many processes
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
exec "$python" -m pytest -m "$selection" "$@"
