"""What an evaluation measured, and its file `eval/<name>.json`."""

import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from distilled_rl.report.files import write_atomic

Role = Literal["base", "teacher", "trained"]


class EvaluationError(ValueError):
    """An evaluation that cannot be right; the message says what is wrong, and in which file."""


@dataclass(frozen=True)
class Evaluation:
    """One model on P problems, `samples` responses each at `temperature`, and optionally the greedy response.

    name: also the name of its file. role: "base" (the student before RL), "teacher", or "trained". model: the path
    evaluated. correct: right samples per problem [P]. greedy: 0 or 1 per problem [P], or None. mean_length: tokens per
    sample. truncated: samples cut at the limit. mode, seed, step: of a trained model. teacher: its teacher's name
    (None: had none); with role "teacher" its own. problem_set: names the problems, equal only for the same ones in the
    same order. extras: further numbers of the evaluation, such as "steps_right", the share of right samples without a
    wrong step. EvaluationError: numbers that contradict each other.
    """

    name: str
    role: Role
    model: str
    samples: int
    temperature: float
    correct: tuple[int, ...]
    greedy: tuple[int, ...] | None
    mean_length: float
    truncated: int
    mode: str | None = None
    seed: int | None = None
    teacher: str | None = None
    step: int | None = None
    problem_set: str = ""
    extras: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "correct", tuple(int(count) for count in self.correct))
        if self.greedy is not None:
            object.__setattr__(self, "greedy", tuple(int(right) for right in self.greedy))
        if self.teacher == "none":
            object.__setattr__(self, "teacher", None)
        for wrong, why in (
            (not self.name or Path(self.name).name != self.name, f"the name {self.name!r} is no file name"),
            (self.role not in get_args(Role), f"unknown role {self.role!r}: base, teacher, or trained"),
            (self.samples < 1 or not self.correct, "needs at least one problem and one sample"),
            (
                any(not 0 <= c <= self.samples for c in self.correct),
                "a problem has fewer than 0 or more right than sampled",
            ),
            (self.greedy is not None and len(self.greedy) != self.problems, "greedy and correct differ in length"),
            (not set(self.greedy or ()) <= {0, 1}, "greedy holds other numbers than 0 and 1"),
            (not 0 <= self.truncated <= self.samples * self.problems, "more samples truncated than sampled"),
            (not math.isfinite(self.mean_length) or self.mean_length < 0, "mean_length is no length"),
            (
                self.role == "trained" and (self.mode is None or self.seed is None or self.step is None),
                "a trained model needs mode, seed and step",
            ),
            (self.role == "teacher" and self.teacher is None, "a teacher needs its name in `teacher`"),
        ):
            if wrong:
                raise EvaluationError(f"evaluation {self.name!r}: {why}")

    @property
    def problems(self) -> int:
        """P, the number of problems."""
        return len(self.correct)

    @property
    def scores(self) -> NDArray[np.float64]:
        """Share of right samples per problem, float64 [P]."""
        return np.array(self.correct, dtype=np.float64) / self.samples

    @property
    def pass_at_1(self) -> float:
        """Share of right samples."""
        return float(self.scores.mean())

    @property
    def greedy_accuracy(self) -> float | None:
        """Share of right greedy responses, None if there are none."""
        return None if self.greedy is None else sum(self.greedy) / self.problems


def write_evaluation(evaluation: Evaluation, folder: Path | str) -> Path:
    """Write `folder/<name>.json` atomically and return its path."""
    content = dataclasses.asdict(evaluation) | {"problems": evaluation.problems}
    return write_atomic(Path(folder) / f"{evaluation.name}.json", json.dumps(content) + "\n")


def read_evaluation(path: Path | str) -> Evaluation:
    """Read one evaluation. EvaluationError names the file: no such file, no JSON, other keys, wrong numbers."""
    try:
        content: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
        problems = content.pop("problems")
        evaluation = Evaluation(**content)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise EvaluationError(f"{path}: not an evaluation ({error})") from None
    if problems != evaluation.problems:
        raise EvaluationError(f"{path}: {problems!r} problems announced, {evaluation.problems} found")
    return evaluation


def read_evaluations(folder: Path | str) -> list[Evaluation]:
    """Read every `*.json` of a folder by name; none if there is no folder. EvaluationError as `read_evaluation`."""
    return [read_evaluation(path) for path in sorted(Path(folder).glob("*.json"))]
