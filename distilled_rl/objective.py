"""The teacher-reweighted advantage (arXiv 2607.17247), token by token, in float32 and log space.

    rho_t     = pi_teacher(o_t) / pi_old(o_t)               teacher_log_ratio     reverse importance ratio
    rho_bar_t = clip(rho_t, 1/eps_rho, eps_rho)             clip_log_ratio        symmetric clip
    rho_til_t = rho_bar_t / (prod_s rho_bar_s)^(1/|o|)      geometric_normalize   length-normalised ratio
    w_t       = rho_til_t where A_t > 0, else 1             negative_reset        negative-sample reset

Legend: o is one response, |o| its number of live tokens (mask on), A its advantage, pi_old the student that sampled it.
Tensors are padded [B, T] or nested jagged [B, j]; a result has the layout and offsets that came in. Both are read as
one flat [N] with response boundaries: a jagged batch never grows to [B, T]. Nothing under the mask reaches a result.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

APPLY_TO = {"positive": lambda a: a > 0, "negative": lambda a: a < 0, "all": lambda a: torch.ones_like(a).bool()}


class TeacherWeights(NamedTuple):
    """All in the layout of `advantages` and with its offsets, so that `weights.w * advantages` is defined."""

    w: Tensor  # float32 in [eps_rho^-2, eps_rho^2], exactly 1 where not applied and off the mask
    log_rho: Tensor  # float32, 0 off the mask
    log_rho_bar: Tensor  # float32, 0 off the mask
    applied: Tensor  # bool, the live tokens that `apply_to` selects


def teacher_log_ratio(teacher_log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    """log rho_t = log pi_teacher(o_t) - log pi_old(o_t), 0 off the mask. [B, T] or [B, j], any float -> float32.

    ValueError: layouts or lengths differ, or a live token is not finite.
    """
    offsets, teacher, old, live = flatten(teacher_log_probs=teacher_log_probs, old_log_probs=old_log_probs, mask=mask)
    teacher = live_values("teacher_log_probs", teacher, live, offsets)
    old = live_values("old_log_probs", old, live, offsets)
    return unflatten(teacher - old, teacher_log_probs)


def clip_log_ratio(log_rho: Tensor, eps_rho: float) -> Tensor:
    """log rho_bar_t = clip(log rho_t, -log eps_rho, log eps_rho). Any shape -> float32. ValueError: bad eps_rho."""
    if not (math.isfinite(eps_rho) and eps_rho >= 1):
        raise ValueError(f"eps_rho must be finite and at least 1 (the paper has 3, 1 means no teacher), got {eps_rho}.")
    return log_rho.float().clamp(-math.log(eps_rho), math.log(eps_rho))


def geometric_normalize(log_rho_bar: Tensor, mask: Tensor) -> Tensor:
    """log rho_til_t = log rho_bar_t - 1/|o| sum_s log rho_bar_s (s live), 0 off the mask. [B, T] or [B, j] -> float32.

    The mean is taken in float64. ValueError: layouts or lengths differ.
    """
    offsets, log_ratio, live = flatten(log_rho_bar=log_rho_bar, mask=mask)
    live = live.bool()
    log_ratio = torch.where(live, log_ratio.float(), 0.0)
    log_geomean = (row_sum(log_ratio, offsets) / row_sum(live, offsets).clamp(min=1)).float()
    log_ratio = log_ratio - log_geomean.repeat_interleave(offsets.diff(), output_size=len(live))
    return unflatten(torch.where(live, log_ratio, 0.0), log_rho_bar)


def negative_reset(log_w: Tensor, advantages: Tensor, apply_to: str = "positive") -> Tensor:
    """log w_t = log rho_til_t where `apply_to` selects A_t, else 0 (w = 1 exactly). [B, T] or [B, j].

    "positive" (the paper): A > 0. "negative": A < 0. "all": every A, A = 0 too: its product with w is 0 in any case.
    ValueError: layouts or lengths differ, unknown `apply_to`.
    """
    _, values, advantage = flatten(log_w=log_w, advantages=advantages)
    return unflatten(torch.where(_selected(advantage, apply_to), values, 0.0), log_w)


def teacher_weights(
    teacher_log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor,
    *, eps_rho: float = 3.0, normalize: bool = True, apply_to: str = "positive",
) -> TeacherWeights:  # fmt: skip
    """w_t, such that PPO's loss takes w * A as its advantage. [B, T] or [B, j], any float; the mask bool, int or float.

    A response without a live token has w = 1. ValueError: as in the four steps, or a live advantage is not finite.
    """
    offsets, advantage, live, teacher, old = flatten(
        advantages=advantages, mask=mask, teacher_log_probs=teacher_log_probs, old_log_probs=old_log_probs
    )
    applied = live.bool() & _selected(live_values("advantages", advantage, live, offsets), apply_to)
    mask, teacher, old, applied = (unflatten(x, advantages) for x in (live, teacher, old, applied))
    log_rho = teacher_log_ratio(teacher, old, mask)
    log_rho_bar = clip_log_ratio(log_rho, eps_rho)
    log_w = geometric_normalize(log_rho_bar, mask) if normalize else log_rho_bar
    return TeacherWeights(negative_reset(log_w, advantages, apply_to).exp(), log_rho, log_rho_bar, applied)


def reverse_kl_advantage(log_rho: Tensor, mask: Tensor, coef: float = 1.0) -> Tensor:
    """A_t = coef * log rho_t = -coef * k1, k1 estimating KL(student || teacher); 0 off the mask. Our choice for OPD."""
    _, values, live = flatten(log_rho=log_rho, mask=mask)
    return unflatten(coef * torch.where(live.bool(), values.float(), 0.0), log_rho)


def _selected(advantage: Tensor, apply_to: str) -> Tensor:
    if apply_to not in APPLY_TO:
        raise ValueError(f"apply_to must be one of {', '.join(APPLY_TO)}, got {apply_to!r}.")
    return APPLY_TO[apply_to](advantage)


def live_values(name: str, values: Tensor, live: Tensor, offsets: Tensor) -> Tensor:
    """[N] in float32, 0 off the mask. ValueError: a live one is not finite."""
    values = torch.where(live.bool(), values.float(), 0.0)
    if not (finite := torch.isfinite(values)).all():
        tokens = (~finite).nonzero().squeeze(-1)
        rows = (torch.searchsorted(offsets, tokens, right=True) - 1).unique()
        first = ", ".join(map(str, rows[:8].tolist())) + (", ..." if len(rows) > 8 else "")
        raise ValueError(
            f"{name} is not finite at {len(tokens)} live tokens of {len(rows)} responses (rows {first}). Look at what "
            "produced them (a token that was never scored, an overflow), or take those tokens out of the mask."
        )
    return values


def flatten(**tensors: Any) -> list[Tensor]:
    """[response boundaries [B + 1], the values [N] of each]. ValueError: not the same layout and lengths throughout."""
    (first_name, first), boundaries = next(iter(tensors.items())), []
    for name, x in tensors.items():
        if x.dim() != 2 or (x.is_nested and (x.layout != torch.jagged or x.lengths() is not None)):
            raise ValueError(f"{name} must be padded [B, T] or contiguous jagged [B, j], not {tuple(x.shape)}.")
        boundaries.append(x.offsets() if x.is_nested else x.shape[1] * torch.arange(x.shape[0] + 1, device=x.device))
        if x.is_nested != first.is_nested or not torch.equal(boundaries[0].long(), boundaries[-1].long()):
            raise ValueError(f"{name} and {first_name} differ in layout or lengths: align them token by token first.")
    return [boundaries[0], *(x.values() if x.is_nested else x.reshape(-1) for x in tensors.values())]


def unflatten(values: Tensor, like: Any) -> Tensor:
    """[N] -> the layout and offsets of `like`; with max_seqlen, or `to_padded_tensor` would allocate [B, N]."""
    if not like.is_nested:
        return values.view(like.shape)
    longest = int(like.offsets().diff().max()) if len(like.offsets()) > 1 else 0
    return torch.nested.nested_tensor_from_jagged(values, like.offsets(), max_seqlen=longest)


def row_sum(values: Tensor, offsets: Tensor) -> Tensor:
    """[N] -> [B], accumulated in float64."""
    return torch.segment_reduce(values.double(), "sum", offsets=offsets)
