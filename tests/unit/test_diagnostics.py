"""The `rho/` and `teacher/` metrics: worked numbers, both layouts, and the cases where nothing is there to average."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distilled_rl.diagnostics import teacher_metrics, weight_metrics
from distilled_rl.objective import teacher_weights

NAN, INF = float("nan"), float("inf")
LAYOUTS = ["padded", "jagged"]


def lay_out(x, lengths, layout):
    if layout == "padded":
        return x
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    values = torch.cat([row[:n] for row, n in zip(x, lengths, strict=True)])
    return torch.nested.nested_tensor_from_jagged(values, offsets)


def both(teacher, old, advantages, live, lengths, layout, **options):
    """Both metric groups of one batch given as padded [B, T]."""
    teacher, old, advantages, live = (lay_out(x, lengths, layout) for x in (teacher, old, advantages, live))
    weights = teacher_weights(teacher, old, advantages, live, **options)
    return weight_metrics(weights, advantages, live, options.get("eps_rho", 3.0)) | teacher_metrics(teacher, old, live)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_worked_example(layout):
    # Response 0 (A = 2): log rho = 1.0, -1.0, 2.0, -0.2; eps_rho = e clips 2.0 to 1; mean of 1, -1, 1, -0.2 is 0.2, so
    # log w = 0.8, -1.2, 0.8, -0.4. Response 1 (A = -1): log rho = -3, 0.5, w = 1. Response 2: masked. Response 3: A = 0
    log_rho = torch.tensor([[1.0, -1.0, 2.0, -0.2], [-3.0, 0.5, 0, 0], [9.0, 9.0, 0, 0], [0.25, 0, 0, 0]])
    lengths = [4, 2, 2, 1]
    live = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0]], dtype=torch.bool)
    old = torch.tensor([-4.0, -1.0, -2.0, -5.0])[:, None].expand(4, 4)
    advantages = torch.tensor([2.0, -1.0, 5.0, 0.0])[:, None].expand(4, 4)
    got = both(old + log_rho, old, advantages, live, lengths, layout, eps_rho=math.e)

    w = [math.exp(x) for x in (0.8, -1.2, 0.8, -0.4)]
    mean_w = sum(w) / 4
    rho = [1.0, -1.0, 2.0, -0.2, -3.0, 0.5, 0.25]
    mean_rho = -0.45 / 7
    want = {
        "rho/log_mean": mean_rho,
        "rho/log_std": math.sqrt(sum((x - mean_rho) ** 2 for x in rho) / 7),
        "rho/log_abs_max": 3.0,
        "rho/clip_fraction_high": 1 / 7,  # 2.0; the token at 1.0 is on the bound and untouched
        "rho/clip_fraction_low": 1 / 7,  # -3.0
        "rho/w_mean": mean_w,
        "rho/w_std": math.sqrt(sum((x - mean_w) ** 2 for x in w) / 4),
        "rho/w_min": math.exp(-1.2),
        "rho/w_max": math.exp(0.8),
        "rho/ess_fraction": sum(w) ** 2 / (4 * sum(x * x for x in w)),
        "rho/geomean_abs_log_max": 0.0,
        "rho/applied_token_fraction": 4 / 7,
        "rho/applied_response_fraction": 1 / 3,
        "rho/advantage_change": 2 * sum(abs(x - 1) for x in w) / (4 * 2 + 2 * 1),
        "rho/zero_advantage_responses": 1.0,
        "rho/empty_responses": 1.0,
        "teacher/kl_k1": -mean_rho,
        "teacher/kl_k3": sum(math.exp(x) - 1 - x for x in rho) / 7,
        "teacher/kl_response_max": 1.25,  # response 1: (3 - 0.5) / 2
        "teacher/kl_by_position_first": (-1.0 + 3.0 - 0.25) / 3,  # one token of each: ceil(4/4), ceil(2/4), ceil(1/4)
        "teacher/kl_by_position_last": (0.2 - 0.5 - 0.25) / 3,
        "teacher/log_prob_mean": (4 * -4 + 2 * -1 - 5 - 0.45) / 7,
        "teacher/student_log_prob_mean": (4 * -4 + 2 * -1 - 5) / 7,
        "teacher/zero_fraction": 0.0,
    }
    assert got == pytest.approx(want, abs=1e-6)
    assert all(type(value) is float for value in got.values())


def test_quarters_count_live_tokens_only():
    # nine live tokens with holes between them: a quarter is ceil(9/4) = 3 tokens; log rho numbers the live ones 1..9
    live = torch.tensor([[0, 1, 1, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0]], dtype=torch.bool)
    log_rho = live.cumsum(-1) * 1.0
    got = teacher_metrics(log_rho - 20, torch.full_like(log_rho, -20.0), live)
    assert got["teacher/kl_by_position_first"] == pytest.approx(-2.0)  # 1, 2, 3
    assert got["teacher/kl_by_position_last"] == pytest.approx(-8.0)  # 7, 8, 9


def test_geomean_is_seen_when_nothing_normalises():
    teacher, old, live = torch.tensor([[-1.0, -1.5]]), torch.tensor([[-2.0, -2.0]]), torch.ones(1, 2, dtype=torch.bool)
    got = both(teacher, old, torch.ones(1, 2), live, [2], "padded", normalize=False)
    assert got["rho/geomean_abs_log_max"] == pytest.approx(0.75)  # (1 + 0.5) / 2


def test_zero_fraction_counts_placeholders():
    teacher = torch.tensor([[0.0, -1.0, 0.0, 0.0]])
    got = teacher_metrics(teacher, torch.full((1, 4), -1.0), torch.tensor([[1, 1, 1, 0]]))
    assert got["teacher/zero_fraction"] == pytest.approx(2 / 3)  # the last zero is masked


def test_a_teacher_equal_to_the_student_changes_nothing():
    old = torch.tensor([[-1.0, -0.3, -2.0]])
    got = both(old, old, torch.ones(1, 3), torch.ones(1, 3), [3], "padded")
    assert got["rho/advantage_change"] == 0.0 and got["rho/ess_fraction"] == 1.0
    assert got["rho/w_min"] == got["rho/w_max"] == got["rho/w_mean"] == 1.0
    assert got["teacher/kl_k1"] == got["teacher/kl_k3"] == 0.0


def test_a_huge_gap_keeps_k3_finite():
    got = teacher_metrics(torch.tensor([[-1.0]]), torch.tensor([[-900.0]]), torch.ones(1, 1))
    assert got["teacher/kl_k1"] == pytest.approx(-899.0)
    assert got["teacher/kl_k3"] == pytest.approx(math.exp(20) - 21)  # verl's bound of 20 on the exponent


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", ["all masked", "no positive advantage", "no tokens"])
def test_over_nothing_every_metric_is_its_neutral_value(case, layout):
    lengths = [0, 0] if case == "no tokens" else [3, 2]
    shape = (2, max(lengths))
    teacher, old = torch.full(shape, -1.0), torch.full(shape, -2.0)
    advantages = torch.full(shape, -1.0)
    live = torch.arange(shape[1]) < torch.tensor(lengths)[:, None]
    if case == "all masked":
        live = live & False
        teacher, advantages = torch.full(shape, NAN), torch.full(shape, INF)
    got = both(teacher, old, advantages, live, lengths, layout)
    neutral = {"rho/w_mean": 1, "rho/w_min": 1, "rho/w_max": 1, "rho/ess_fraction": 1}
    neutral |= {
        "rho/w_std": 0,
        "rho/geomean_abs_log_max": 0,
        "rho/advantage_change": 0,
        "rho/applied_token_fraction": 0,
        "rho/applied_response_fraction": 0,
    }
    if case == "no positive advantage":
        assert got["teacher/kl_k1"] == -1.0 and got["rho/empty_responses"] == 0
    else:
        neutral |= {name: 0 for name in got if name.startswith("teacher/") or name.startswith("rho/log_")}
        assert got["rho/empty_responses"] == 2
    assert {name: got[name] for name in neutral} == neutral


@given(
    lengths=st.lists(st.integers(0, 15), min_size=1, max_size=6).filter(any),
    seed=st.integers(0, 10**6),
    apply_to=st.sampled_from(["positive", "negative", "all"]),
)
@settings(deadline=None, max_examples=100)
def test_padded_and_jagged_agree_and_nothing_is_nan(lengths, seed, apply_to):
    g = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(lengths))
    live = (torch.arange(shape[1]) < torch.tensor(lengths)[:, None]) & (torch.rand(shape, generator=g) > 0.2)
    teacher, old, advantages = (torch.randn(shape, generator=g) for _ in range(3))
    teacher, old = (torch.where(live, x, NAN) for x in (teacher, old))
    padded, jagged = (both(teacher, old, advantages, live, lengths, x, apply_to=apply_to) for x in LAYOUTS)
    assert jagged == pytest.approx(padded, abs=1e-6)
    assert all(math.isfinite(value) for value in padded.values())


def test_a_live_log_prob_that_is_not_finite_is_an_error():
    with pytest.raises(ValueError, match="teacher_log_probs is not finite at 1 live tokens"):
        teacher_metrics(torch.tensor([[NAN]]), torch.zeros(1, 1), torch.ones(1, 1))


def test_lengths_that_differ_are_an_error():
    x, live = torch.full((2, 3), -1.0), torch.ones(2, 3)
    weights = teacher_weights(x, x, x, live)
    with pytest.raises(ValueError, match="align"):
        weight_metrics(weights, x[:, :1], live, 3.0)
    with pytest.raises(ValueError, match="align"):
        teacher_metrics(x, x[:1], live)


def test_every_metric_has_its_line_in_the_docs():
    x = torch.full((1, 2), -1.0)
    docs = Path(__file__).parents[2].joinpath("docs", "metrics.md").read_text(encoding="utf-8")
    for name in both(x, x, x, torch.ones(1, 2), [2], "padded"):
        assert f"`{name}`" in docs, name
