"""How the student and each of the five teachers are trained: from which textbook, for how long, in which size.

The seeds of the books were picked among a dozen so that the books themselves (before any training) score what the
simulator's models scored; no seed was picked by the outcome of reinforcement learning.
"""

from dataclasses import dataclass, replace

from distilled_rl.miniature.sft import SFTSettings
from distilled_rl.miniature.task import CLEAN, Textbook, sloppy_textbook


@dataclass(frozen=True)
class Recipe:
    """One model: its size (a key of `models.SIZES`), the book it learns from and the optimiser's settings."""

    size: str
    textbook: Textbook
    sft: SFTSettings


_STUDENT_BOOK = "8"


def _teacher(textbook: Textbook, seed: int) -> Recipe:
    return Recipe("teacher", textbook, SFTSettings(steps=450, lr=2e-3, seed=seed))


STUDENT = Recipe(
    "student",
    sloppy_textbook(_STUDENT_BOOK, fraction=0.25, bad_rate=0.8, slip_rate=0.05),
    SFTSettings(steps=500, lr=3e-3, seed=1),
)

TEACHERS = {
    # right solutions in the student's own style
    "clean": _teacher(CLEAN, seed=11),
    # an eighth of the table bad, drawn without regard to the student's
    "weak": _teacher(sloppy_textbook("9", fraction=0.125, bad_rate=0.8, slip_rate=0.01), seed=12),
    # an eighth of the table bad: half of the student's bad entries, with the same wrong values
    "shared": _teacher(
        sloppy_textbook("7", fraction=0.125, bad_rate=0.8, slip_rate=0.01, share_seed=_STUDENT_BOOK), seed=13
    ),
    # a book like the student's with other bad entries: as able as the student, wrong elsewhere
    "peer": _teacher(sloppy_textbook("2", fraction=0.25, bad_rate=0.8, slip_rate=0.05), seed=14),
    # right solutions that separate the steps by `;`
    "format": _teacher(replace(CLEAN, separator=";"), seed=15),
}
