"""Warnings: a run that works, though perhaps not as meant."""

import os
from collections.abc import Iterator

from omegaconf import DictConfig

from distilled_rl.checks.settings import truncation
from distilled_rl.checks.values import ACTOR, ROLLOUT, SWEEP_MODE, get, total_steps


def notes(config: DictConfig) -> Iterator[str]:
    """Yield one sentence per warning. The configuration has passed every rule."""
    for key, value in truncation(config):
        yield (
            f"{key} is {value}: responses come from a part of the distribution, but the old log-probs are over all of "
            "it, so PPO's ratio is not that of the sampler"
        )
    if not get(config, f"{ROLLOUT}.calculate_log_probs"):
        yield (
            f"{ROLLOUT}.calculate_log_probs is false: training/rollout_probs_diff_* are not logged, and nothing else "
            "shows that the rollout engine has the trainer's weights"
        )
    loss = get(config, f"{ACTOR}.policy_loss.loss_mode")
    if loss != "vanilla":
        yield (
            f"{ACTOR}.policy_loss.loss_mode is {loss!r}: the methods' objectives are written for PPO's clip, 'vanilla'"
        )
    if get(config, f"{ROLLOUT}.val_kwargs.temperature") == 0 and get(config, f"{ROLLOUT}.val_kwargs.n") > 1:
        yield (
            f"{ROLLOUT}.val_kwargs.n is {get(config, f'{ROLLOUT}.val_kwargs.n')} at temperature 0: all answers will be "
            "the same"
        )
    yield from _nothing_left(config)
    if get(config, "trainer.device") == "cuda" and not os.environ.get("RAY_ADDRESS"):
        import torch

        if not torch.cuda.is_available():
            yield "trainer.device is cuda, but this machine has no CUDA device: training here needs scale=cpu"


def _nothing_left(config: DictConfig) -> Iterator[str]:
    """A resumed run that stands at its last step trains nothing and ends without an error."""
    from distilled_rl.launch import last_step, run_directory  # launch imports this package

    steps = total_steps(config)
    is_sweep = get(config, "trainer.v1.trainer_mode") == SWEEP_MODE  # which leaves finished runs alone, saying so
    if is_sweep or steps is None or get(config, "trainer.resume_mode") != "auto":
        return
    if (done := last_step(run_directory(config))) >= steps:
        yield (
            f"run.dir={run_directory(config)} already holds step {done} of trainer.total_training_steps={steps}: "
            "nothing is left to train; raise it, change run.name, or set trainer.resume_mode=disable"
        )
