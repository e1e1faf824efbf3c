"""A teacher in verl's own FSDP workers, with the student's first weights: the same run as with a served one."""

from pathlib import Path

import pytest

from tests.e2e.conftest import Finished, run_command, sweep_command

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def beside(work: Path, miniature: Path) -> dict[str, Finished]:
    """The run `twin` of the fixture of that name, its teacher colocated, and OPD with it."""
    out = work / "beside"
    runs = ["{name:twin,mode:distilled_rl,seed:1}", "{name:opd,mode:opd,seed:1}"]
    overrides = [
        *("teacher=colocated", "teacher.name=twin", f"teacher.model={miniature}/models/student"),
        *("trainer.total_training_steps=3", "trainer.save_freq=3"),
    ]
    run_command(sweep_command(out, miniature, runs, overrides), out / "log.txt")
    return {name: Finished(out / name) for name in ("twin", "opd")}


def test_a_teacher_that_is_the_student_changes_nothing(beside: dict[str, Finished], twin: dict[str, Finished]) -> None:
    first, grpo = beside["twin"].steps()[0], twin["grpo"].steps()[0]
    assert first["critic/score/mean"] == grpo["critic/score/mean"]
    assert abs(first["rho/w_max"] - 1) < 1e-5 and abs(first["rho/w_min"] - 1) < 1e-5
    assert first["actor/grad_norm"] == pytest.approx(grpo["actor/grad_norm"], rel=1e-5)
    # the teacher's log-ratio is OPD's whole advantage: nothing is left of it
    opd = beside["opd"].steps()[0]
    assert abs(opd["teacher/kl_k1"]) < 1e-6 and opd["actor/grad_norm"] < 1e-4 * grpo["actor/grad_norm"]


def test_colocated_and_served_give_the_same_run(beside: dict[str, Finished], twin: dict[str, Finished]) -> None:
    for step, (ours, served) in enumerate(zip(beside["twin"].steps(), twin["twin"].steps(), strict=True), 1):
        for key in ("actor/grad_norm", "rho/w_max", "rho/w_min", "critic/score/mean", "response_length/mean"):
            assert ours[key] == pytest.approx(served[key], rel=2e-3), (step, key)
    assert beside["twin"].steps()[-1]["rho/w_max"] > 1.001  # the student has moved away from the teacher


def test_only_rows_that_the_method_can_use_are_scored(beside: dict[str, Finished]) -> None:
    for metrics in beside["twin"].steps():
        assert 0 < metrics["teacher/scored_responses"] < 0.7
        assert metrics["training/rollout_probs_diff_max"] < 1e-5
    assert [metrics["teacher/scored_responses"] for metrics in beside["opd"].steps()] == [1.0] * 3
