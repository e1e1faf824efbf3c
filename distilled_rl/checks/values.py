"""Reading a composed configuration: a value that is missing or of the wrong type ends the rule that reads it."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from omegaconf import DictConfig, ListConfig, OmegaConf

from distilled_rl.config import TRAINER_MODE, ConfigError, DistilledRLConfig, sweep_runs
from distilled_rl.teacher import compatibility

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


def colocated(config: DictConfig) -> bool:
    """Whether the teacher is held beside the student, in verl's FSDP workers."""
    return get(config, "teacher.source") == "colocated"


class Model(NamedTuple):
    """A model that a run loads: the key of its path, the path or hub name, and the same for its tokenizer."""

    key: str
    path: str
    tokenizer: str


def models(config: DictConfig) -> Iterator[Model]:
    """Yield the student, then the teachers, leaving out those without a path."""
    student = get(config, f"{MODEL}.path")
    if student is not None:
        yield Model(f"{MODEL}.path", str(student), str(get(config, f"{MODEL}.tokenizer_path") or student))
    for key in teachers(config):
        if (path := get(config, f"{key}.model_path")) is not None:
            yield Model(f"{key}.model_path", str(path), str(path))
    if colocated(config) and (path := OmegaConf.select(config, "teacher.model")) is not None:
        yield Model("teacher.model", str(path), str(path))


def teacher_choices(config: DictConfig) -> tuple[list[str], dict[int, int], str]:
    """Return ``teacher.allow``, ``teacher.eos_map`` and ``teacher.prompt``, see :func:`compatibility.compare`.

    Raises :class:`ConfigError` for a choice that does not exist, or is of another kind.
    """
    allow, eos_map = get(config, "teacher.allow"), get(config, "teacher.eos_map")
    prompt = get(config, "teacher.prompt") or "student"
    if not isinstance(allow, ListConfig | None):
        raise ConfigError(f"teacher.allow is {allow!r}: give a list of names, such as teacher.allow=[eos]")
    if not isinstance(eos_map, DictConfig | None):
        raise ConfigError(
            f"teacher.eos_map is {eos_map!r}: give the student's id and the teacher's, {{151643: 151645}}"
        )
    pairs: dict[Any, Any] = dict((eos_map or {}).items())
    if not all(isinstance(number, int) and not isinstance(number, bool) for pair in pairs.items() for number in pair):
        raise ConfigError(f"teacher.eos_map is {pairs}: it maps token ids to token ids, such as {{151643: 151645}}")
    names = list(allow or [])
    compatibility.check_choices(names, prompt)
    return names, pairs, prompt


def data_files(config: DictConfig, key: str) -> list[str]:
    """Return the files of ``data.train_files`` or ``data.val_files``. Raises :class:`ConfigError` if there is none."""
    value = get(config, key)
    files = list(value) if isinstance(value, ListConfig) else [value]
    if not files or not all(isinstance(file, str) and file for file in files):
        raise ConfigError(f"{key} is {value}: give the path of a file, or a list of paths")
    return files


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
