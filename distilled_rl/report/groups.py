"""Runs that differ in nothing but the seed, and how a group is called and coloured."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from distilled_rl.runs import Run

# Okabe & Ito's colours, which people with any common colour blindness tell apart; the same in every figure.
_MODES = {
    "grpo": ("GRPO", "#000000"),
    "opd": ("OPD", "#0072B2"),
    "opd_rl": ("OPD+RL", "#009E73"),
    "distilled_rl": ("Distilled RL", "#D55E00"),
}
_FURTHER_COLOURS = ("#CC79A7", "#E69F00", "#56B4E9", "#F0E442")


@dataclass(frozen=True)
class Group:
    """The runs of one mode, teacher and planned number of steps, by seed.

    `label` tells it from the other groups; `panel_label` does so among those with the same teacher or none.
    """

    mode: str
    teacher: str | None
    total_steps: int | None
    runs: tuple[Run, ...]
    label: str
    panel_label: str


def mode_label(mode: str) -> str:
    """The mode as people write it."""
    return _MODES[mode][0] if mode in _MODES else mode


def mode_order(mode: str) -> tuple[int, str]:
    """Sort key: the four modes from no teacher to the paper's method, then others by name."""
    return (list(_MODES).index(mode) if mode in _MODES else len(_MODES), mode)


def mode_colours(modes: Sequence[str]) -> dict[str, str]:
    """A colour for each mode; further modes share four colours in the order of their names."""
    further = sorted(set(modes) - set(_MODES))
    known = {mode: colour for mode, (_, colour) in _MODES.items() if mode in modes}
    return known | {mode: _FURTHER_COLOURS[i % len(_FURTHER_COLOURS)] for i, mode in enumerate(further)}


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Group runs by teacher, mode and planned steps, modes without a teacher first.

    ValueError: runs of several students, or two runs that differ in nothing that a group or its seeds tell apart.
    """
    students = sorted({run.student for run in runs})
    if len(students) > 1:
        raise ValueError(f"one report is about one student: got runs of {', '.join(students)}")
    members: dict[tuple[str | None, str, int | None], list[Run]] = defaultdict(list)
    for run in runs:
        members[run.teacher, run.mode, run.total_steps].append(run)
    many_teachers = len({teacher for teacher, _, _ in members if teacher}) > 1
    many_lengths = len({steps for _, _, steps in members}) > 1
    groups = []
    for key in sorted(members, key=lambda key: (key[0] or "", mode_order(key[1]), key[2] or 0)):
        teacher, mode, steps = key
        same = sorted(members[key], key=lambda run: run.seed)
        for one, other in pairwise(same):
            if one.seed == other.seed:
                raise ValueError(
                    f"runs {one.name} and {other.name} have the same mode, teacher, length and seed {one.seed}"
                )
        named = f", {teacher}" if many_teachers and teacher else ""
        length = f", {steps} steps" if many_lengths else ""
        label, panel_label = f"{mode_label(mode)}{named}{length}", f"{mode_label(mode)}{length}"
        groups.append(Group(mode, teacher, steps, tuple(same), label, panel_label))
    return groups
