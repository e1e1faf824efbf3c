"""The ``distilled_rl`` node of a run's configuration, and the checks that run before Ray starts or weights load."""

import dataclasses
import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from distilled_rl.methods import get_method

TRAINER_MODE = "distilled_rl"
# What the trainer and its workers call a colocated teacher: its node in `actor_rollout_ref`, and its dispatch mesh.
COLOCATED_NODE, COLOCATED_MESH = "colocated_teacher", "teacher"


# Which responses the teacher scores.
SCORED = ("needed", "all")
# The environment variable by which a run's processes on a machine agree on sockets of their own: see distilled_rl/worker.py.
SOCKET_BASE = "VERL_ZMQ_BASE_TRAINER_RANK"
# What the trainer tells the update about responses without advantage.
SKIP_KEY = "distilled_rl_skip_zero_advantage"


class ConfigError(ValueError):
    """A setting that cannot work; the message says what is wrong, where, and what to do."""


@dataclass(frozen=True)
class DistilledRLConfig:
    """The typed ``distilled_rl`` node.

    ``mode``: the method, a module of :mod:`distilled_rl.methods`. ``options``: that method's own options, written flat in the
    node. ``poll_interval``: seconds between two looks of the replay buffer for finished responses (verl: 2.0).
    ``score``: which responses the teacher scores, "needed" (those that the method can use) or "all".
    ``skip_zero_advantage``: leave responses whose advantages are all 0 out of the update; None: where that is exact.
    ``reproducible``: fix the sampling seed of every response and the row order, so that one seed gives one run.
    ``seed``: the seed of those. ``dump_steps``: steps whose tensors are written to ``dump_dir`` for offline checks.
    """

    mode: str
    options: Any
    poll_interval: float = 0.05
    score: str = "needed"
    skip_zero_advantage: bool | None = None
    reproducible: bool = False
    seed: int = 1
    dump_dir: str | None = None
    dump_steps: tuple[int, ...] = ()

    @classmethod
    def from_config(cls, config: DictConfig) -> "DistilledRLConfig":
        """Read the node from a whole run configuration. Raises :class:`ConfigError` for anything unknown or out of range."""
        node = OmegaConf.select(config, "distilled_rl")
        if node is None:
            raise ConfigError(
                "the configuration has no 'distilled_rl' node: start from one of the recipes, or add at least "
                "distilled_rl.mode (grpo, opd, opd_rl, distilled_rl)"
            )
        values: Any = OmegaConf.to_container(node, resolve=True)
        return cls.from_dict(values)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "DistilledRLConfig":
        """Build from a plain mapping of the node's keys."""
        values = dict(values)
        mode = values.pop("mode", None)
        if mode is None:
            raise ConfigError("distilled_rl.mode is missing: name the method (grpo, opd, opd_rl, distilled_rl)")
        try:
            method = get_method(str(mode))
        except ValueError as error:
            raise ConfigError(str(error)) from None
        common = {field.name: field for field in dataclasses.fields(cls) if field.name not in ("mode", "options")}
        own = {field.name: field for field in dataclasses.fields(method.options)}
        known = [*common, *own]
        for key in values:
            if key not in known:
                raise ConfigError(
                    unknown_key(f"distilled_rl.{key}", (f"distilled_rl.{name}" for name in known), str(mode))
                )
        typed = {key: _typed(f"distilled_rl.{key}", value, (common | own)[key].type) for key, value in values.items()}
        try:
            options = method.options(**{key: value for key, value in typed.items() if key in own})
            result = cls(
                mode=str(mode), options=options, **{key: value for key, value in typed.items() if key in common}
            )
        except ValueError as error:
            raise ConfigError(str(error)) from None
        if not result.poll_interval > 0:
            raise ConfigError(f"distilled_rl.poll_interval is {result.poll_interval}: must be a number of seconds > 0")
        if result.score not in SCORED:
            raise ConfigError(f"distilled_rl.score is {result.score!r}: must be one of {', '.join(SCORED)}")
        if result.dump_steps and not result.dump_dir:
            raise ConfigError(
                "distilled_rl.dump_steps is set but distilled_rl.dump_dir is not: say where to write them"
            )
        return result

    @property
    def needs_teacher(self) -> bool:
        """Whether the mode asks a teacher."""
        return get_method(self.mode).needs_teacher


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep: its name, directory, ``distilled_rl`` node (plain), and the node parsed."""

    name: str
    directory: Path
    node: dict[str, Any]
    settings: DistilledRLConfig


def sweep_runs(config: DictConfig) -> list[SweepRun]:
    """Return the runs of a sweep: each entry of ``sweep.runs`` is a ``distilled_rl`` node with a ``seed`` and an optional
    ``name``; keys of the configuration's own ``distilled_rl`` node that are common to all methods are its defaults.

    Raises :class:`ConfigError` when there is none, when two share a name, or when one is not valid.
    """
    entries = OmegaConf.select(config, "sweep.runs")
    if not entries:
        raise ConfigError("a sweep needs sweep.runs: a list of distilled_rl nodes such as {mode: grpo, seed: 1}")
    common = {field.name for field in dataclasses.fields(DistilledRLConfig)} - {"mode", "options"}
    base = dict(OmegaConf.to_container(config.distilled_rl, resolve=True))  # type: ignore[arg-type]
    defaults = {key: value for key, value in base.items() if key in common}
    runs: dict[str, SweepRun] = {}
    for position, entry in enumerate(entries):
        node = {**defaults, **dict(OmegaConf.to_container(entry, resolve=True))}  # type: ignore[arg-type]
        name = node.pop("name", None)
        try:
            settings = DistilledRLConfig.from_dict(node)
        except ConfigError as error:
            raise ConfigError(f"sweep.runs[{position}]: {error}") from None
        teacher = config.teacher.name if settings.needs_teacher else "none"
        name = str(name or f"{config.student.name}-{settings.mode}-{teacher}-seed{settings.seed}")
        if name in runs:
            raise ConfigError(f"sweep.runs[{position}]: a second run is called {name!r}; give it a name")
        runs[name] = SweepRun(name, Path(config.run.output).resolve() / name, node, settings)
    return list(runs.values())


def skip_changes(config: DictConfig) -> str | None:
    """Return why leaving out responses whose advantages are all 0 would change the update, None where it is exact.

    Exact means: the same sum of gradients over the same normaliser, added up in another order.
    """
    actor = config.actor_rollout_ref.actor
    if actor.entropy_coeff:
        return f"actor_rollout_ref.actor.entropy_coeff is {actor.entropy_coeff}, and every response has an entropy"
    if actor.use_kl_loss:
        return "actor_rollout_ref.actor.use_kl_loss is true, and every response has a KL term"
    loss = OmegaConf.select(actor, "policy_loss.loss_mode") or "vanilla"
    if loss != "vanilla":
        return f"actor_rollout_ref.actor.policy_loss.loss_mode is {loss}, which may use what an advantage of 0 does not scale"
    if actor.loss_agg_mode == "seq-mean-token-sum-norm" and actor.get("loss_scale_factor") is None:
        return "seq-mean-token-sum-norm divides by the longest response of a micro-batch (set loss_scale_factor)"
    if actor.strategy not in ("fsdp", "fsdp2"):
        return f"actor_rollout_ref.actor.strategy is {actor.strategy}, where responses cannot be left out"
    return None


def unknown_key(key: str, known: Iterable[str], mode: str) -> str:
    """Return the message for an unknown configuration key, with the nearest valid one."""
    known = sorted(known)
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"unknown key {key} in mode {mode!r}{hint} (known: {', '.join(known)})"


def _typed(key: str, value: Any, annotation: Any) -> Any:
    """Return ``value`` as its annotated type, or raise :class:`ConfigError`."""
    kind = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    if "tuple" in str(annotation):
        if isinstance(value, (list, tuple)) and all(
            isinstance(item, int) and not isinstance(item, bool) for item in value
        ):
            return tuple(value)
    elif value is None and "None" in str(annotation):
        return None
    elif kind == "bool" or "bool" in str(annotation):
        if isinstance(value, bool):
            return value
    elif kind == "float":
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
    elif kind == "int":
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    elif isinstance(value, str):
        return value
    raise ConfigError(f"{key} is {value!r}: expected {annotation if isinstance(annotation, str) else kind}")
