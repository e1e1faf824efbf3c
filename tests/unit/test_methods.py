"""The methods registry, and each method's advantages on a small jagged batch against numbers worked out by hand."""

import math
import sys

import pytest
import torch

import distilled_rl.methods
from distilled_rl.checks import check_run
from distilled_rl.config import DistilledRLConfig
from distilled_rl.methods import TeacherBatch, get_method, methods, register
from distilled_rl.recipe import compose

OFFSETS = torch.tensor([0, 3, 5, 6])  # torch adds nested tensors only when they share the object


def jagged(*rows):
    values = torch.tensor([value for row in rows for value in row])
    return torch.nested.nested_tensor_from_jagged(values, OFFSETS, max_seqlen=3)


def batch(**changes):
    """Rewarded, not rewarded, rewarded; the last token of the first response is masked, with a NaN under it."""
    fields = {
        "teacher_log_probs": jagged([-1.0, -3.0, math.nan], [-0.5, -2.0], [-1.0]),
        "old_log_probs": jagged([-2.0, -1.0, -1.0], [-1.5, -1.0], [-1.25]),
        "advantages": jagged([2.0, 2.0, 2.0], [-1.0, -1.0], [0.5]),
        "mask": jagged([True, True, False], [True, True], [True]),
    }
    return TeacherBatch(**(fields | changes))


def apply(mode, fields, **options):
    settings = DistilledRLConfig.from_dict({"mode": mode, **options})
    advantages, metrics = get_method(mode).apply(fields, settings.options)
    assert torch.equal(advantages.offsets(), fields.advantages.offsets())
    assert advantages.dtype == torch.float32
    assert all(math.isfinite(value) for value in metrics.values())
    return advantages.values()


def test_the_four_modes_are_there():
    assert {name: method.needs_teacher for name, method in methods().items()} == {
        "grpo": False,
        "opd": True,
        "opd_rl": True,
        "distilled_rl": True,
    }


def test_grpo_returns_the_advantages():
    fields = batch()
    assert torch.equal(apply("grpo", fields), fields.advantages.values())


def test_opd_is_the_log_ratio_times_the_coefficient():
    # log rho: 1, -2, masked | 1, -1 | 0.25
    assert apply("opd", batch()).tolist() == [1.0, -2.0, 0.0, 1.0, -1.0, 0.25]
    assert apply("opd", batch(), teacher_coef=0.5).tolist() == [0.5, -1.0, 0.0, 0.5, -0.5, 0.125]


def test_opd_does_not_look_at_the_advantages():
    other = batch(advantages=jagged([0.0, 0.0, 0.0], [9.0, 9.0], [-9.0]))
    assert torch.equal(apply("opd", other), apply("opd", batch()))


def test_opd_rl_adds_the_log_ratio():
    # 2 + 1/4, 2 - 2/4, 2 (masked) | -1 + 1/4, -1 - 1/4 | 0.5 + 0.25/4
    assert apply("opd_rl", batch(), teacher_coef=0.25).tolist() == [2.25, 1.5, 2.0, -0.75, -1.25, 0.5625]


def test_opd_rl_with_lambda_zero_is_grpo():
    assert torch.equal(apply("opd_rl", batch(), teacher_coef=0.0), apply("grpo", batch()))


def test_distilled_rl_by_hand():
    # eps_rho = e: log rho_bar = 1, -1 with mean 0, so w = e, 1/e; a single token has w = 1; A < 0 stays
    want = [2 * math.e, 2 / math.e, 2.0, -1.0, -1.0, 0.5]
    assert apply("distilled_rl", batch(), eps_rho=math.e).tolist() == pytest.approx(want, rel=1e-6)


def test_distilled_rl_without_normalisation_or_reset():
    # log rho clipped to [-1, 1]: 1, -1, masked | 1, -1 | 0.25
    e = math.e
    want = [2 * e, 2 / e, 2.0, -1.0, -1.0, 0.5 * math.exp(0.25)]
    assert apply("distilled_rl", batch(), eps_rho=e, normalize=False).tolist() == pytest.approx(want, rel=1e-6)
    want = [2 * e, 2 / e, 2.0, -e, -1 / e, 0.5 * math.exp(0.25)]
    got = apply("distilled_rl", batch(), eps_rho=e, normalize=False, apply_to="all")
    assert got.tolist() == pytest.approx(want, rel=1e-6)


def test_distilled_rl_with_eps_rho_one_is_grpo():
    assert torch.equal(apply("distilled_rl", batch(), eps_rho=1.0), apply("grpo", batch()))


@pytest.mark.parametrize("mode", ["opd_rl", "distilled_rl"])
def test_a_teacher_equal_to_the_student_changes_nothing(mode):
    fields = batch(teacher_log_probs=batch().old_log_probs)
    assert torch.equal(apply(mode, fields), apply("grpo", fields))


def test_another_teacher_changes_the_advantages():
    other = batch(teacher_log_probs=jagged([-3.0, -1.0, 0.0], [-2.0, -0.5], [-2.0]))
    for mode in ("opd", "opd_rl", "distilled_rl"):
        assert not torch.equal(apply(mode, other), apply(mode, batch()))


def test_name_taken():
    with pytest.raises(ValueError, match=r"method 'opd' is already registered by distilled_rl\.methods\.opd"):
        register("opd")(test_name_taken)
    assert get_method("opd").apply.__module__ == "distilled_rl.methods.opd"


def test_unknown_name_lists_the_known():
    with pytest.raises(
        ValueError, match=r"unknown mode 'ppo': distilled_rl\.mode must be one of distilled_rl, grpo, opd"
    ):
        get_method("ppo")


METHOD = '''
"""Halve the advantage where the teacher is less sure than a threshold."""

from dataclasses import dataclass

from distilled_rl.methods import register


@dataclass(frozen=True)
class Options:
    threshold: float = -1.0

    def __post_init__(self):
        if self.threshold > 0:
            raise ValueError(f"distilled_rl.threshold is {self.threshold}: a log-probability is never above 0")


@register("doubt", options=Options)
def doubt(batch, options):
    unsure = batch.teacher_log_probs < options.threshold
    return batch.advantages * (1.0 - 0.5 * unsure), {"doubt/threshold": options.threshold}
'''
RECIPE = "defaults: [base, _self_]\ndistilled_rl: {mode: doubt, threshold: -1.5}\n"


@pytest.fixture
def new_method(tmp_path, monkeypatch):
    """A method in one file and a recipe in another, in a folder that is on the package's path."""
    (tmp_path / "doubt.py").write_text(METHOD)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    monkeypatch.setattr(distilled_rl.methods, "__path__", [*distilled_rl.methods.__path__, str(tmp_path)])
    yield tmp_path / "recipe.yaml"
    distilled_rl.methods._METHODS.pop("doubt", None)
    sys.modules.pop("distilled_rl.methods.doubt", None)


def test_a_new_method_is_one_file_and_one_recipe(new_method, assets):
    config = compose(str(new_method), assets.overrides("doubt"))
    assert check_run(config) == []
    assert DistilledRLConfig.from_config(config).options.threshold == -1.5
    assert config.run.name.startswith("student-doubt-teacher")
    # teacher below -1.5: only -3 of the first response and -2 of the second (NaN compares false)
    assert apply("doubt", batch(), threshold=-1.5).tolist() == [2.0, 1.0, 2.0, -1.0, -0.5, 0.5]


def test_options_of_a_new_method_are_checked_like_the_others(new_method, assets):
    with pytest.raises(ValueError, match=r"distilled_rl\.threshold is 1\.0: a log-probability is never above 0"):
        DistilledRLConfig.from_dict({"mode": "doubt", "threshold": 1.0})
    with pytest.raises(ValueError, match=r"did you mean distilled_rl\.threshold\?"):
        DistilledRLConfig.from_dict({"mode": "doubt", "treshold": -1.0})


def test_two_files_may_not_take_one_name(new_method):
    (new_method.parent / "doubt_again.py").write_text(METHOD)
    try:
        with pytest.raises(ValueError, match="method 'doubt' is already registered by"):
            methods()
    finally:
        sys.modules.pop("distilled_rl.methods.doubt_again", None)
