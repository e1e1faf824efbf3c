#!/usr/bin/env bash
# The miniature's table: modes x five teachers x seeds. Hours on two cores; call again to continue.
# Options: --teachers, --modes, --seeds, --steps, --out (see --help).
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh --cpu
exec .venv/bin/distilled-rl miniature-table "$@"
