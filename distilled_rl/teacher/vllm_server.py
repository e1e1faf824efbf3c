"""The fast result path of the served teacher: from vLLM's flat prompt log-probs to arrays, and whole batches per call.

verl turns vLLM's answer into nested lists, token by token (verl/workers/rollout/vllm_rollout/utils.py,
``extract_prompt_logprobs``), and makes one call per sequence. Here vLLM is asked for its flat form, which becomes two arrays
without Python per token, and a server scores all its sequences in one call.

``distillation.teacher_models.*.inference.name: distilled_rl_vllm`` selects the servers with the method ``score``, once
:func:`register` has run in the trainer's process. Importing this module imports neither vLLM nor verl; the servers are in
:mod:`distilled_rl.teacher.vllm_replica`.
"""

import asyncio
import heapq
import struct
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from vllm.logprobs import FlatLogprobs

SCORING_ENGINE = "distilled_rl_vllm"

# How often a server that has not answered yet is asked whether it works, and how long it may take to say so. Ray reports a dead
# server by itself; together these are the time, below a minute, after which one that hangs is noticed.
PROBE_SECONDS = 20.0
# An engine that finishes no request for so long counts as stuck: many times what the longest sequence takes.
STALL_SECONDS = 600.0

# Numbers that are converted together: few enough to stay in the CPU's cache.
_BLOCK = 16384


def register() -> None:
    """Make ``SCORING_ENGINE`` known to verl in this process. Idempotent; vLLM is imported when a teacher pool starts."""
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    RolloutReplicaRegistry.register(SCORING_ENGINE, _load_replica)


def _load_replica() -> Any:
    from distilled_rl.teacher.vllm_replica import ScoringReplica

    return ScoringReplica


def flat_prompt_log_probs(flat: "FlatLogprobs", k: int, length: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return token ids, int32 [S, max(k, 1)], and log-probs, float32 of the same shape, of a prompt of S tokens.

    ``flat``: what ``SamplingParams(prompt_logprobs=k, flat_logprobs=True)`` yields. ``length``: the S that is expected.

    The layout is that of verl's ``extract_prompt_logprobs``: shifted left by one, so row p belongs to token p + 1, and the
    last row a dummy of zeros. With k = 0 a row holds the prompt's own token, else the k most likely ones in the order of their
    rank. (vLLM writes k + 1 entries per token: the prompt's own first, then those k, in which the own may come once more.)

    Log-probs that are not finite are returned as they are. Raises ``ValueError`` where a position does not hold k + 1 entries,
    the first holds any, the number of positions is not ``length``, or an entry is no number.
    """
    if k < 0:
        raise ValueError(f"k is {k}: 0 for the prompt's own tokens, or a number of most likely ones")
    positions, width = len(flat), k + 1
    if positions < 1 or length not in (None, positions):
        raise ValueError(f"vLLM returned log-probs of {positions} positions for a prompt of {length or 'some'} tokens")
    tokens = positions - 1
    try:
        starts, ends = _table(flat.start_indices, "q", 1), _table(flat.end_indices, "q", 1)
        ends_at = np.arange(positions) * width  # none of the first position, then k + 1 of each
        regular = np.array_equal(ends[:-1, 0], ends_at) and np.array_equal(starts[1:-1, 0], ends_at[:-1])
        if not regular or starts[0] != 0 or not len(flat.token_ids) == len(flat.logprobs) == tokens * width:
            raise ValueError(
                f"vLLM's prompt log-probs are not {width} entries for each of {tokens} tokens, after one position without: "
                f"{len(flat.token_ids)} token ids and {len(flat.logprobs)} log-probs"
            )
        # Leaves the prompt's own token out where the most likely ones are asked for.
        return _table(flat.token_ids, "i", width, min(k, 1)), _table(flat.logprobs, "f", width, min(k, 1))
    except struct.error as error:
        raise ValueError(f"vLLM's prompt log-probs hold an entry that is no number of its type: {error}") from error


def _table(values: list, code: str, width: int, first: int = 0) -> np.ndarray:
    """Return a list of Python numbers as rows of ``width`` without their ``first`` columns, and a row of zeros after them.

    ``code``: the C type, of :mod:`struct`, which converts a list in about half the time of ``array.array`` and numpy.
    Raises ``struct.error`` for an entry that does not fit; a rest that fills no row is left out.
    """
    rows, step = len(values) // width, max(1, _BLOCK // width)
    table, block = np.empty((rows + 1, width - first), code), struct.Struct(f"{step * width}{code}")
    table[rows] = 0
    for row in range(0, rows, step):
        part = values[row * width : min(row + step, rows) * width]
        packed = block.pack(*part) if len(part) == step * width else struct.pack(f"{len(part)}{code}", *part)
        table[row : row + step][: len(part) // width] = np.frombuffer(packed, code).reshape(-1, width)[:, first:]
    return table


class ScoringClient:
    """Has the servers of one teacher score sequences: one call per server and batch, with about as many tokens each.

    ``servers``: Ray handles of :class:`distilled_rl.teacher.vllm_replica.ScoringServer`, one per replica; verl's trainer holds
    them, by the teacher's key, in ``teacher_model_manager.server_handles``. The calls go past verl's load balancer.
    """

    def __init__(self, servers: Sequence[Any]) -> None:
        if not servers:
            raise ValueError("a teacher without servers cannot score")
        self._servers = list(servers)

    async def score(self, sequences: Sequence[torch.Tensor], k: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return ids, int32 [S, max(k, 1)], and log-probs, float32 of the same shape, for each sequence of ids, int [S].

        The layout is that of :func:`flat_prompt_log_probs`. Raises what a server raised, and ``RuntimeError`` for one that no
        longer answers or works; what the others have begun they finish, and their results are dropped.
        """
        arrays = [sequence.to(device="cpu", dtype=torch.int32).numpy() for sequence in sequences]
        shares = even_shares([len(array) for array in arrays], len(self._servers))
        asked = [(server, share) for server, share in zip(self._servers, shares, strict=True) if share]
        tasks = [
            asyncio.create_task(_answer(server, [arrays[number] for number in share], k)) for server, share in asked
        ]
        try:
            answers = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        scored: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for (_, share), answer in zip(asked, answers, strict=True):
            if len(answer) != len(share):
                raise RuntimeError(f"a teacher server returned {len(answer)} results for {len(share)} sequences")
            for number, (ids, log_probs) in zip(share, answer, strict=True):
                # Ray's arrays are read-only views of its object store: copy, and let the store have its memory back.
                scored[number] = torch.tensor(ids), torch.tensor(log_probs)
        return [scored[number] for number in range(len(arrays))]


async def _answer(server: Any, arrays: list[np.ndarray], k: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return one server's answer, asking it every ``PROBE_SECONDS`` whether it still works."""
    answer = asyncio.ensure_future(server.score.remote(arrays, k))
    finished, since = -1, time.monotonic()
    while not (await asyncio.wait({answer}, timeout=PROBE_SECONDS))[0]:
        try:
            now = await asyncio.wait_for(server.finished.remote(), PROBE_SECONDS)
        except TimeoutError as error:
            raise RuntimeError(f"a teacher server has not answered for {PROBE_SECONDS:g} s") from error
        if now != finished:
            finished, since = now, time.monotonic()
        elif time.monotonic() - since > STALL_SECONDS:
            raise RuntimeError(
                f"a teacher server works on {len(arrays)} sequences and has finished none for {STALL_SECONDS:g} s"
            )
    return answer.result()


def even_shares(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Return the numbers of the sequences of each part, ascending, so that the parts have about as many tokens.

    Longest first, each to the part with the fewest tokens so far: the largest part has at most 4/3 - 1/(3 parts) times the
    tokens of the best split.
    """
    shares: list[list[int]] = [[] for _ in range(parts)]
    loads = [(0, part) for part in range(parts)]
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        load, part = loads[0]
        shares[part].append(number)
        heapq.heapreplace(loads, (load + lengths[number], part))
    return [sorted(share) for share in shares]
