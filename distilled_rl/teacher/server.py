"""The served teacher: verl's vLLM teacher pool, without verl's distillation loss, and its log-probs aligned to responses.

verl starts the teacher pool only when ``distillation.enabled`` is true, and then adds a distillation loss to the actor's.
``distillation.distillation_loss.loss_mode: none``, registered here, contributes a constant zero: the teacher's signal
reaches the update through the advantages alone. (A coefficient of 0 on one of verl's losses would not do: 0 * inf is nan.)
"""

from typing import Any

import torch
from tensordict import TensorDict
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


def server_fields(log_probs: torch.Tensor, input_ids: torch.Tensor) -> TensorDict:
    """Return an engine's log-probs, nested [B, j], as verl's teacher server writes them: ``teacher_logprobs`` float32 and
    ``teacher_ids`` int32, nested [B, j, 1].

    Entry p of a row is the log-prob of token p + 1 in both; the engine's last entry is that of a token that is not there.
    """
    nested: Any = log_probs
    offsets, given = nested.offsets(), input_ids.values()
    if not torch.equal(offsets, input_ids.offsets()):  # type: ignore[attr-defined]
        raise ValueError(
            f"the teacher's engine scored rows of {offsets.diff().tolist()[:8]}… tokens instead of "
            f"{input_ids.offsets().diff().tolist()[:8]}…"  # type: ignore[attr-defined]
        )
    ids = given.roll(-1).int()
    values = nested.values().float().clone()
    last = offsets[1:] - 1
    ids[last], values[last] = 0, 0.0
    lengths = {"min_seqlen": nested._get_min_seqlen(), "max_seqlen": nested._get_max_seqlen()}
    fields = {"teacher_logprobs": values, "teacher_ids": ids}
    return TensorDict(
        {
            name: torch.nested.nested_tensor_from_jagged(field[:, None], offsets=offsets, **lengths)
            for name, field in fields.items()
        },
        batch_size=len(offsets) - 1,
    )


def align_teacher_log_probs(
    teacher_log_probs: torch.Tensor, teacher_ids: torch.Tensor, responses: torch.Tensor, response_mask: torch.Tensor
) -> torch.Tensor:
    """Return the teacher's log-prob of each sampled response token, float32 nested [B, j] aligned with ``old_log_probs``.

    ``teacher_log_probs`` float and ``teacher_ids`` int: nested [B, j, 1] over prompt and response, shifted left by one (entry
    p belongs to token p + 1), the last entry a dummy, as verl's server writes them
    (verl/workers/rollout/vllm_rollout/utils.py, ``extract_prompt_logprobs``). ``responses`` int and ``response_mask``: nested
    [B, j] over the response.

    Raises ``ValueError`` when the teacher scored a token that the student did not sample, when it gave a live token no finite
    log-prob, or when a response of at least ``PLACEHOLDER_TOKENS`` live tokens carries placeholder zeros only.
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
    broken = live & ~values.isfinite()
    if broken.any():
        first = int(broken.nonzero()[0])
        raise ValueError(
            f"the teacher's log-prob of token id {int(sampled[first])} is {values[first].item()} (response {int(rows[first])}; "
            f"{int(broken.sum())} of {int(live.sum())} tokens are not finite): its weights or its dtype are broken, or it masks "
            "tokens that the student writes"
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
