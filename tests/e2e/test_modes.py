"""The four modes through real verl, Ray, and vLLM on the CPU."""

import math
from pathlib import Path

import pytest
import torch

from tests.e2e.conftest import Finished

pytestmark = pytest.mark.e2e

MODES = ("grpo", "opd", "opd_rl", "distilled_rl")
LEARNING = ("actor/grad_norm", "actor/pg_loss", "critic/score/mean", "response_length/mean")


def assert_bit_equal(left: Finished, right: Finished) -> None:
    one, two = left.weights(), right.weights()
    assert one.keys() == two.keys()
    different = [name for name in one if not torch.equal(one[name], two[name])]
    assert not different, f"weights differ: {different[:3]}"


def test_weight_sync_is_exact_at_every_step(four: dict[str, Finished], twin: dict[str, Finished]) -> None:
    for run in [*four.values(), *twin.values()]:
        for metrics in run.steps():
            assert metrics["training/rollout_probs_diff_max"] < 1e-5


def test_each_mode_trained_six_steps(four: dict[str, Finished]) -> None:
    for mode in MODES:
        steps = four[mode].steps()
        assert len(steps) == 6
        assert all(math.isfinite(metrics["actor/grad_norm"]) and metrics["actor/grad_norm"] > 0 for metrics in steps)


def test_eps_rho_one_equals_grpo(twin: dict[str, Finished]) -> None:
    assert_bit_equal(twin["eps1"], twin["grpo"])
    for ours, grpo in zip(twin["eps1"].steps(), twin["grpo"].steps(), strict=True):
        assert {key: ours[key] for key in LEARNING} == {key: grpo[key] for key in LEARNING}


def test_lambda_zero_equals_grpo(twin: dict[str, Finished]) -> None:
    assert_bit_equal(twin["lambda0"], twin["grpo"])


def test_served_teacher_with_the_students_weights_changes_nothing(twin: dict[str, Finished]) -> None:
    # Step 1: the teacher is the student. Its log-probs come from another engine, so equal within fp32 noise.
    first, grpo = twin["twin"].steps()[0], twin["grpo"].steps()[0]
    assert abs(first["rho/w_max"] - 1) < 1e-3 and abs(first["rho/w_min"] - 1) < 1e-3
    assert first["teacher/kl_k1"] == pytest.approx(0, abs=1e-5)
    assert first["actor/grad_norm"] == pytest.approx(grpo["actor/grad_norm"], rel=1e-3)
    assert first["actor/pg_loss"] == pytest.approx(grpo["actor/pg_loss"], abs=1e-5)


def test_weights_stay_normalised_in_training(four: dict[str, Finished]) -> None:
    for metrics in four["distilled_rl"].steps():
        assert metrics["rho/geomean_abs_log_max"] < 1e-6
        assert 1 / 9 <= metrics["rho/w_min"] <= 1 <= metrics["rho/w_max"] <= 9
        assert metrics["rho/w_max"] > 1  # the clean teacher does say something


def test_the_teacher_reaches_the_update(four: dict[str, Finished]) -> None:
    grpo = four["grpo"].weights()
    for mode in ("opd", "opd_rl", "distilled_rl"):
        other = four[mode].weights()
        assert any(not torch.equal(grpo[name], other[name]) for name in grpo), mode


def test_grpo_is_not_asked_for_a_teacher(four: dict[str, Finished]) -> None:
    assert not [key for key in four["grpo"].steps()[0] if key.startswith(("teacher/", "rho/"))]


def test_opd_moves_the_student_toward_the_teacher(four: dict[str, Finished], miniature: Path) -> None:
    before = held_out_kl(miniature / "models" / "student", miniature / "models" / "teacher-clean")
    after = held_out_kl(four["opd"].model(), miniature / "models" / "teacher-clean")
    assert after < 0.9 * before, (before, after)


@torch.inference_mode()
def held_out_kl(student: Path, teacher: Path) -> float:
    """Exact KL(student || teacher) in nats per token, over the student's own samples on 200 held-out problems."""
    from distilled_rl.miniature.generate import sample
    from distilled_rl.miniature.models import load_model
    from distilled_rl.miniature.task import held_out_problems
    from distilled_rl.miniature.tokenizer import PAD_ID, encode

    model, judge = load_model(student), load_model(teacher)
    prompts = torch.tensor([encode(problem.prompt) for problem in held_out_problems()[:200]])
    responses = sample(model, prompts, torch.Generator().manual_seed(0))
    ids = torch.cat([prompts, responses], dim=1)
    log_p = model(input_ids=ids).logits[:, prompts.shape[1] - 1 : -1].log_softmax(-1)
    log_q = judge(input_ids=ids).logits[:, prompts.shape[1] - 1 : -1].log_softmax(-1)
    live = responses != PAD_ID
    return ((log_p.exp() * (log_p - log_q)).sum(-1) * live).sum().item() / live.sum().item()
