#!/usr/bin/env bash
# Two steps of each mode on DAPO's real problems with Qwen3's real tokenizer and tiny random models, on a CPU.
# DISTILLED_RL_SHARED names a folder with data/train/train_dapo.parquet and data/tokenizer_qwen3/; without it the hub's copies are used.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh --cpu
. .venv/bin/activate
# A vocabulary of 151,936 makes the products large: every process may use all cores, unlike in the miniature's runs.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(nproc)}
out=outputs/cpu_dapo shared=${DISTILLED_RL_SHARED:-../shared}/data
problems=$shared/train/train_dapo.parquet tokenizer=$shared/tokenizer_qwen3
[ -f "$problems" ] || problems=BytedTsinghua-SIA/DAPO-Math-17k
[ -d "$tokenizer" ] || { tokenizer=$out/tokenizer; hf download Qwen/Qwen3-0.6B --include 'tokenizer*' --local-dir "$tokenizer"; }
for size in student teacher; do
    python -m distilled_rl.tiny_models --tokenizer "$tokenizer" --out "$out/models/$size" --size "$size"
done
python scripts/prepare_data.py "$problems" --out "$out/data" --tokenizer "$out/models/student" --max-prompt-tokens 512 --holdout 64
exec distilled-rl train cpu_dapo "$@"
