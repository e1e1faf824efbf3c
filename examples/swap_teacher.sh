#!/usr/bin/env bash
# Distilled RL on the miniature with each of its five teachers in turn, and a table. Half an hour on two cores; call again to continue.
# Options: --teachers, --modes, --seeds, --steps, --out (see distilled-rl miniature-table --help).
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh --cpu
exec .venv/bin/distilled-rl miniature-table --modes distilled_rl --seeds 1 --steps 20 --out outputs/swap_teacher "$@"
