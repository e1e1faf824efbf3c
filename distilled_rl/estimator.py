"""The advantage estimator ``distilled_rl``: GRPO's group-normalised advantage under the package's own name.

verl hands no teacher log-probs to an advantage estimator (``register_adv_est`` functions receive rewards, mask and group
index only), so the re-weighting itself lives in :mod:`distilled_rl.trainer`. The name is for configs that select their
estimator by it; the recipes use ``grpo``, because verl's final-turn handling of multi-turn samples is tied to that name
(verl/trainer/ppo/v1/utils.py, ``compute_advantage_for_multi_trajectories``).
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage, register_adv_est

NAME = "distilled_rl"


# Rewards of a group that differ by no more than this, relative to the largest (at least 1), count as equal: float32 means of
# equal rewards are off by a few units in the last place, and dividing that by a standard deviation of the same size makes
# advantages out of nothing.
FLAT_TOLERANCE = 1e-6


def flat_groups(scores: torch.Tensor, index: Sequence[object] | np.ndarray) -> torch.Tensor:
    """Return bool [B]: whether a row's group has one and the same reward throughout, so that its advantage is 0.

    ``scores`` float [B], the reward of each response; ``index`` [B], its prompt. Groups of one row are left out: verl gives
    them their reward as advantage.
    """
    rows: dict[object, list[int]] = defaultdict(list)
    for row, prompt in enumerate(index):
        rows[prompt].append(row)
    flat = torch.zeros(len(scores), dtype=torch.bool)
    for members in rows.values():
        group = scores[members]
        if len(members) > 1 and group.max() - group.min() <= FLAT_TOLERANCE * max(1.0, float(group.abs().max())):
            flat[members] = True
    return flat


@register_adv_est(NAME)
def compute_distilled_rl_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: np.ndarray,
    config: Any = None,
    **_unused: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return verl's GRPO advantages and returns, both float [B, T], with exact zeros for groups of one reward throughout.

    ``token_level_rewards`` float [B, T], ``response_mask`` [B, T], ``index`` [B] the prompt of each row. verl passes
    ``algorithm.norm_adv_by_std_in_grpo`` to GRPO only (verl/trainer/ppo/ray_trainer.py:239), so it is read from ``config``
    (``AlgoConfig``) here.
    """
    normalize = True if config is None else config.get("norm_adv_by_std_in_grpo", True)
    flat = flat_groups(token_level_rewards.sum(dim=-1), index)
    advantages, _ = compute_grpo_outcome_advantage(
        token_level_rewards=token_level_rewards,
        response_mask=response_mask,
        index=index,
        norm_adv_by_std_in_grpo=normalize,
    )
    advantages = torch.where(flat[:, None], 0.0, advantages)
    return advantages, advantages
