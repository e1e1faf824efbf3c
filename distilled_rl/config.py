"""The ``distilled_rl`` node of a run's configuration, and the checks that run before Ray starts or weights load."""

import dataclasses
import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from distilled_rl.methods import get_method

TRAINER_MODE = "distilled_rl"


class ConfigError(ValueError):
    """A setting that cannot work; the message says what is wrong, where, and what to do."""


@dataclass(frozen=True)
class DistilledRLConfig:
    """The typed ``distilled_rl`` node.

    ``mode``: the method, a module of :mod:`distilled_rl.methods`. ``options``: that method's own options, written flat in the
    node. ``poll_interval``: seconds between two looks of the replay buffer for finished responses (verl: 2.0).
    ``reproducible``: fix the sampling seed of every response and the row order, so that one seed gives one run.
    ``seed``: the seed of those. ``dump_steps``: steps whose tensors are written to ``dump_dir`` for offline checks.
    """

    mode: str
    options: Any
    poll_interval: float = 0.05
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
        values = dict(OmegaConf.to_container(node, resolve=True))  # type: ignore[arg-type]
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
                raise ConfigError(unknown_key(f"distilled_rl.{key}", (f"distilled_rl.{name}" for name in known), str(mode)))
        typed = {
            key: _typed(f"distilled_rl.{key}", value, (common | own)[key].type) for key, value in values.items()
        }
        try:
            options = method.options(**{key: value for key, value in typed.items() if key in own})
            result = cls(
                mode=str(mode), options=options, **{key: value for key, value in typed.items() if key in common}
            )
        except ValueError as error:
            raise ConfigError(str(error)) from None
        if not result.poll_interval > 0:
            raise ConfigError(f"distilled_rl.poll_interval is {result.poll_interval}: must be a number of seconds > 0")
        if result.dump_steps and not result.dump_dir:
            raise ConfigError("distilled_rl.dump_steps is set but distilled_rl.dump_dir is not: say where to write them")
        return result

    @property
    def needs_teacher(self) -> bool:
        """Whether the mode asks a teacher."""
        return get_method(self.mode).needs_teacher


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
        if isinstance(value, (list, tuple)) and all(isinstance(item, int) and not isinstance(item, bool) for item in value):
            return tuple(value)
    elif kind == "bool":
        if isinstance(value, bool):
            return value
    elif kind == "float":
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
    elif kind == "int":
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    elif value is None and "None" in str(annotation):
        return None
    elif isinstance(value, str):
        return value
    raise ConfigError(f"{key} is {value!r}: expected {annotation if isinstance(annotation, str) else kind}")
