#!/usr/bin/env bash
# Set up, lint, and run all tests: scripts/test.sh [pytest arguments]. Fast tests come first; the last line is pytest's.
#
# The tests run under a time limit of TEST_SECONDS (4800), after which every process they started is killed; none of these,
# no file in /dev/shm and no Ray folder stays behind in any case.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONDONTWRITEBYTECODE # see scripts/setup.sh
bash scripts/setup.sh --dev
echo "==> lint"
bash scripts/lint.sh

# Ray's files go to a folder of this run; short, because Ray puts sockets there, whose paths are limited to 107 bytes.
RAY_TMPDIR=$(mktemp -d /tmp/drl-XXXXXX)
export RAY_TMPDIR
trap 'rm -rf "$RAY_TMPDIR"' EXIT

echo "==> tests"
.venv/bin/python scripts/bounded.py "${TEST_SECONDS:-4800}" .venv/bin/python -m pytest "$@"
