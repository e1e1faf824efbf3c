"""Pure on-policy distillation (OPD): the teacher's log-ratio is the whole advantage; the reward is not used.

The paper publishes no formula for this baseline. Ours is the reverse KL, estimated per sampled token (k1) and used as a
policy gradient: A_t = coef * (log pi_teacher - log pi_old).
"""

import math
from dataclasses import dataclass

import torch

from distilled_rl.methods import TeacherBatch, register
from distilled_rl.objective import reverse_kl_advantage, teacher_log_ratio


@dataclass(frozen=True)
class OPDOptions:
    """``teacher_coef``: the factor of the teacher term, > 0."""

    teacher_coef: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.teacher_coef) and self.teacher_coef > 0):
            raise ValueError(
                f"distilled_rl.teacher_coef is {self.teacher_coef}: pure distillation needs a finite factor > 0, because the "
                "teacher term is its only signal"
            )


@register("opd", options=OPDOptions, uses_reward=False)
def opd(batch: TeacherBatch, options: OPDOptions) -> tuple[torch.Tensor, dict[str, float]]:
    """Return ``coef * (log pi_teacher - log pi_old)`` on live tokens, 0 elsewhere."""
    log_rho = teacher_log_ratio(batch.teacher_log_probs, batch.old_log_probs, batch.mask)
    return reverse_kl_advantage(log_rho, batch.mask, options.teacher_coef), {}
