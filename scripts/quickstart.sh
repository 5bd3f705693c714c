#!/usr/bin/env bash
# From a fresh clone to a policy that learns: sets the machine up once, then trains the arithmetic recipe.
#
#   scripts/quickstart.sh                           SmolLM2-135M learns one-digit sums, in minutes, on two CPU cores
#   scripts/quickstart.sh max_staleness=4 seed=1    anything train.py takes
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/setup.sh
echo "quickstart: .venv/bin/python train.py +recipe=arithmetic $*"
exec .venv/bin/python train.py +recipe=arithmetic "$@"
