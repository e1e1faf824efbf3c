"""Read run directories: what a run was, how far it came, and its metrics step by step.

A run directory holds `config.yaml` and `metrics-000.jsonl`, `metrics-001.jsonl`, ...: one file per start of the run,
one line `{"step": N, "data": {metric: value}}` per step, as verl's file logger writes them.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from distilled_rl.checks.values import SWEEP_MODE
from distilled_rl.launch import log_files
from distilled_rl.methods import get_method

STEP_SECONDS = "timing_s/step"  # in every line of a training step; a line without it is a validation alone
TEACHER_TOKENS = "teacher/scored_tokens"


class RunError(ValueError):
    """A run directory that cannot be read; the message names the file, and the line where there is one."""


@dataclass(frozen=True)
class Run:
    """One run as its directory tells it.

    `teacher`: None for a mode that asks none. `total_steps`: the steps it was to train, None if the configuration
    leaves it to the epochs. `rollouts_per_step`: prompts x responses. `starts`: how often it was started. `metrics`:
    float64, one row per step (index `step`), one column per metric, NaN where a step did not log it.
    """

    name: str
    mode: str
    student: str
    teacher: str | None
    seed: int
    total_steps: int | None
    rollouts_per_step: int
    starts: int
    metrics: pd.DataFrame

    @property
    def steps(self) -> int:
        """The last training step that was logged, 0 if none was."""
        trained = self.column(STEP_SECONDS).index
        return int(trained[-1]) if len(trained) else 0

    @property
    def finished(self) -> bool:
        """Whether the run trained all its steps."""
        return self.total_steps is not None and self.steps >= self.total_steps

    @property
    def status(self) -> str:
        """How far the run came, in words."""
        if self.total_steps is None:
            return f"{self.steps} steps, planned number unknown"
        return (
            f"finished, {self.steps} steps"
            if self.finished
            else f"unfinished, {self.steps} of {self.total_steps} steps"
        )

    @property
    def minutes(self) -> float:
        """Minutes in training steps: without start-up, validation, and steps that a restart repeated."""
        return float(self.column(STEP_SECONDS).sum()) / 60

    @property
    def rollouts(self) -> int:
        """Responses sampled for training."""
        return self.steps * self.rollouts_per_step

    @property
    def teacher_tokens(self) -> int:
        """Prompt and response tokens of the rollouts that the teacher scored, 0 if none."""
        return int(self.column(TEACHER_TOKENS).sum())

    def column(self, metric: str) -> pd.Series:
        """One metric by step, without the steps that did not log it; empty if no step did."""
        return pd.Series(self.metrics[metric]).dropna() if metric in self.metrics else pd.Series(dtype="float64")


def find_runs(output: Path | str) -> list[Path]:
    """Directories directly in `output` that hold a config.yaml, by name, without those of sweeps themselves.

    A sweep trains runs that have directories of their own; its own holds nothing but its configuration and first
    checkpoint.
    """
    found = sorted(path.parent for path in Path(output).glob("*/config.yaml"))
    return [directory for directory in found if not _is_sweep(directory / "config.yaml")]


def read_runs(directories: Iterable[Path | str]) -> tuple[list[Run], list[str]]:
    """Read several run directories. Returns the runs, and one sentence for each directory that cannot be read."""
    runs: list[Run] = []
    broken: list[str] = []
    for directory in directories:
        try:
            runs.append(read_run(directory))
        except RunError as error:
            broken.append(str(error))
    return runs, broken


def read_run(path: Path | str) -> Run:
    """Read a run directory. A run that logged no step yet has an empty `metrics`.

    The logs are merged: what a later start logged replaces what earlier starts logged for the same step, and steps
    behind the one that the later start continued from are dropped, as their update was lost. A broken last line of a
    log, left by a killed run, is ignored. RunError: no such directory, no config.yaml in it or one without what a run
    needs, a line other than the last that is not JSON, a line of another form.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise RunError(f"no run directory {directory}")
    file = directory / "config.yaml"
    config = _read_config(file)
    mode = str(_setting(config, "distilled_rl.mode", file))
    try:
        needs_teacher = get_method(mode).needs_teacher
    except ValueError as error:
        raise RunError(f"{file}: {error}") from None
    total = _get(config, "trainer.total_training_steps")
    prompts = _integer(config, "data.train_batch_size", file)
    logs = log_files(directory)
    return Run(
        name=str(_setting(config, "run.name", file)),
        mode=mode,
        student=str(_setting(config, "student.name", file)),
        teacher=str(_setting(config, "teacher.name", file)) if needs_teacher else None,
        seed=_integer(config, "seed", file),
        total_steps=None if total is None else _integer(config, "trainer.total_training_steps", file),
        rollouts_per_step=prompts * _integer(config, "actor_rollout_ref.rollout.n", file),
        starts=len(logs),
        metrics=_merge([_read_log(log) for log in logs]),
    )


Lines = list[tuple[int, dict[str, float]]]


def _merge(logs: list[Lines]) -> pd.DataFrame:
    rows: dict[int, dict[str, float]] = {}
    for lines in logs:
        if not lines:
            continue
        first, data = lines[0]
        # a start that validates first logs a line for the step it continued from, which was trained before
        kept = first if STEP_SECONDS in data else first + 1
        rows = {step: row for step, row in rows.items() if step < kept}
        for step, row in lines:
            rows.setdefault(step, {}).update(row)
    frame = pd.DataFrame.from_dict(rows, orient="index", dtype="float64").sort_index()
    frame.index = pd.Index(frame.index, dtype="int64", name="step")
    return frame


def _read_log(path: Path) -> Lines:
    """The lines of one log. Values that are not numbers are skipped; verl writes NaN as null, which becomes NaN."""
    raw = [(number, line) for number, line in enumerate(path.read_bytes().split(b"\n"), 1) if line.strip()]
    lines: Lines = []
    for number, line in raw:
        try:
            entry = json.loads(line)
        except ValueError as error:  # also bytes that are not UTF-8
            if number == raw[-1][0]:
                break
            raise RunError(f"{path}, line {number}: not JSON ({error})") from None
        if not isinstance(entry, dict) or type(entry.get("step")) is not int or not isinstance(entry.get("data"), dict):
            raise RunError(f'{path}, line {number}: expected {{"step": N, "data": {{...}}}}')
        row = {key: _number(value) for key, value in entry["data"].items() if value is None or _is_number(value)}
        lines.append((entry["step"], row))
    return lines


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))


def _number(value: float | None) -> float:
    return float("nan") if value is None else float(value)


def _read_config(path: Path) -> dict[str, Any]:
    """The settings, saved with everything resolved: plain YAML, which libyaml reads 20 times faster than OmegaConf."""
    if not path.is_file():
        raise RunError(f"{path.parent} is no run directory: it has no config.yaml")
    try:
        config = yaml.load(path.read_bytes(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise RunError(f"{path}: cannot be read ({error})") from None
    if not isinstance(config, dict):
        raise RunError(f"{path}: expected a mapping of settings")
    return config


def _is_sweep(file: Path) -> bool:
    """Whether the configuration is a sweep's; those of its runs name verl's trainer. `read_run` names a broken file."""
    try:
        return _get(_read_config(file), "trainer.v1.trainer_mode") == SWEEP_MODE
    except RunError:
        return False


def _get(config: dict[str, Any], key: str) -> Any:
    node: Any = config
    for part in key.split("."):
        node = node.get(part) if isinstance(node, dict) else None
    return node


def _setting(config: dict[str, Any], key: str, path: Path) -> Any:
    value = _get(config, key)
    if value is None:
        raise RunError(f"{path}: {key} is missing")
    return value


def _integer(config: dict[str, Any], key: str, path: Path) -> int:
    value = _setting(config, key, path)
    if type(value) is not int:
        raise RunError(f"{path}: {key} is {value!r}, expected an integer")
    return value
