"""The miniature's student and clean teacher, trained for real."""

from pathlib import Path

import pytest

from distilled_rl.miniature import build, generate, task

pytestmark = pytest.mark.e2e


def test_student_and_clean_teacher_land_where_the_simulators_do(miniature: Path) -> None:
    made = build.build(miniature)
    student, teacher = made.figures["student"], made.figures["clean"]
    assert student["greedy"] == pytest.approx(0.352, abs=0.06)
    assert student["pass_at_1"] == pytest.approx(0.347, abs=0.05)
    assert teacher["greedy"] >= 0.99
    assert teacher["pass_at_1"] == pytest.approx(0.981, abs=0.02)
    rollouts = generate.evaluate(made.student, task.rl_problems()[:1000], greedy=False, seed=1)
    assert rollouts.pass_at_1 == pytest.approx(0.34, abs=0.06)
    assert rollouts.wrong_step == pytest.approx(0.30, abs=0.06)
