#!/usr/bin/env bash
# Lint, format check, types and shell scripts: scripts/lint.sh [--fix]. Needs scripts/setup.sh --dev.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
bin=.venv/bin
if [ "${1:-}" = --fix ]; then
    "$bin/ruff" check --fix .
    "$bin/ruff" format .
else
    "$bin/ruff" check .
    "$bin/ruff" format --check .
fi
# There is no build of shellcheck for other processors than x86-64. SC1091: .venv/bin/activate is no file of ours.
if [ -x "$bin/shellcheck" ]; then
    git ls-files --cached --others --exclude-standard -- '*.sh' .ci/run | sort -u | xargs "$bin/shellcheck" --exclude=SC1091
fi
"$bin/pyright"
