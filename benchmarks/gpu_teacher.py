"""Scoring packed responses with a teacher of Qwen3-8B's shape on one GPU: the head, the needed rows alone, copying the weights.

    python benchmarks/gpu_teacher.py --out gpu_teacher.json
    python benchmarks/gpu_teacher.py --tiny     # the same code on a CPU, two small layers: no goals, and times without meaning

The weights are random, nothing is downloaded, neither verl nor vLLM runs. Rows of random tokens, their lengths uniform, are packed
without padding into micro-batches [1, tokens] of at most `--max-tokens`, with position ids from 0 in every row, as verl does with
`use_remove_padding`. Attention is flash-attention 2 where it can be imported, else torch's sdpa once per row, and the log-probs
come from flash-attn's kernel or from torch (`row_kernel` in head.py); the output says which.

    body     every row through the layers
    every    the same, then `next_token_log_probs` (distilled_rl/teacher/head.py), `--chunk` rows of logits at once
    needed   as `every`, for `--share` of the rows, taken evenly over the lengths
    copy     all parameters from pinned host memory to the device, as an off-loaded teacher's before each use

Time: median over interleaved rounds (CUDA events), after a round that warms up. Memory: the peak beside the weights. Exit status 1
when a goal is missed: the head adds at most 8 % to the body, needed rows take at most 0.45 of every row's time, and the head's
log-probs are dense float32 ones of the same logits within 1e-3.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.import_utils import is_flash_attn_2_available

from distilled_rl.teacher.cost import Batch, Decoder, forward_operations
from distilled_rl.teacher.head import next_token_log_probs, row_kernel

HEAD_GOAL, NEEDED_GOAL, DIFFERENCE_GOAL = 0.08, 0.45, 1e-3
QWEN3_8B = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "tie_word_embeddings": False,
}
TINY = QWEN3_8B | {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 320,
}
MIB = 2**20


@dataclass(frozen=True)
class Settings:
    """What is measured: ``rows`` of ``shortest`` to ``longest`` tokens, prompt and response together."""

    rows: int
    shortest: int
    longest: int
    share: float
    max_tokens: int
    chunk: int
    rounds: int
    seed: int


@dataclass(frozen=True)
class Packed:
    """Rows one after the other. ``ids``, ``positions``: int64 [1, tokens]; ``offsets``: int32 [rows + 1], on the device."""

    lengths: list[int]
    ids: Tensor
    positions: Tensor
    offsets: Tensor


def rowwise_sdpa(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, scaling: float, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attend within each row, one causal sdpa call for each: [1, heads, tokens, d] in, [1, tokens, heads, d] out."""
    rows = zip(*(x.split(kwargs["row_lengths"], dim=2) for x in (query, key, value)), strict=True)
    out = [F.scaled_dot_product_attention(*row, is_causal=True, scale=scaling, enable_gqa=True) for row in rows]
    return torch.cat(out, dim=2).transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register("rowwise_sdpa", rowwise_sdpa)


def attention_of(device: torch.device) -> str:
    return "flash_attention_2" if device.type == "cuda" and is_flash_attn_2_available() else "rowwise_sdpa"


def build_teacher(shape: dict[str, Any], device: torch.device, dtype: torch.dtype, seed: int) -> Any:
    """Return a model with random weights, made on the device."""
    torch.manual_seed(seed)
    config = Qwen3Config(**{key: value for key, value in shape.items() if key != "model_type"})
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention_of(device))
    return model.eval().requires_grad_(False)


def draw(settings: Settings, vocabulary: int) -> list[Tensor]:
    """Return rows of random tokens, int64 [j] each."""
    g = torch.Generator().manual_seed(settings.seed)
    lengths = torch.randint(settings.shortest, settings.longest + 1, (settings.rows,), generator=g)
    return [torch.randint(0, vocabulary, (length,), generator=g) for length in lengths.tolist()]


def choose(lengths: Sequence[int], share: float) -> list[int]:
    """Return about ``share`` of the rows, evenly from short to long, so that they hold about that share of the tokens."""
    order = sorted(range(len(lengths)), key=lambda row: lengths[row])
    return sorted(row for rank, row in enumerate(order) if int((rank + 1) * share + 0.5) > int(rank * share + 0.5))


def pack(rows: Sequence[Tensor], max_tokens: int, device: torch.device) -> list[Packed]:
    """Return the rows in their order, in micro-batches of at most ``max_tokens`` tokens (or one longer row)."""
    groups: list[list[Tensor]] = [[]]
    for row in rows:
        if groups[-1] and sum(map(len, groups[-1])) + len(row) > max_tokens:
            groups.append([])
        groups[-1].append(row)
    return [
        Packed(
            lengths=[len(row) for row in group],
            ids=torch.cat(group)[None].to(device),
            positions=torch.cat([torch.arange(len(row)) for row in group])[None].to(device),
            offsets=torch.tensor([0, *map(len, group)]).cumsum(0).int().to(device),
        )
        for group in groups
    ]


@torch.no_grad()
def hidden_states(model: Any, batch: Packed) -> Tensor:
    """Return the last hidden states, [tokens, hidden]."""
    if model.config._attn_implementation == "flash_attention_2":
        longest = max(batch.lengths)
        rows: dict[str, Any] = {
            "cu_seq_lens_q": batch.offsets,
            "cu_seq_lens_k": batch.offsets,
            "max_length_q": longest,
            "max_length_k": longest,
        }
    else:
        rows = {"row_lengths": batch.lengths}
    return model.model(batch.ids, position_ids=batch.positions, use_cache=False, **rows).last_hidden_state[0]


def score(model: Any, batches: Sequence[Packed], chunk: int) -> list[Tensor]:
    """Return each row's log-probs, float32 [j], shifted left by one; the last entry of a row is a dummy 0."""
    result = []
    for batch in batches:
        hidden = hidden_states(model, batch)
        log_probs = next_token_log_probs(hidden, model.lm_head.weight, batch.ids[0].roll(-1), chunk)
        log_probs[batch.offsets[1:].long() - 1] = 0
        result += log_probs.split(batch.lengths)
    return result


class Stopwatch:
    """Seconds and peak bytes of calls, by name; on a CPU no bytes."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.times: dict[str, list[float]] = {}
        self.peaks: dict[str, int | None] = {}

    def measure(self, name: str, call: Callable[[], Any], warm_up: bool) -> None:
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            result = call()
            end.record()
            torch.cuda.synchronize()
            seconds = start.elapsed_time(end) / 1000
            self.peaks[name] = max(self.peaks.get(name) or 0, torch.cuda.max_memory_allocated() - before)
        else:
            begin = time.perf_counter()
            result = call()
            seconds = time.perf_counter() - begin
            self.peaks[name] = None
        del result
        if not warm_up:
            self.times.setdefault(name, []).append(seconds)


def head_difference(model: Any, batch: Packed, chunk: int) -> float:
    """Return the largest difference between the head and a dense log-softmax in float32 of one chunk's logits."""
    hidden, targets = hidden_states(model, batch)[:chunk], batch.ids[0].roll(-1)[:chunk]
    dense = F.linear(hidden, model.lm_head.weight).float().log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)
    return float((next_token_log_probs(hidden, model.lm_head.weight, targets, chunk) - dense).abs().max())


def run(shape: dict[str, Any], settings: Settings, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Measure, and return all figures."""
    model = build_teacher(shape, device, dtype, settings.seed)
    rows = draw(settings, shape["vocab_size"])
    lengths = [len(row) for row in rows]
    chosen = choose(lengths, settings.share)
    every = pack(rows, settings.max_tokens, device)
    needed = pack([rows[row] for row in chosen], settings.max_tokens, device)
    parameters = [parameter.data for parameter in model.parameters()]
    pinned = [torch.empty(x.shape, dtype=x.dtype, pin_memory=device.type == "cuda") for x in parameters]
    for host, parameter in zip(pinned, parameters, strict=True):
        host.copy_(parameter)

    def body() -> None:
        for batch in every:
            hidden_states(model, batch)

    def copy() -> None:
        for parameter, host in zip(parameters, pinned, strict=True):
            parameter.copy_(host, non_blocking=True)

    cases: dict[str, Callable[[], Any]] = {
        "body": body,
        "every": lambda: score(model, every, settings.chunk),
        "needed": lambda: score(model, needed, settings.chunk),
        "copy": copy,
    }
    watch = Stopwatch(device)
    for number in range(settings.rounds + 1):
        for name, call in cases.items():
            watch.measure(name, call, warm_up=number == 0)
    seconds = {name: statistics.median(times) for name, times in watch.times.items()}
    full, part = score(model, every, settings.chunk), score(model, needed, settings.chunk)
    difference = max(float((full[row] - own).abs().max()) for row, own in zip(chosen, part, strict=True))

    decoder = Decoder.from_config(shape)
    operations = {
        "body": forward_operations(decoder, Batch.of(lengths), head_tokens=0).total,
        "every": forward_operations(decoder, Batch.of(lengths)).total,
        "needed": forward_operations(decoder, Batch.of(lengths[row] for row in chosen)).total,
    }
    tokens = {"body": sum(lengths), "every": sum(lengths), "needed": sum(lengths[row] for row in chosen)}
    weight_bytes = sum(x.numel() * x.element_size() for x in parameters)
    return {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "attention": model.config._attn_implementation,
        "log_prob_kernel": row_kernel(device)[0],
        "dtype": str(dtype),
        "settings": asdict(settings),
        "parameters": decoder.parameters,
        "weight_bytes": weight_bytes,
        "micro_batches": {"every": len(every), "needed": len(needed)},
        "rows": {"every": len(rows), "needed": len(chosen)},
        "tokens": tokens,
        "token_share": tokens["needed"] / tokens["every"],
        "seconds": seconds,
        "fastest": {name: min(times) for name, times in watch.times.items()},
        "peak_bytes": watch.peaks,
        "operations": operations,
        "tera_per_second": {name: count / seconds[name] / 1e12 for name, count in operations.items()},
        "copy_bytes_per_second": weight_bytes / seconds["copy"],
        "head_share": seconds["every"] / seconds["body"] - 1,
        "needed_ratio": seconds["needed"] / seconds["every"],
        "copy_over_needed": seconds["copy"] / seconds["needed"],
        "head_difference": head_difference(model, every[0], settings.chunk),
        "needed_difference": difference,
    }


def goals(report: dict[str, Any]) -> list[tuple[str, float, float, bool]]:
    """Return name, figure, limit, and whether the goal is met."""
    limits = {"head_share": HEAD_GOAL, "needed_ratio": NEEDED_GOAL, "head_difference": DIFFERENCE_GOAL}
    return [(name, report[name], limit, report[name] <= limit) for name, limit in limits.items()]


def print_report(report: dict[str, Any]) -> None:
    settings, counts = report["settings"], report["micro_batches"]
    print(
        f"{report['device']}, torch {report['torch']}, {report['dtype']}, attention: {report['attention']}, "
        f"log-probs: {report['log_prob_kernel']}\n"
        f"{report['parameters']:,} parameters; {settings['rows']} rows of {settings['shortest']} to {settings['longest']} "
        f"tokens in {counts['every']} micro-batches, {report['rows']['needed']} needed in {counts['needed']} "
        f"({report['token_share']:.1%} of the tokens); seed {settings['seed']}, median of {settings['rounds']} rounds (fastest)\n"
        f"{'':>7} {'tokens':>8} {'seconds':>18} {'TFLOP/s':>8} {'peak MiB':>9}"
    )
    for name, seconds in report["seconds"].items():
        times = f"{seconds:.4f} ({report['fastest'][name]:.4f})"
        rate = f"{report['tera_per_second'][name]:.1f}" if name in report["tera_per_second"] else ""
        peak = report["peak_bytes"][name]
        memory = "" if peak is None else f"{peak / MIB:.0f}"
        print(f"{name:>7} {report['tokens'].get(name, ''):>8} {times:>18} {rate:>8} {memory:>9}")
    print(
        f"the head adds {report['head_share']:.1%}; needed rows take {report['needed_ratio']:.3f} of every row's time; "
        f"copying {report['weight_bytes'] / MIB:.0f} MiB at {report['copy_bytes_per_second'] / 1e9:.1f} GB/s takes "
        f"{report['copy_over_needed']:.3f} of the needed rows' time\n"
        f"largest difference: head to dense {report['head_difference']:.1e}, needed to every row {report['needed_difference']:.1e}"
    )


def main(
    tiny: Annotated[bool, typer.Option("--tiny", help="Two layers and ten short rows on the CPU; no goals.")] = False,
    rows: Annotated[int, typer.Option(min=2)] = 64,
    shortest: Annotated[int, typer.Option(help="Tokens.", min=2)] = 512,
    longest: Annotated[int, typer.Option(help="Tokens.", min=2)] = 4096,
    share: Annotated[float, typer.Option(help="Part of the rows that is needed.", min=0.01, max=1.0)] = 0.4,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of a micro-batch.", min=1)] = 40_960,
    chunk: Annotated[int, typer.Option(help="Rows of logits at once.", min=1)] = 2048,
    rounds: Annotated[int, typer.Option(help="Timed rounds, the cases in turn.", min=1)] = 3,
    seed: Annotated[int, typer.Option()] = 0,
    out: Annotated[Path | None, typer.Option(help="Write the figures as JSON here.")] = None,
    no_assert: Annotated[bool, typer.Option("--no-assert", help="Exit with 0 whatever is missed.")] = False,
) -> None:
    """Measure and print."""
    if tiny:
        torch.set_num_threads(1)
        settings = Settings(10, 16, 64, share, 160, 48, rounds, seed)
        report = run(TINY, settings, torch.device("cpu"), torch.float32)
    elif not torch.cuda.is_available():
        sys.exit("torch finds no GPU: --tiny runs the same code on the CPU")
    else:
        settings = Settings(rows, shortest, longest, share, max_tokens, chunk, rounds, seed)
        report = run(QWEN3_8B, settings, torch.device("cuda"), torch.bfloat16)
    print_report(report)
    results = [] if tiny else goals(report)
    for name, figure, limit, met in results:
        print(f"{'PASS' if met else 'FAIL'}  {name} {figure:.4g}, at most {limit:g}")
    if out:
        report["goals"] = {name: {"limit": limit, "met": met} for name, _, limit, met in results}
        out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    sys.exit(0 if no_assert or all(met for *_, met in results) else 1)


if __name__ == "__main__":
    typer.run(main)
