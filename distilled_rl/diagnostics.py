"""What the re-weighting did, as scalars, from the very tensors that the update used; `docs/metrics.md` explains each.

Live tokens are those that the mask keeps; applied tokens are the live ones whose weight came from the teacher. Sums run
in float64. No metric is ever NaN: over no token at all, weights and ess_fraction are 1 and everything else is 0.
"""

import math

import torch
from torch import Tensor

from distilled_rl.objective import TeacherWeights, flatten, live_values, row_sum

# verl's bound on the exponent of its k3 estimator (verl/trainer/ppo/core_algos.py, kl_penalty_forward).
K3_LOG_BOUND = 20.0


def weight_metrics(weights: TeacherWeights, advantages: Tensor, mask: Tensor, eps_rho: float) -> dict[str, float]:
    """The `rho/` metrics of one update.

    Args: weights as `teacher_weights` returned them; advantages (before the product with w), mask ([B, T] or [B, j])
    and eps_rho that it was given. ValueError: layouts or lengths differ.
    """
    offsets, w, log_rho, applied, advantage, live = flatten(
        w=weights.w, log_rho=weights.log_rho, applied=weights.applied, advantages=advantages, mask=mask
    )
    live = live.bool()
    rho, w_applied, log_eps = log_rho[live].double(), w[applied].double(), math.log(eps_rho)
    size = torch.where(live, advantage, 0.0).double().abs()
    live_per_row, applied_per_row = row_sum(live, offsets), row_sum(applied, offsets)
    log_geomean = row_sum(w.log(), offsets) / applied_per_row.clamp(min=1)
    live_rows = live_per_row > 0
    return {
        "rho/log_mean": _mean(rho),
        "rho/log_std": _std(rho),
        "rho/log_abs_max": float(rho.abs().max()) if len(rho) else 0.0,
        "rho/clip_fraction_high": _mean((log_rho[live] > log_eps).double()),
        "rho/clip_fraction_low": _mean((log_rho[live] < -log_eps).double()),
        "rho/w_mean": _mean(w_applied, empty=1.0),
        "rho/w_std": _std(w_applied),
        "rho/w_min": float(w_applied.min()) if len(w_applied) else 1.0,
        "rho/w_max": float(w_applied.max()) if len(w_applied) else 1.0,
        "rho/ess_fraction": float(w_applied.mean() ** 2 / w_applied.square().mean()) if len(w_applied) else 1.0,
        "rho/geomean_abs_log_max": float(log_geomean.abs().max()) if len(log_geomean) else 0.0,
        "rho/applied_token_fraction": _mean(applied[live].double()),
        "rho/applied_response_fraction": _mean((applied_per_row > 0)[live_rows].double()),
        "rho/advantage_change": _fraction((size * (w.double() - 1).abs()).sum(), size.sum()),
        "rho/zero_advantage_responses": float((live_rows & (row_sum(size, offsets) == 0)).sum()),
        "rho/empty_responses": float((~live_rows).sum()),
    }


def teacher_metrics(teacher_log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> dict[str, float]:
    """The `teacher/` metrics of one batch: three times [B, T] or [B, j], any float dtype.

    ValueError: layouts or lengths differ, a live log-probability is not finite.
    """
    offsets, teacher, old, live = flatten(teacher_log_probs=teacher_log_probs, old_log_probs=old_log_probs, mask=mask)
    teacher = live_values("teacher_log_probs", teacher, live, offsets).double()
    old = live_values("old_log_probs", old, live, offsets).double()
    live = live.bool()
    k1 = old - teacher
    log_rho = -k1.clamp(-K3_LOG_BOUND, K3_LOG_BOUND)
    k3 = log_rho.exp() - 1 - log_rho
    first, last = _outer_quarters(live, offsets)
    live_per_row = row_sum(live, offsets)
    k1_per_row = (row_sum(k1, offsets) / live_per_row)[live_per_row > 0]
    return {
        "teacher/kl_k1": _mean(k1[live]),
        "teacher/kl_k3": _mean(k3[live]),
        "teacher/kl_response_max": float(k1_per_row.max()) if len(k1_per_row) else 0.0,
        "teacher/kl_by_position_first": _mean(k1[first]),
        "teacher/kl_by_position_last": _mean(k1[last]),
        "teacher/log_prob_mean": _mean(teacher[live]),
        "teacher/student_log_prob_mean": _mean(old[live]),
        "teacher/zero_fraction": _mean((teacher[live] == 0).double()),
    }


def _outer_quarters(live: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Two bool [N]: the live tokens in the first and in the last quarter of each response, ceil(n / 4) of them each."""
    seen = torch.cat([live.new_zeros(1, dtype=torch.long), live.cumsum(0)])
    before, total = seen[offsets[:-1].long()], seen[offsets[1:].long()]
    lengths = offsets.diff()
    rank = seen[1:] - 1 - before.repeat_interleave(lengths, output_size=len(live))
    n = (total - before).repeat_interleave(lengths, output_size=len(live))
    return live & (4 * rank < n), live & (4 * (n - 1 - rank) < n)


def _mean(values: Tensor, empty: float = 0.0) -> float:
    return float(values.mean()) if len(values) else empty


def _std(values: Tensor) -> float:
    """The population's, so that one value has a spread of 0."""
    return float(values.std(correction=0)) if len(values) else 0.0


def _fraction(part: Tensor, whole: Tensor) -> float:
    return float(part / whole) if whole > 0 else 0.0
