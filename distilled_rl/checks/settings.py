"""Rules on what is trained and how: method, teacher, sampling, optimisation."""

from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

from distilled_rl.checks.values import (
    ACTOR,
    ROLLOUT,
    SWEEP_MODE,
    TRAINER_MODES,
    get,
    real,
    runs,
    teachers,
    total_steps,
    whole,
)
from distilled_rl.config import TRAINER_MODE, skip_changes
from distilled_rl.methods import get_method
from distilled_rl.teacher.specs import SEVERAL, SOURCES, teacher_specs

ESTIMATORS = ("grpo", "distilled_rl")
AGENT_LOOPS = "distilled_rl.rollout.DistilledRLAgentLoopManager"
# What keeps verl's own distillation loss out of the update.
NO_DISTILLATION_LOSS = {"loss_mode": "none", "use_task_rewards": True, "use_policy_gradient": False}
LOSS_AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def method(config: DictConfig) -> Iterator[str]:
    """The method's node parses, and the trainer and the estimator are such that it takes effect."""
    trainer = get(config, "trainer.v1.trainer_mode")
    settings = runs(config)
    if trainer not in TRAINER_MODES:
        yield (
            f"trainer.v1.trainer_mode is {trainer!r}: distilled_rl.mode={settings[0].mode} would have no effect and "
            f"verl would train plain GRPO; set trainer.v1.trainer_mode={TRAINER_MODE}"
        )
    if trainer == TRAINER_MODE and OmegaConf.select(config, "sweep.runs"):
        yield f"trainer.v1.trainer_mode is {trainer}, which ignores sweep.runs: set it to {SWEEP_MODE}, or drop sweep"
    estimator = get(config, "algorithm.adv_estimator")
    if estimator not in ESTIMATORS:
        yield (
            f"algorithm.adv_estimator is {estimator!r}: the methods build on group-normalised advantages, and an "
            f"estimator that normalises over the batch scales the teacher's term away; use {' or '.join(ESTIMATORS)}"
        )
    key = f"{ROLLOUT}.agent.agent_loop_manager_class"
    if any(run.reproducible for run in settings) and get(config, key) != AGENT_LOOPS:
        yield (
            f"distilled_rl.reproducible is true, but {key} is {get(config, key)}: only {AGENT_LOOPS} seeds each "
            "response"
        )
    if whole(config, "reward.num_workers", least=0) == 0 and get(config, key) != AGENT_LOOPS:
        yield f"reward.num_workers is 0, but {key} is {get(config, key)}: only {AGENT_LOOPS} grades by itself; use 1"
    n = whole(config, f"{ROLLOUT}.n")
    if n < 2 and any(get_method(run.mode).uses_reward for run in settings):
        yield (
            f"{ROLLOUT}.n is {n}: GRPO compares the responses to one prompt, so one alone has no advantage; use 2 or "
            "more"
        )


def teacher(config: DictConfig) -> Iterator[str]:
    """A mode that needs a teacher has one, no other mode pays for one, and it acts through the advantages only."""
    settings = runs(config)
    asking = [run.mode for run in settings if run.needs_teacher]
    sources, pool = [spec.source for spec in teacher_specs(config)], get(config, "distillation.enabled")
    if not set(sources) <= set(SOURCES):
        return  # another rule's to name
    if pool and "server" not in sources:
        what = get(config, "teacher.source")
        others = "none of the teachers is served" if what == SEVERAL else f"teacher.source is {what}"
        yield f"{others}, but distillation.enabled is true: two teachers; set teacher.enabled=false"
    elif not pool and "server" in (sources or ["server"]):
        if asking:
            yield (
                f"mode {asking[0]!r} needs a teacher, but distillation.enabled is false (teacher.enabled in the "
                "recipes): choose one, for example teacher=local teacher.model=PATH"
            )
        return
    if not asking:
        what = "distillation.enabled is true" if pool else f"teacher.source is {get(config, 'teacher.source')}"
        yield (
            f"mode {settings[0].mode!r} uses no teacher, but {what}: a teacher would be loaded "
            "and score every response for nothing; add teacher=none"
        )
    for name, value in NO_DISTILLATION_LOSS.items() if pool else ():
        key = f"distillation.distillation_loss.{name}"
        if get(config, key) != value:
            yield (
                f"{key} is {get(config, key)}: the teacher must reach the update through the advantages only, without "
                f"verl's distillation loss beside them; set {key}={str(value).lower()}"
            )
    if asking and get(config, "algorithm.rollout_correction.bypass_mode"):
        yield (
            "algorithm.rollout_correction.bypass_mode is true: verl then skips the old log-probs, which the teacher's "
            "ratio is taken against; set it to false"
        )


def sampling(config: DictConfig) -> Iterator[str]:
    """Responses are drawn from the distribution that the teacher scores."""
    temperature = real(config, f"{ROLLOUT}.temperature")
    if not temperature > 0:
        yield f"{ROLLOUT}.temperature is {temperature}: the responses of a group would all be the same; use 1.0"
    if real(config, f"{ROLLOUT}.val_kwargs.temperature") < 0:
        yield f"{ROLLOUT}.val_kwargs.temperature is negative: use 0 (greedy) or more"
    # vLLM's prompt log-probs do not depend on the sampling parameters
    served = bool(teachers(config)) or any(spec.source == "url" for spec in teacher_specs(config))
    if served and temperature > 0 and temperature != 1:
        yield (
            f"{ROLLOUT}.temperature is {temperature}: a served teacher's log-probs are at temperature 1, the student's "
            "at the rollout temperature, so every ratio of the two would be wrong; set it to 1.0"
        )
    for key, value in truncation(config) if served else ():
        yield (
            f"{key} is {value}: the student would sample from a part of its distribution, while a served teacher's "
            "log-probs are over the full softmax, so every ratio would be wrong; set it to "
            f"{-1 if key.endswith('top_k') else 1.0}"
        )


def truncation(config: DictConfig) -> Iterator[tuple[str, float]]:
    """Yield key and value of the sampling settings that cut the distribution off."""
    top_p, top_k = real(config, f"{ROLLOUT}.top_p"), whole(config, f"{ROLLOUT}.top_k", least=-1)
    if top_p < 1:
        yield f"{ROLLOUT}.top_p", top_p
    if top_k not in (-1, 0):
        yield f"{ROLLOUT}.top_k", top_k


def optimisation(config: DictConfig) -> Iterator[str]:
    """Learning rate, number of steps and the parts of the loss."""
    lr = real(config, f"{ACTOR}.optim.lr")
    if not lr > 0:
        yield f"{ACTOR}.optim.lr is {lr}: must be > 0 (the paper has 1e-6)"
    mode = get(config, f"{ACTOR}.loss_agg_mode")
    if mode not in LOSS_AGG_MODES:  # verl/workers/config/actor.py
        yield f"{ACTOR}.loss_agg_mode is {mode!r}: must be one of {', '.join(LOSS_AGG_MODES)}"
    if get(config, f"{ACTOR}.use_kl_loss") and get(config, "algorithm.use_kl_in_reward"):
        yield (
            f"{ACTOR}.use_kl_loss and algorithm.use_kl_in_reward are both true: the KL penalty would count twice; keep "
            "one"
        )
    total_steps(config)


def skipping(config: DictConfig) -> Iterator[str]:
    """Responses without advantage are left out of the update only where that changes nothing."""
    if any(run.skip_zero_advantage for run in runs(config)) and (reason := skip_changes(config)):
        yield (
            f"distilled_rl.skip_zero_advantage is true, but {reason}: an update without the responses whose advantages "
            "are all 0 would be another one; set it to null (only where it is exact) or false"
        )
