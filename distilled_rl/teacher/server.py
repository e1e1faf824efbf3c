"""The served teacher: verl's vLLM teacher pool, without verl's distillation loss, and its log-probs aligned to responses.

verl starts the teacher pool only when ``distillation.enabled`` is true, and then adds a distillation loss to the actor's.
``distillation.distillation_loss.loss_mode: none``, registered here, contributes a constant zero: the teacher's signal
reaches the update through the advantages alone. (A coefficient of 0 on one of verl's losses would not do: 0 * inf is nan.)
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import torch
from omegaconf import DictConfig
from tensordict import TensorDict
from verl.experimental.teacher_loop.teacher_manager import AsyncTeacherLLMServerManager
from verl.trainer.distillation.losses import (
    DISTILLATION_LOSS_REGISTRY,
    DistillationLossSettings,
    register_distillation_loss,
)
from verl.workers.utils.padding import no_padding_2_padding, response_from_nested

LOSS_MODE = "none"

# A response this long whose every teacher log-prob is exactly 0 is taken for an unfilled buffer. Shorter ones may be real: a
# saturated teacher gives single tokens a log-prob of 0 in float32.
PLACEHOLDER_TOKENS = 8


def no_distillation_loss(
    config: Any, distillation_config: Any, model_output: dict, data: TensorDict
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return zeros [B, T] without a gradient, in the shape that verl's distillation losses have."""
    log_probs = no_padding_2_padding(model_output["log_probs"].detach(), data)
    return torch.zeros_like(log_probs), {}


if LOSS_MODE not in DISTILLATION_LOSS_REGISTRY:
    register_distillation_loss(
        DistillationLossSettings(names=[LOSS_MODE], use_estimator=True)  # type: ignore[arg-type]
    )(no_distillation_loss)


class ServedTeacher:
    """verl's teacher servers, asked by the trainer for the rows that it chooses, after the advantages are known.

    (The agent loops ask for every row as it is finished, which overlaps with generation.)
    """

    def __init__(self, config: DictConfig, clients: dict[str, Any]) -> None:
        self._manager = AsyncTeacherLLMServerManager(config, clients)

    def score(self, sequences: Sequence[torch.Tensor], routes: Sequence[Any]) -> TensorDict:
        """Score whole sequences of token ids, int [j] each, by the teachers that ``routes`` name (None: the only one).

        Returns ``teacher_logprobs`` and ``teacher_ids`` as the agent loops write them, nested [B, j, 1].
        Raises what the server raised, with the names of the teachers.
        """
        try:
            scored = asyncio.run(self._score(sequences, routes))
        except Exception as error:
            paths = [teacher.model_path for teacher in self._manager.teacher_model_configs.values()]
            raise RuntimeError(f"the teacher server of {', '.join(map(str, paths))} failed: {error}") from error
        ids, log_probs = zip(*scored, strict=True)
        return TensorDict(
            {
                "teacher_logprobs": torch.nested.as_nested_tensor(list(log_probs), layout=torch.jagged),
                "teacher_ids": torch.nested.as_nested_tensor(list(ids), layout=torch.jagged),
            },
            batch_size=len(sequences),
        )

    async def _score(
        self, sequences: Sequence[torch.Tensor], routes: Sequence[Any]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        requests = (
            self._manager.compute_teacher_logprobs_single(sequence_ids=sequence.tolist(), routing_key=route)
            for sequence, route in zip(sequences, routes, strict=True)
        )
        return await asyncio.gather(*requests)


def align_teacher_log_probs(
    teacher_log_probs: torch.Tensor, teacher_ids: torch.Tensor, responses: torch.Tensor, response_mask: torch.Tensor
) -> torch.Tensor:
    """Return the teacher's log-prob of each sampled response token, float32 nested [B, j] aligned with ``old_log_probs``.

    ``teacher_log_probs`` float and ``teacher_ids`` int: nested [B, j, 1] over prompt and response, shifted left by one (entry
    p belongs to token p + 1), the last entry a dummy, as verl's server writes them
    (verl/workers/rollout/vllm_rollout/utils.py, ``extract_prompt_logprobs``). ``responses`` int and ``response_mask``: nested
    [B, j] over the response.

    Raises ``ValueError`` when the teacher scored a token that the student did not sample, or when a response of at
    least ``PLACEHOLDER_TOKENS`` live tokens carries placeholder zeros only.
    """
    mask: Any = response_mask  # torch declares no methods of nested tensors
    log_probs = response_from_nested(teacher_log_probs, response_mask)
    ids = response_from_nested(teacher_ids, response_mask)
    values = log_probs.values().squeeze(-1).float()
    scored, sampled = ids.values().squeeze(-1).long(), responses.values().long()
    if scored.shape != sampled.shape:
        raise ValueError(
            f"the teacher scored {scored.numel()} response tokens but the student sampled {sampled.numel()}: prompt and "
            "response reached the teacher with other lengths than the trainer holds"
        )
    live = response_mask.values().bool()
    rows = torch.repeat_interleave(torch.arange(response_mask.size(0)), mask.offsets().diff())
    wrong = live & (scored != sampled)
    if wrong.any():
        first = int(wrong.nonzero()[0])
        raise ValueError(
            f"the teacher scored token id {int(scored[first])} where the student sampled {int(sampled[first])} (response "
            f"{int(rows[first])}; {int(wrong.sum())} of {int(live.sum())} tokens differ): teacher and student must share "
            "token ids and see the same sequence"
        )
    count = torch.zeros(response_mask.size(0), dtype=torch.long).index_add_(0, rows, live.long())
    zeros = torch.zeros_like(count).index_add_(0, rows, (live & (values == 0)).long())
    placeholder = ((count >= PLACEHOLDER_TOKENS) & (zeros == count)).nonzero().flatten().tolist()
    if placeholder:
        raise ValueError(
            f"the teacher's log-probs of response(s) {placeholder[:8]} are all exactly 0: these are placeholders, not scores; "
            "check the teacher server"
        )
    return torch.nested.nested_tensor_from_jagged(
        values,
        offsets=mask.offsets(),
        min_seqlen=mask._get_min_seqlen(),
        max_seqlen=mask._get_max_seqlen(),
    )
