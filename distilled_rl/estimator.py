"""The advantage estimator ``distilled_rl``: GRPO's group-normalised advantage under the package's own name.

verl hands no teacher log-probs to an advantage estimator (``register_adv_est`` functions receive rewards, mask and group
index only), so the re-weighting itself lives in :mod:`distilled_rl.trainer`. The name is for configs that select their
estimator by it; the recipes use ``grpo``, because verl's final-turn handling of multi-turn samples is tied to that name
(verl/trainer/ppo/v1/utils.py, ``compute_advantage_for_multi_trajectories``).
"""

from typing import Any

import numpy as np
import torch
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage, register_adv_est

NAME = "distilled_rl"


@register_adv_est(NAME)
def compute_distilled_rl_advantage(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: np.ndarray, config: Any = None, **_unused: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return verl's GRPO advantages and returns, both float [B, T].

    ``token_level_rewards`` float [B, T], ``response_mask`` [B, T], ``index`` [B] the prompt of each row. verl passes
    ``algorithm.norm_adv_by_std_in_grpo`` to GRPO only (verl/trainer/ppo/ray_trainer.py:239), so it is read from ``config``
    (``AlgoConfig``) here.
    """
    normalize = True if config is None else config.get("norm_adv_by_std_in_grpo", True)
    return compute_grpo_outcome_advantage(
        token_level_rewards=token_level_rewards,
        response_mask=response_mask,
        index=index,
        norm_adv_by_std_in_grpo=normalize,
    )
