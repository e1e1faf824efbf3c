"""OPD+RL: GRPO's advantage plus the teacher's log-ratio.

The paper publishes no formula for this baseline. Ours is A_t = A - lambda * k1 = A + lambda * (log pi_teacher - log pi_old);
``teacher_coef`` is lambda.
"""

import math
from dataclasses import dataclass

import torch

from distilled_rl.methods import TeacherBatch, register
from distilled_rl.objective import reverse_kl_advantage, teacher_log_ratio


@dataclass(frozen=True)
class OPDRLOptions:
    """``teacher_coef``: lambda, >= 0; 0 is GRPO."""

    teacher_coef: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.teacher_coef) and self.teacher_coef >= 0):
            raise ValueError(f"distilled_rl.teacher_coef is {self.teacher_coef}: lambda must be a finite number >= 0")


@register("opd_rl", options=OPDRLOptions)
def opd_rl(batch: TeacherBatch, options: OPDRLOptions) -> tuple[torch.Tensor, dict[str, float]]:
    """Return ``A + lambda * (log pi_teacher - log pi_old)``; the very advantages of GRPO when lambda is 0."""
    log_rho = teacher_log_ratio(batch.teacher_log_probs, batch.old_log_probs, batch.mask)
    return batch.advantages + reverse_kl_advantage(log_rho, batch.mask, options.teacher_coef), {}
