"""Reading a composed configuration: a value that is missing or of the wrong type ends the rule that reads it."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from omegaconf import DictConfig, ListConfig, OmegaConf

from distilled_rl.config import TRAINER_MODE, ConfigError, DistilledRLConfig, sweep_runs

# The trainer of distilled_rl.sweep, a module that imports verl.
SWEEP_MODE = "distilled_rl_sweep"
TRAINER_MODES = (TRAINER_MODE, SWEEP_MODE)
MODEL, ACTOR, REF, ROLLOUT = (f"actor_rollout_ref.{part}" for part in ("model", "actor", "ref", "rollout"))
TEACHERS = "distillation.teacher_models"


def get(config: DictConfig, key: str) -> Any:
    """Return a value, None where the key does not exist. Raises omegaconf's error where it is ``???``."""
    return OmegaConf.select(config, key, throw_on_missing=True)


def whole(config: DictConfig, key: str, least: int = 1) -> int:
    """Return a whole number. Raises :class:`ConfigError` if it is none or below ``least``."""
    value = get(config, key)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{key} is {value!r}: must be a whole number >= {least}")
    return value


def real(config: DictConfig, key: str) -> float:
    """Return a finite number. Raises :class:`ConfigError` if it is none."""
    value = get(config, key)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise ConfigError(f"{key} is {value!r}: must be a number")
    return float(value)


def runs(config: DictConfig) -> list[DistilledRLConfig]:
    """Return the settings of the run, or of each run of a sweep. Raises :class:`ConfigError` if some are not valid."""
    if get(config, "trainer.v1.trainer_mode") == SWEEP_MODE:
        return [run.settings for run in sweep_runs(config)]
    get(config, "distilled_rl.mode")
    return [DistilledRLConfig.from_config(config)]


def teachers(config: DictConfig) -> Mapping[str, DictConfig]:
    """Return the served teachers by key; none when distillation is off.

    With several entries verl drops the one called ``teacher_model`` (verl/workers/config/distillation.py:291).
    """
    if not get(config, "distillation.enabled"):
        return {}
    entries = get(config, TEACHERS)
    return {f"{TEACHERS}.{name}": entries[name] for name in entries if len(entries) == 1 or name != "teacher_model"}


class Remark(str):
    """A sentence of a rule that is a warning, not a problem."""


class Model(NamedTuple):
    """A model that a run loads: the key of its path, the path or hub name, and the same for its tokenizer."""

    key: str
    path: str
    tokenizer: str


def student(config: DictConfig) -> Model | None:
    """Return the student, None where it has no path."""
    path = get(config, f"{MODEL}.path")
    if path is None:
        return None
    return Model(f"{MODEL}.path", str(path), str(get(config, f"{MODEL}.tokenizer_path") or path))


def data_files(config: DictConfig, key: str) -> list[str]:
    """Return the files of ``data.train_files`` or ``data.val_files``. Raises :class:`ConfigError` if there is none."""
    value = get(config, key)
    files = list(value) if isinstance(value, ListConfig) else [value]
    if not files or not all(isinstance(file, str) and file for file in files):
        raise ConfigError(f"{key} is {value}: give the path of a file, or a list of paths")
    return files


def is_remote(path: str) -> bool:
    """Whether verl downloads the file, so that it cannot be looked at here."""
    return "://" in path


def total_steps(config: DictConfig) -> int | None:
    """Return the number of training steps, None when the epochs decide."""
    key = "trainer.total_training_steps"
    return None if get(config, key) is None else whole(config, key)


def trainer_gpus(config: DictConfig) -> int:
    """Return the number of trainer ranks, one GPU each (declared ones on a CPU machine)."""
    return whole(config, "trainer.n_gpus_per_node") * whole(config, "trainer.nnodes")


def sequence_parallel(config: DictConfig) -> int:
    """Return over how many ranks one sequence is split (verl/workers/config/actor.py, ``FSDPActorConfig``)."""
    size = "ulysses_sequence_parallel_size"
    actor = whole(config, f"{ACTOR}.{size}")
    return actor if actor > 1 else whole(config, f"{ACTOR}.fsdp_config.{size}")
