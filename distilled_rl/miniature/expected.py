"""What the miniature should give: the results of a plain PyTorch simulator of the four modes, 5 seeds, without verl.

Same task, sizes and hyperparameters as the miniature; other weights of student and teachers, other sampler. Each `±
half_width` is a 95 % t-interval over the simulator's RL seeds. pass@1 is from 4 samples per problem at temperature 1,
on 1000 problems.
"""

from dataclasses import dataclass
from typing import NamedTuple


class Figure(NamedTuple):
    """pass@1 with the half width of its interval (None: one model, no interval), and greedy accuracy."""

    pass_at_1: float
    half_width: float | None
    greedy: float


@dataclass(frozen=True)
class Expected:
    """A table to compare runs with.

    `steps`: RL steps that the figures hold for. `results`: by (teacher, mode); a mode without a teacher has teacher
    None. `differences`: by (teacher, mode): that mode minus GRPO at the same seeds, and the half width of its interval.
    """

    source: str
    steps: int
    base: Figure
    teachers: dict[str, Figure]
    results: dict[tuple[str | None, str], Figure]
    differences: dict[tuple[str | None, str], tuple[float, float]]


EXPECTED = Expected(
    source="plain PyTorch simulator of the four modes, 5 seeds",
    steps=60,
    base=Figure(0.347, None, 0.352),
    teachers={
        "clean": Figure(0.981, None, 1.000),
        "weak": Figure(0.617, None, 0.607),
        "shared": Figure(0.600, None, 0.578),
        "peer": Figure(0.348, None, 0.357),
    },
    results={
        (None, "grpo"): Figure(0.738, 0.022, 0.934),
        ("clean", "opd"): Figure(0.828, 0.003, 0.995),
        ("clean", "opd_rl"): Figure(0.822, 0.013, 0.994),
        ("clean", "distilled_rl"): Figure(0.788, 0.011, 0.985),
        ("weak", "opd"): Figure(0.764, 0.008, 0.951),
        ("weak", "opd_rl"): Figure(0.817, 0.007, 0.990),
        ("weak", "distilled_rl"): Figure(0.783, 0.022, 0.963),
        ("shared", "opd"): Figure(0.544, 0.015, 0.600),
        ("shared", "opd_rl"): Figure(0.738, 0.010, 0.928),
        ("shared", "distilled_rl"): Figure(0.754, 0.018, 0.943),
        ("peer", "opd"): Figure(0.715, 0.020, 0.915),
        ("peer", "opd_rl"): Figure(0.802, 0.014, 0.987),
        ("peer", "distilled_rl"): Figure(0.766, 0.023, 0.957),
        ("format", "opd"): Figure(0.048, 0.012, 0.053),
        ("format", "opd_rl"): Figure(0.049, 0.018, 0.049),
        ("format", "distilled_rl"): Figure(0.784, 0.015, 0.984),
    },
    differences={("clean", "distilled_rl"): (0.049, 0.025)},
)
