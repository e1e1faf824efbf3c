#!/usr/bin/env bash
# Set-up, then the four modes on tiny models through verl, Ray, vLLM, and FSDP2 on this machine's CPU, and a report.
# Options: --modes, --steps, --seeds, --teacher, --out (see --help).
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh --cpu
exec .venv/bin/distilled-rl quickstart "$@"
