#!/usr/bin/env bash
# Train with recipes/distilled_rl.yaml; every argument is a Hydra override, for example student=local student.model=PATH.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
exec .venv/bin/distilled-rl train distilled_rl "$@"
