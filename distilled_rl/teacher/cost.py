"""What a teacher costs: operations, bytes, and seconds of a step's scoring, and the student's operations beside them.

An operation is one multiplication or one addition of numbers, so that [m, k] times [k, n] takes 2 m k n. Matrix products alone
are counted; norms, rotary embedding, activations, and softmax are not (few operations, though not little time). ``rows`` are
sequences, prompt and response together. All numbers are of the whole model, however many devices share it. Imports neither
torch nor verl.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from distilled_rl.teacher.decoder import Decoder


@dataclass(frozen=True)
class Batch:
    """Sequences in the three numbers that their cost depends on: how many, their tokens, and the sum of squared lengths."""

    rows: float
    tokens: float
    squares: float

    @classmethod
    def of(cls, lengths: Iterable[int]) -> "Batch":
        """Count sequences of these lengths, prompt and response together."""
        lengths = list(lengths)
        return cls(len(lengths), sum(lengths), sum(length * length for length in lengths))

    @classmethod
    def around(cls, rows: float, mean: float, spread: float = 0.0) -> "Batch":
        """Describe ``rows`` sequences by mean length and ``spread``, the standard deviation of the length over its mean."""
        return cls(rows, rows * mean, rows * mean * mean * (1 + spread * spread))

    @property
    def pairs(self) -> float:
        """Pairs of a token and one that it attends to, itself or an earlier one of its sequence."""
        return (self.squares + self.tokens) / 2


@dataclass(frozen=True)
class Operations:
    """``body``: the matrices of the layers. ``attention``: scores and values, causal. ``head``: the output embedding."""

    body: float
    attention: float
    head: float

    @property
    def total(self) -> float:
        return self.body + self.attention + self.head


def forward_operations(decoder: Decoder, batch: Batch, head_tokens: float | None = None) -> Operations:
    """Count one forward pass, which is a scoring pass; the head at ``head_tokens`` tokens, by default at all."""
    return Operations(
        body=2 * decoder.layers * decoder.layer_weights * batch.tokens,
        attention=4 * decoder.layers * decoder.heads * decoder.head_dim * batch.pairs,
        head=2 * decoder.hidden * decoder.vocabulary * (batch.tokens if head_tokens is None else head_tokens),
    )


def training_operations(decoder: Decoder, batch: Batch, checkpointing: bool = True) -> Operations:
    """Count one update over the batch: a forward pass, a backward pass of twice as many, and with gradient checkpointing the
    layers (not the head) once more. Flash attention's own recomputation of scores is not counted."""
    once = forward_operations(decoder, batch)
    layers = 4 if checkpointing else 3
    return Operations(layers * once.body, layers * once.attention, 3 * once.head)


def generation_operations(decoder: Decoder, batch: Batch, response_tokens: float) -> Operations:
    """Count the sampling of ``response_tokens`` tokens in all: each token but a sequence's last goes through the layers once,
    with a key-value cache. Prompts count once per response; a server that shares them between responses does less."""
    read = Batch(batch.rows, batch.tokens - batch.rows, batch.squares - 2 * batch.tokens + batch.rows)  # lengths less 1
    return forward_operations(decoder, read, response_tokens)


@dataclass(frozen=True)
class StepCost:
    """The student's operations in one step: sampling, the pass for old log-probs, the update."""

    generation: Operations
    old_log_probs: Operations
    update: Operations

    @property
    def total(self) -> float:
        return self.generation.total + self.old_log_probs.total + self.update.total


@dataclass(frozen=True)
class Pass:
    """One scoring pass. ``copy_bytes``: from host to device, 0 for a teacher that stays there and for an empty pass."""

    rows: float
    tokens: float
    operations: Operations
    copy_bytes: float

    def seconds(self, operations_per_second: float, copy_bytes_per_second: float = math.inf) -> float:
        """Return the time at a sustained rate of operations (all devices together) and of copying, one after the other."""
        if not (operations_per_second > 0 and copy_bytes_per_second > 0):
            raise ValueError(f"rates must be positive: {operations_per_second=}, {copy_bytes_per_second=}")
        return self.operations.total / operations_per_second + self.copy_bytes / copy_bytes_per_second


@dataclass(frozen=True)
class ScoringCost:
    """Scoring the needed responses, and every one. Bytes: of the weights, of the logits of a chunk, of a micro-batch's
    activations, and of the key-value cache of the needed rows if they were all held at once."""

    needed: Pass
    every: Pass
    weight_bytes: int
    logits_bytes: float
    activation_bytes: float
    kv_cache_bytes: float

    @property
    def ratio(self) -> float:
        """Operations of the needed pass over those of the whole."""
        return self.needed.operations.total / self.every.operations.total


def scoring_cost(
    teacher_config: Mapping[str, Any],
    prompt_tokens: float,
    response_tokens: float,
    rows: float,
    share: float,
    dtype: str = "bf16",
    *,
    spread: float = 0.0,
    offloaded: bool = True,
    chunk: int = 1024,
    micro_batch_tokens: int = 40_960,
) -> ScoringCost:
    """Return what one step's scoring costs.

    ``prompt_tokens``, ``response_tokens``: mean lengths, taken to be the same in the scored rows. ``rows``: responses of a step.
    ``share``: the part of them that the method needs, 0 to 1. ``dtype``: of the weights, one of ``DTYPE_BYTES``; logits count as
    float32. ``spread``: see :meth:`Batch.around`; 0 counts too little attention where lengths differ. ``offloaded``: the weights
    are in host memory between uses. ``chunk``: tokens whose logits are held at once. ``micro_batch_tokens``: most tokens of one
    forward pass. Raises ``ValueError`` for a number out of range and as :meth:`Decoder.from_config`.
    """
    if not 0 <= share <= 1 or min(chunk, micro_batch_tokens) < 1 or spread < 0:
        raise ValueError(
            f"out of range: {share=} (0 to 1), {spread=} (0 or more), {chunk=}, {micro_batch_tokens=} (1 or more)"
        )
    decoder, every = Decoder.from_config(teacher_config), _step_batch(prompt_tokens, response_tokens, rows, spread)
    needed = Batch(share * every.rows, share * every.tokens, share * every.squares)
    weights = decoder.weight_bytes(dtype)

    def one_pass(batch: Batch) -> Pass:
        copied = weights if offloaded and batch.rows else 0
        return Pass(batch.rows, batch.tokens, forward_operations(decoder, batch), copied)

    return ScoringCost(
        needed=one_pass(needed),
        every=one_pass(every),
        weight_bytes=weights,
        logits_bytes=decoder.logits_bytes(min(chunk, every.tokens)),
        activation_bytes=decoder.activation_bytes(min(micro_batch_tokens, every.tokens), dtype),
        kv_cache_bytes=decoder.kv_cache_bytes(needed.tokens, dtype),
    )


def step_cost(
    student_config: Mapping[str, Any],
    prompt_tokens: float,
    response_tokens: float,
    rows: float,
    *,
    spread: float = 0.0,
    checkpointing: bool = True,
) -> StepCost:
    """Return the student's operations in a step of ``rows`` responses, each used in one update; as :func:`scoring_cost`."""
    decoder, batch = Decoder.from_config(student_config), _step_batch(prompt_tokens, response_tokens, rows, spread)
    return StepCost(
        generation=generation_operations(decoder, batch, rows * response_tokens),
        old_log_probs=forward_operations(decoder, batch),
        update=training_operations(decoder, batch, checkpointing),
    )


def compare_tokens(records: Iterable[Mapping[str, Any]], rows: int) -> list[tuple[int, float, float]]:
    """Return step, logged scored tokens, and rows x share x (prompt + response) for each step that has them.

    ``records``: the objects of a run's ``metrics-*.jsonl`` (docs/metrics.md). ``rows``: the run's responses per step. The two are
    equal when every row is scored, else they differ as far as the scored rows are longer or shorter than the mean.
    """
    steps = []
    for record in records:
        data = record["data"]
        if "teacher/scored_tokens" in data:
            mean = data["prompt_length/mean"] + data["response_length/mean"]
            modelled = Batch.around(rows * data["teacher/scored_responses"], mean).tokens
            steps.append((record["step"], data["teacher/scored_tokens"], modelled))
    return steps


def _step_batch(prompt_tokens: float, response_tokens: float, rows: float, spread: float) -> Batch:
    if min(prompt_tokens, response_tokens, rows) <= 0:
        raise ValueError(f"must be positive: {prompt_tokens=}, {response_tokens=}, {rows=}")
    return Batch.around(rows, prompt_tokens + response_tokens, spread)
