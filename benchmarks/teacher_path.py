"""From vLLM's answer of a scored prompt to tensors: verl's way and the flat one, on the same synthetic log-probs.

    python benchmarks/teacher_path.py --tokens 8192 --k 0 --k 64 --out teacher_path.json

verl's way: vLLM's list of dicts, `extract_prompt_logprobs` (verl/workers/rollout/vllm_rollout/utils.py), and the
`torch.tensor` of nested lists in `AsyncTeacherLLMServerManager`. The flat way: `FlatLogprobs`, `flat_prompt_log_probs`, and
the `torch.tensor` of arrays in `ScoringClient`. Both containers are filled by vLLM's own functions, as its engine does after
every request (`build` below; in neither way part of the ratio). No engine runs, and nothing is sent.

Time: median over interleaved rounds in one process, in microseconds of this process's CPU time per token.
Exit status 1 when the flat way misses its goal (0.5 at k = 0, 1.5 at k = 64, in proportion between), or when the two
results differ.
"""

import gc
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import numpy as np
import torch
import typer
from verl.workers.rollout.vllm_rollout.utils import extract_prompt_logprobs
from vllm.logprobs import append_logprobs_for_next_position, create_prompt_logprobs

from distilled_rl.teacher.vllm_server import flat_prompt_log_probs

VOCABULARY = 151_936
Tensors = tuple[torch.Tensor, torch.Tensor]


def goal(k: int) -> float:
    """Return the most microseconds per token that the flat way may take."""
    return 0.5 + k / 64


def synthetic(tokens: int, k: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return what vLLM's worker sends: ids and log-probs [tokens - 1, k + 1], the prompt's own first, and its ranks.

    The own token is among the k most likely ones in about half of the rows.
    """
    g = np.random.default_rng(seed)
    ids = g.integers(0, VOCABULARY // (k + 1), (tokens - 1, k + 1)) * (k + 1) + np.arange(k + 1)  # no id twice in a row
    log_probs = -np.sort(g.exponential(2.0, (tokens - 1, k + 1)).astype(np.float32))
    log_probs[:, 0] = log_probs[:, -1] - 1
    ranks = np.full(tokens - 1, k + 1)
    if k:
        inside = np.flatnonzero(g.random(tokens - 1) < 0.5)
        ranks[inside] = g.integers(1, k + 1, len(inside))
        ids[inside, 0] = ids[inside, ranks[inside]]
        log_probs[inside, 0] = log_probs[inside, ranks[inside]]
    return ids.astype(np.int32), log_probs, ranks


def build(rows: tuple[np.ndarray, np.ndarray, np.ndarray], k: int, flat: bool) -> Any:
    """Fill vLLM's container as vllm/v1/engine/logprobs.py, `_update_prompt_logprobs`, does without a tokenizer."""
    result, nobody = create_prompt_logprobs(flat), itertools.repeat(None)
    for ids, log_probs, rank in zip(*(part.tolist() for part in rows), strict=True):
        append_logprobs_for_next_position(result, ids, log_probs, nobody, rank, k)
    return result


def nested_lists(container: Any, k: int) -> Tensors:
    fields: dict[str, list] = {}
    extract_prompt_logprobs(SimpleNamespace(prompt_logprobs=container), k, fields)  # type: ignore[arg-type]
    return torch.tensor(fields["prompt_ids"], dtype=torch.int32), torch.tensor(fields["prompt_logprobs"])


def flat_arrays(container: Any, k: int) -> Tensors:
    ids, log_probs = flat_prompt_log_probs(container, k)
    return torch.tensor(ids), torch.tensor(log_probs)


WAYS: dict[str, Callable[[Any, int], Tensors]] = {"verl": nested_lists, "flat": flat_arrays}


def measure(tokens: int, k: int, rounds: int, seed: int) -> dict[str, Any]:
    """Return microseconds per token of each way, and whether their results are equal."""
    rows = synthetic(tokens, k, seed)
    containers, building, times = {}, {}, {way: [] for way in WAYS}
    for way in WAYS:
        start = time.process_time()
        containers[way] = build(rows, k, way == "flat")
        building[way] = (time.process_time() - start) / tokens * 1e6
    results: dict[str, Tensors] = {}
    for _ in range(rounds):
        for way, convert in WAYS.items():
            results.pop(way, None)
            gc.collect()  # what the round before left is not this one's to collect
            start = time.process_time()
            results[way] = convert(containers[way], k)
            times[way].append((time.process_time() - start) / tokens * 1e6)
    equal = all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(results["verl"], results["flat"], strict=True))
    median = {way: statistics.median(values) for way, values in times.items()}
    return {
        "k": k,
        "microseconds_per_token": median,
        "fastest": {way: min(values) for way, values in times.items()},
        "vllm_builds": building,
        "ratio": median["verl"] / median["flat"],
        "goal": goal(k),
        "equal": equal,
        "goal_met": equal and median["flat"] <= goal(k),
    }


def main(
    tokens: Annotated[int, typer.Option(help="Tokens of the prompt.", min=1)] = 8192,
    k: Annotated[list[int] | None, typer.Option(help="0, or how many of the most likely tokens; repeatable.")] = None,
    rounds: Annotated[int, typer.Option(help="Timed rounds, the two ways in turn.", min=1)] = 7,
    seed: Annotated[int, typer.Option()] = 0,
    out: Annotated[Path | None, typer.Option(help="Write the figures as JSON here.")] = None,
) -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    print(
        f"{tokens} tokens, seed {seed}, median of {rounds} rounds (fastest), microseconds per token\n"
        f"{'k':>4} {'verl':>17} {'flat':>17} {'ratio':>7} {'goal':>5} {'equal':>6}   vLLM builds dicts, flat"
    )
    results = []
    for number in k or [0, 64]:
        r = measure(tokens, number, rounds, seed)
        results.append(r)
        verl, flat = (f"{r['microseconds_per_token'][way]:.3f} ({r['fastest'][way]:.3f})" for way in WAYS)
        print(
            f"{number:>4} {verl:>17} {flat:>17} {r['ratio']:>6.1f}x {r['goal']:>5.2f} {r['equal']!s:>6}   "
            f"{r['vllm_builds']['verl']:.1f}, {r['vllm_builds']['flat']:.1f}   {'met' if r['goal_met'] else 'MISSED'}",
            flush=True,
        )
    if out:
        settings = {"tokens": tokens, "rounds": rounds, "seed": seed, "torch": torch.__version__}
        out.write_text(json.dumps({"settings": settings, "results": results}, indent=2) + "\n", encoding="utf-8")
    sys.exit(0 if all(r["goal_met"] for r in results) else 1)


if __name__ == "__main__":
    typer.run(main)
