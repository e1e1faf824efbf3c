"""The words of a compatibility report: verdicts, lines, and the pair of models that a topic looks at."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum

from distilled_rl.teacher.model_files import ModelFiles

NOTHING = "nothing to do"


class Verdict(StrEnum):
    """``allowed``: would be refused, had the user not allowed it by name."""

    SAME = "same"
    HARMLESS = "harmless"
    ALLOWED = "allowed"
    REFUSE = "refuse"


@dataclass(frozen=True)
class Line:
    """What was found on one topic, and what to do about it; ``advice`` is empty where all is the same."""

    topic: str
    verdict: Verdict
    found: str
    advice: str = ""


@dataclass(frozen=True)
class Report:
    """One line per topic, in a fixed order."""

    lines: tuple[Line, ...]

    @property
    def refused(self) -> tuple[Line, ...]:
        """The lines for which the teacher must not be used."""
        return tuple(line for line in self.lines if line.verdict is Verdict.REFUSE)

    def __getitem__(self, topic: str) -> Line:
        return next(line for line in self.lines if line.topic == topic)


@dataclass(frozen=True)
class Pair:
    """Two models and the user's choices, as in :func:`distilled_rl.teacher.compatibility.compare`.

    ``needed``: the longest sequence that the teacher must read, None where it is open.
    """

    student: ModelFiles
    teacher: ModelFiles
    needed: int | None
    allow: Collection[str]
    eos_map: Mapping[int, int]
    prompt: str

    def refusal(self, topic: str, found: str, advice: str, consequence: str, name: str | None = None) -> Line:
        """Return a refusal, or what the user is in for where ``name`` (the topic's own by default) is allowed."""
        name = name or topic
        if name in self.allow:
            return Line(topic, Verdict.ALLOWED, found, f"allowed by name: {consequence}")
        return Line(topic, Verdict.REFUSE, found, f"{advice}, or put {name} into teacher.allow ({consequence})")
