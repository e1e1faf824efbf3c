"""Re-weighting the advantages of one training batch: the jagged path of `distilled_rl.objective` and verl's padded way.

verl 0.9.1 keeps a batch as nested tensors; its trainer pads them to [B, T] before it computes advantages and takes them
apart again afterwards (`verl/trainer/ppo/v1/trainer_base.py`, `_compute_advantage`). The padded way here does just that
with the teacher weights: `to_padded_tensor` on the four fields, the formula on [B, T] without any check of its inputs,
and `verl.workers.utils.padding.response_to_nested`. The jagged way is `teacher_weights` with its checks, times A.

    python benchmarks/advantage.py --rows 1024 2048 4096 8192 --out advantage.json

Time: median over interleaved repeats in one process. Memory: growth of the process's peak resident set over one call,
in a fresh process per figure (Linux: /proc/self/clear_refs and VmHWM); the inputs are not counted, the results are.
Exit status 1 when a goal is missed: 4x faster, 0.2x peak memory, results equal within 1e-5.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from verl.workers.utils.padding import response_to_nested

from distilled_rl.objective import teacher_weights

EPS_RHO = 3.0
SPEEDUP_GOAL, MEMORY_GOAL, DIFFERENCE_GOAL = 4.0, 0.2, 1e-5
MIB = 2**20


def make_batch(rows: int, args: argparse.Namespace) -> dict[str, Any]:
    """Four nested [B, j] fields, each with its own offsets, as the trainer receives them; the mask int64 as in verl."""
    g = torch.Generator().manual_seed(args.seed)
    lengths = (args.median * torch.exp(args.sigma * torch.randn(rows, generator=g))).long().clamp(1, args.max_length)
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    tokens = int(offsets[-1])
    old = -torch.rand(tokens, generator=g) * 2
    teacher = old + 0.7 * torch.randn(tokens, generator=g)
    advantages = torch.randn(rows, generator=g).repeat_interleave(lengths)
    values = {"teacher": teacher, "old": old, "advantages": advantages, "mask": torch.ones(tokens, dtype=torch.long)}
    longest = int(lengths.max())
    return {
        k: torch.nested.nested_tensor_from_jagged(v, offsets.clone(), max_seqlen=longest) for k, v in values.items()
    }


def jagged(batch: dict[str, Any]) -> Tensor:
    weights = teacher_weights(batch["teacher"], batch["old"], batch["advantages"], batch["mask"], eps_rho=EPS_RHO)
    return weights.w * batch["advantages"]


def padded(batch: dict[str, Any]) -> Tensor:
    teacher, old, advantages, mask = (batch[k].to_padded_tensor(0) for k in ("teacher", "old", "advantages", "mask"))
    mask = mask.bool()
    log_eps = torch.tensor(EPS_RHO).log()
    log_rho_bar = (teacher - old).clamp(-log_eps, log_eps) * mask
    log_geomean = log_rho_bar.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    w = torch.exp(log_rho_bar - log_geomean)
    w = torch.where((advantages > 0) & mask, w, torch.ones_like(w))
    return response_to_nested(advantages * w, batch["mask"])


WAYS: dict[str, Callable[[dict[str, Any]], Tensor]] = {"jagged": jagged, "padded": padded}


def status_bytes(field: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
    return int(line.split()[1]) * 1024


def print_peak(way: str, args: argparse.Namespace) -> None:
    """In a fresh process: the growth of the peak resident set over one call, after a small call to load the kernels."""
    WAYS[way](make_batch(8, args))
    batch = make_batch(args.rows[0], args)
    before = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak back to the present size
    result = WAYS[way](batch)
    print(status_bytes("VmHWM") - before)
    del result


def peak_bytes(way: str, rows: int, argv: list[str]) -> int:
    # glibc would keep freed buffers below 32 MiB for reuse, which hides them from the resident set
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, __file__, *argv, "--rows", str(rows), "--peak-of", way]
    return int(subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout.split()[-1])


def seconds(batch: dict[str, Any], repeats: int) -> dict[str, float]:
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for repeat in range(repeats + 1):
        for way, run in WAYS.items():
            start = time.perf_counter()
            run(batch)
            if repeat:  # the first round only warms up
                times[way].append(time.perf_counter() - start)
    return {way: statistics.median(values) for way, values in times.items()}


def measure(rows: int, args: argparse.Namespace, argv: list[str]) -> dict[str, Any]:
    batch = make_batch(rows, args)
    lengths = batch["mask"].offsets().diff()
    difference = float((jagged(batch).values() - padded(batch).values()).abs().max())  # type: ignore[operator]
    time_of = seconds(batch, args.repeats)
    del batch
    peak_of = {way: peak_bytes(way, rows, argv) for way in WAYS}
    speedup, memory = time_of["padded"] / time_of["jagged"], peak_of["jagged"] / peak_of["padded"]
    return {
        "rows": rows,
        "tokens": int(lengths.sum()),
        "mean_length": round(float(lengths.double().mean()), 1),
        "max_length": int(lengths.max()),
        "seconds": time_of,
        "peak_bytes": peak_of,
        "speedup": speedup,
        "memory_ratio": memory,
        "max_difference": difference,
        "goals_met": speedup >= SPEEDUP_GOAL and memory <= MEMORY_GOAL and difference <= DIFFERENCE_GOAL,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1024, 2048, 4096, 8192], help="responses per batch")
    parser.add_argument("--max-length", type=int, default=8192, help="lengths are clipped to [1, this]")
    parser.add_argument("--median", type=float, default=700.0, help="median of the lognormal lengths")
    parser.add_argument("--sigma", type=float, default=0.9, help="their spread: standard deviation of the log")
    parser.add_argument("--seed", type=int, default=0)
    # Ray sets OMP_NUM_THREADS=1 for an actor that asks for no CPU, as verl's TaskRunnerV1 (ray/_private/utils.py)
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--repeats", type=int, default=7, help="timed repeats per way, interleaved")
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    parser.add_argument("--peak-of", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.peak_of:
        print_peak(args.peak_of, args)
        return 0

    shared = ("max_length", "median", "sigma", "seed", "threads")
    argv = [x for name in shared for x in (f"--{name.replace('_', '-')}", str(getattr(args, name)))]
    print(
        f"lengths: lognormal, median {args.median:g}, sigma {args.sigma:g}, clipped to [1, {args.max_length}], "
        f"seed {args.seed}; torch {torch.__version__}, {args.threads} thread(s), median of {args.repeats} repeats\n"
        f"{'rows':>6} {'mean len':>9} {'padded s':>9} {'jagged s':>9} {'speed-up':>9} "
        f"{'padded MiB':>11} {'jagged MiB':>11} {'memory':>7} {'max diff':>9}  goals"
    )
    results = []
    for rows in args.rows:
        r = measure(rows, args, argv)
        results.append(r)
        print(
            f"{rows:>6} {r['mean_length']:>9.0f} {r['seconds']['padded']:>9.3f} {r['seconds']['jagged']:>9.3f} "
            f"{r['speedup']:>8.1f}x {r['peak_bytes']['padded'] / MIB:>11.0f} {r['peak_bytes']['jagged'] / MIB:>11.0f} "
            f"{r['memory_ratio']:>6.2f}x {r['max_difference']:>9.1e}  {'met' if r['goals_met'] else 'MISSED'}",
            flush=True,
        )
    if args.out:
        goals = {"speedup": SPEEDUP_GOAL, "memory_ratio": MEMORY_GOAL, "max_difference": DIFFERENCE_GOAL}
        settings = {name: getattr(args, name) for name in (*shared, "repeats")}
        report = {"goals": goals, "settings": settings, "torch": torch.__version__, "results": results}
        args.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0 if all(r["goals_met"] for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
