"""Distilled RL (arXiv 2607.17247): the teacher re-distributes GRPO's advantage over the tokens of each response."""

import math
from dataclasses import dataclass

import torch

from distilled_rl.diagnostics import weight_metrics
from distilled_rl.methods import TeacherBatch, register
from distilled_rl.objective import APPLY_TO, teacher_weights


@dataclass(frozen=True)
class DistilledRLOptions:
    """``eps_rho``: symmetric clip of the ratio, >= 1 (the authors' scripts use 3). ``normalize``: divide by the response's
    geometric mean. ``apply_to``: which responses are re-weighted, "positive" (the paper), "negative" or "all"."""

    eps_rho: float = 3.0
    normalize: bool = True
    apply_to: str = "positive"

    def __post_init__(self) -> None:
        if not (math.isfinite(self.eps_rho) and self.eps_rho >= 1.0):
            raise ValueError(
                f"distilled_rl.eps_rho is {self.eps_rho}: the ratio is clipped to [1/eps_rho, eps_rho], so eps_rho must be a "
                "finite number >= 1 (1 turns the re-weighting off, 3 is the authors' value)"
            )
        if self.apply_to not in APPLY_TO:
            raise ValueError(f"distilled_rl.apply_to is {self.apply_to!r}: must be one of {', '.join(APPLY_TO)}")


def reweighted(advantages: torch.Tensor, options: DistilledRLOptions) -> torch.Tensor:
    """Return where the weight can differ from 1: the advantages that ``apply_to`` selects, and not 0."""
    return APPLY_TO[options.apply_to](advantages) & (advantages != 0)


@register("distilled_rl", options=DistilledRLOptions, scores=reweighted)
def distilled_rl(batch: TeacherBatch, options: DistilledRLOptions) -> tuple[torch.Tensor, dict[str, float]]:
    """Return ``w * A``; as w > 0, and w = 1 where the reset applies, verl's PPO loss on it is the paper's objective."""
    weights = teacher_weights(
        batch.teacher_log_probs,
        batch.old_log_probs,
        batch.advantages,
        batch.mask,
        eps_rho=options.eps_rho,
        normalize=options.normalize,
        apply_to=options.apply_to,
    )
    metrics = weight_metrics(weights, batch.advantages, batch.mask, options.eps_rho)
    return batch.advantages * weights.w, metrics
