"""GRPO: verl's group-normalised advantage, unchanged, no teacher."""

import torch

from distilled_rl.methods import NoOptions, TeacherBatch, register


@register("grpo", needs_teacher=False)
def grpo(batch: TeacherBatch, options: NoOptions) -> tuple[torch.Tensor, dict[str, float]]:
    """Return the advantages as they are. The trainer does not even fetch the fields for a method without a teacher."""
    return batch.advantages, {}
