#!/usr/bin/env bash
# Everything a change must pass: format, lint, types, tests (with a real vLLM where it is installed).
#
#   scripts/test.sh              all of it; arguments go to pytest
#   scripts/test.sh -k config
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/setup.sh dev
check() {
    local began=$SECONDS
    echo "== $*"
    "$@"
    echo "== $1 took $((SECONDS - began)) s"
}
check .venv/bin/ruff format --check .
check .venv/bin/ruff check .
check .venv/bin/mypy
check .venv/bin/pytest "$@"
