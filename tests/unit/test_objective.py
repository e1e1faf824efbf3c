"""The four steps of the teacher weight, against a token loop written from the paper and against its algebra."""

import inspect
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from distilled_rl.objective import (
    clip_log_ratio,
    geometric_normalize,
    negative_reset,
    reverse_kl_advantage,
    teacher_log_ratio,
    teacher_weights,
)

NAN, INF = float("nan"), float("inf")
LAYOUTS = ["padded", "jagged"]
LENGTHS = [7, 1, 12, 0, 4]


def lay_out(x, lengths, layout):
    """A padded [B, T] tensor in `layout`; a jagged one gets offsets of its own, like each field of a training batch."""
    if layout == "padded":
        return x
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    values = torch.cat([row[:n] for row, n in zip(x, lengths, strict=True)])
    return torch.nested.nested_tensor_from_jagged(values, offsets)


def pad(x, lengths, fill):
    """The rows of either layout as a padded [B, T] tensor, `fill` beyond each row's length."""
    rows = list(x.unbind()) if x.is_nested else [row[:n] for row, n in zip(x, lengths, strict=True)]
    out = torch.full((len(lengths), max(lengths)), fill, dtype=x.dtype)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out


def random_batch(seed, lengths=LENGTHS, spread=1.5, holes=True):
    """teacher, old, A, mask as padded [B, T]; A is one number per response, its sign alternates, every third is 0."""
    g = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(lengths))
    old = -4 * torch.rand(shape, generator=g)
    teacher = (old + spread * torch.randn(shape, generator=g)).clamp(-5, 0)
    live = torch.arange(shape[1]) < torch.tensor(lengths)[:, None]
    if holes:  # a multi-turn response has tool output inside, which is masked
        live = live & (torch.rand(shape, generator=g) > 0.2)
    signs = torch.tensor([(1.0, -1.0, 0.0)[i % 3] for i in range(len(lengths))])
    advantages = (signs * (0.5 + torch.rand(len(lengths), generator=g)))[:, None].expand(shape).clone()
    return teacher, old, advantages, live


def weights_in(layout, teacher, old, advantages, live, lengths=LENGTHS, **options):
    return teacher_weights(*(lay_out(x, lengths, layout) for x in (teacher, old, advantages, live)), **options)


def slow_weight_row(teacher, old, advantage, live, eps_rho, normalize, apply_to):
    """One response, one token at a time, on plain numbers: exp, clamp, log, mean, exp, then the reset."""
    rho = [min(max(math.exp(t - o), 1 / eps_rho), eps_rho) for t, o, m in zip(teacher, old, live, strict=True) if m]
    geomean = math.exp(sum(math.log(r) for r in rho) / len(rho)) if rho and normalize else 1.0
    kept = {"positive": lambda a: a > 0, "negative": lambda a: a < 0, "all": lambda a: True}[apply_to]
    rho_til, w = iter([r / geomean for r in rho]), []
    for a, m in zip(advantage, live, strict=True):
        ratio = next(rho_til) if m else 1.0
        w.append(ratio if kept(a) else 1.0)
    return w


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("eps_rho", [1.2, 3.0, 10.0])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("apply_to", ["positive", "negative", "all"])
def test_agrees_with_a_token_loop(apply_to, normalize, eps_rho, layout):
    for seed in range(5):
        batch = random_batch(seed)
        got = weights_in(layout, *batch, eps_rho=eps_rho, normalize=normalize, apply_to=apply_to)
        rows = (x.tolist() for x in batch)
        want = [slow_weight_row(*row, eps_rho, normalize, apply_to) for row in zip(*rows, strict=True)]
        # float32 subtraction, clamp, mean and exp each round by 6e-8 of numbers up to 4: below 1e-6 of w in sum
        torch.testing.assert_close(pad(got.w, LENGTHS, 1.0), torch.tensor(want), rtol=1e-6, atol=0)


def test_worked_example():
    # ratios e^0.2, e^3, e^-0.2; eps_rho = 3 clips the middle one to log 3 = 1.0986; the mean of the logs is then 0.3662
    old = torch.tensor([[-1.0, -4.0, -1.0]])
    teacher = old + torch.tensor([[0.2, 3.0, -0.2]])
    weights = teacher_weights(teacher, old, torch.ones(1, 3), torch.ones(1, 3, dtype=torch.bool))
    want = torch.tensor([[0.2 - 0.36620, 1.09861 - 0.36620, -0.2 - 0.36620]]).exp()
    torch.testing.assert_close(weights.w, want, rtol=1e-4, atol=0)
    torch.testing.assert_close(weights.log_rho, torch.tensor([[0.2, 3.0, -0.2]]), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(weights.log_rho_bar, torch.tensor([[0.2, math.log(3), -0.2]]), rtol=1e-6, atol=1e-6)
    assert weights.applied.tolist() == [[True, True, True]]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("apply_to", ["positive", "negative", "all"])
def test_a_teacher_equal_to_the_student_gives_w_of_exactly_one(apply_to, normalize, layout):
    _, old, advantages, live = random_batch(0)
    weights = weights_in(layout, old.clone(), old, advantages, live, normalize=normalize, apply_to=apply_to)
    assert (pad(weights.w, LENGTHS, 1.0) == 1.0).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("apply_to", ["positive", "negative", "all"])
def test_eps_rho_of_one_is_grpo(apply_to, layout):
    weights = weights_in(layout, *random_batch(1), eps_rho=1.0, apply_to=apply_to)
    assert (pad(weights.w, LENGTHS, 1.0) == 1.0).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_geometric_mean_of_the_normalised_ratio_is_one(layout):
    lengths = [8192, 1, 2, 777, 0, 4096]
    teacher, old, _, live = random_batch(2, lengths, spread=3.0)
    mask = lay_out(live, lengths, layout)
    log_rho = teacher_log_ratio(lay_out(teacher, lengths, layout), lay_out(old, lengths, layout), mask)
    log_rho_til = geometric_normalize(clip_log_ratio(log_rho, 3.0), mask)
    rho_til = pad(log_rho_til, lengths, 0.0).exp().double()  # the float32 weight itself, then its mean in float64
    log_geomean = rho_til.log().sum(-1) / live.sum(-1).clamp(min=1)
    torch.testing.assert_close(log_geomean.exp(), torch.ones(len(lengths), dtype=torch.float64), rtol=0, atol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_ratio_that_is_constant_over_a_long_response_gives_w_of_exactly_one(layout):
    # 8192 times a 24-bit number fits the 53 bits of float64, so the mean is that number; summed in float32 it is not
    lengths = [8192, 3]
    old = torch.full((2, 8192), -2.0)
    live = torch.arange(8192) < torch.tensor(lengths)[:, None]
    for shift in (0.3, -0.7, 1.0):
        weights = weights_in(layout, old + shift, old, torch.ones_like(old), live, lengths)
        assert (pad(weights.w, lengths, 1.0) == 1.0).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_that_the_reset_keeps_have_w_of_exactly_one(layout):
    teacher, old, advantages, live = random_batch(3)
    for apply_to, kept_out in (("positive", advantages <= 0), ("negative", advantages >= 0)):
        w = pad(weights_in(layout, teacher, old, advantages, live, apply_to=apply_to).w, LENGTHS, 1.0)
        assert (w[kept_out] == 1.0).all()
        assert (w[~kept_out & live] != 1.0).any()


def test_all_reweights_a_zero_advantage_too():
    teacher, old, advantages, live = random_batch(4, [6], holes=False)
    weights = teacher_weights(teacher, old, 0 * advantages, live, apply_to="all")
    assert (weights.w != 1.0).all() and weights.applied.all()
    assert (weights.w * 0 * advantages == 0).all()


def test_an_advantage_per_token_is_selected_per_token():
    # log rho = (1, 0, -1) has mean 0, so w = (e, 1, 1/e) wherever A > 0
    old = torch.full((1, 3), -2.0)
    teacher = torch.tensor([[-1.0, -2.0, -3.0]])
    weights = teacher_weights(teacher, old, torch.tensor([[1.0, -1.0, -1.0]]), torch.ones(1, 3))
    torch.testing.assert_close(weights.w, torch.tensor([[math.e, 1.0, 1.0]]))
    assert weights.applied.tolist() == [[True, False, False]]


@given(
    shift=st.floats(-0.375, 0.375, width=32),
    log_rho=st.lists(st.floats(-0.625, 0.625, width=32), min_size=1, max_size=40),
)
@settings(deadline=None, max_examples=100)
def test_a_shift_of_a_whole_response_changes_nothing_while_no_clip_is_active(shift, log_rho):
    # |log_rho| + |shift| <= 1.0 < log 3
    old = torch.full((1, len(log_rho)), -2.0)
    ratio = torch.tensor([log_rho])
    one, live = torch.ones_like(old), torch.ones_like(old, dtype=torch.bool)
    before = teacher_weights(old + ratio, old, one, live).w
    after = teacher_weights(old + ratio + shift, old, one, live).w
    torch.testing.assert_close(after, before, rtol=2e-6, atol=0)  # float32 keeps 2.4e-7 of numbers near -2, four times


@given(
    rows=st.lists(st.lists(st.floats(-60, 60, width=32), min_size=0, max_size=30), min_size=1, max_size=6),
    eps_rho=st.floats(1.0, 50.0),
    normalize=st.booleans(),
)
@settings(deadline=None, max_examples=150)
def test_a_weight_lies_within_eps_squared(rows, eps_rho, normalize):
    lengths = [len(row) for row in rows]
    teacher = torch.zeros(len(rows), max(1, *lengths))
    for i, row in enumerate(rows):
        teacher[i, : len(row)] = torch.tensor(row)
    live = torch.arange(teacher.shape[1]) < torch.tensor(lengths)[:, None]
    old, one = torch.zeros_like(teacher), torch.ones_like(teacher)
    w = teacher_weights(teacher, old, one, live, eps_rho=eps_rho, normalize=normalize).w
    bound = eps_rho**2 if normalize else eps_rho
    assert w.max() <= bound * (1 + 1e-6) and w.min() >= (1 - 1e-6) / bound


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("garbage", [NAN, INF, -INF])
def test_what_lies_under_the_mask_never_leaks(garbage, layout):
    teacher, old, advantages, live = random_batch(5)
    clean = weights_in(layout, teacher, old, advantages, live, apply_to="all")
    soiled = [torch.where(live, x, garbage) for x in (teacher, old, advantages)]
    dirty = weights_in(layout, *soiled, live, apply_to="all")
    for name in clean._fields:
        assert torch.equal(pad(getattr(dirty, name), LENGTHS, 0), pad(getattr(clean, name), LENGTHS, 0)), name
    # each step on its own
    mask = lay_out(live, LENGTHS, layout)
    for step in (geometric_normalize, reverse_kl_advantage):
        want, got = (
            pad(step(lay_out(torch.where(live, teacher - old, under), LENGTHS, layout), mask), LENGTHS, 0.0)
            for under in (0.0, garbage)
        )
        assert torch.equal(got, want)
        assert (got[~live] == 0).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("where", ["teacher_log_probs", "old_log_probs", "advantages"])
@pytest.mark.parametrize("garbage", [NAN, INF, -INF])
def test_a_live_token_that_is_not_finite_is_an_error_that_names_its_rows(garbage, where, layout):
    teacher, old, advantages, _ = random_batch(6)
    live = torch.arange(12) < torch.tensor(LENGTHS)[:, None]
    batch = {"teacher_log_probs": teacher, "old_log_probs": old, "advantages": advantages}
    batch[where][0, 2] = batch[where][2, 0] = batch[where][2, 11] = garbage
    with pytest.raises(ValueError, match=rf"{where} is not finite at 3 live tokens of 2 responses \(rows 0, 2\).*mask"):
        weights_in(layout, *batch.values(), live)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_response_without_a_live_token_has_w_of_one(layout):
    teacher, old, advantages, live = random_batch(7)
    live[0] = False
    weights = weights_in(layout, torch.where(live, teacher, NAN), old, advantages, live, apply_to="all")
    assert (pad(weights.w, LENGTHS, 1.0)[0] == 1.0).all()
    for name in ("log_rho", "log_rho_bar", "applied"):
        assert (pad(getattr(weights, name), LENGTHS, 0)[0] == 0).all()
    # the other responses do not notice
    live_before = random_batch(7)[3]
    before = weights_in(layout, teacher, old, advantages, live_before, apply_to="all")
    assert torch.equal(pad(weights.w, LENGTHS, 1.0)[1:], pad(before.w, LENGTHS, 1.0)[1:])


@given(
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=8).filter(any),
    seed=st.integers(0, 10**6),
    normalize=st.booleans(),
    apply_to=st.sampled_from(["positive", "negative", "all"]),
)
@settings(deadline=None, max_examples=100)
def test_padded_and_jagged_agree(lengths, seed, normalize, apply_to):
    batch = random_batch(seed, lengths)
    padded = weights_in("padded", *batch, lengths, normalize=normalize, apply_to=apply_to)
    jagged = weights_in("jagged", *batch, lengths, normalize=normalize, apply_to=apply_to)
    for name in padded._fields:
        a, b = pad(getattr(padded, name), lengths, 0), pad(getattr(jagged, name), lengths, 0)
        torch.testing.assert_close(a.float(), b.float(), rtol=0, atol=1e-6)


def test_jagged_results_multiply_with_the_advantages_and_pad_without_waste():
    inputs = [lay_out(x, LENGTHS, "jagged") for x in random_batch(8)]
    weights = teacher_weights(*inputs)
    product = weights.w * inputs[2]  # torch multiplies nested tensors only when they share one offsets tensor
    assert product.offsets() is inputs[2].offsets()
    for x in (*weights, product):
        assert x.layout == torch.jagged
        with LargestTensor() as seen:
            assert x.to_padded_tensor(0).shape == (len(LENGTHS), max(LENGTHS))
        assert seen.numel == len(LENGTHS) * max(LENGTHS)  # without max_seqlen: rows x all tokens


class LargestTensor(TorchDispatchMode):
    """Records the largest tensor that any operator makes, inside nested tensors too."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(isinstance(x, torch.Tensor) and x.is_nested for x in tree_leaves((args, kwargs))):
            return NotImplemented  # let the nested tensor unfold into plain operators, which come back here
        out = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor))])
        return out


def test_one_long_response_does_not_blow_up_the_jagged_path():
    lengths = [20_000] + [1] * 500
    tokens = sum(lengths)
    g = torch.Generator().manual_seed(9)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    teacher, old, advantages = (
        torch.nested.nested_tensor_from_jagged(torch.randn(tokens, generator=g), offsets.clone()) for _ in range(3)
    )
    mask = torch.nested.nested_tensor_from_jagged(torch.ones(tokens, dtype=torch.bool), offsets.clone())
    with LargestTensor() as seen:
        weights = teacher_weights(teacher, old, advantages, mask)
        reverse_kl_advantage(weights.log_rho, mask)
    assert seen.numel <= tokens + 1  # padded, it would be 501 * 20_000
    with LargestTensor() as control:
        weights.w.to_padded_tensor(1.0)
    assert control.numel == len(lengths) * max(lengths)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_lengths_that_differ_are_an_error_and_never_broadcast(layout):
    ok = torch.zeros(2, 4)
    mask = torch.ones(2, 4, dtype=torch.bool)
    good = [lay_out(x, [4, 3], layout) for x in (ok, ok, ok, mask)]
    other = [torch.zeros(shape) for shape in ((2, 1), (1, 4), (2, 5), (4, 2), (4,), (2, 4, 1))]
    if layout == "jagged":  # the lengths swapped, a third dimension, a row less, the other layout
        other = [lay_out(*x, layout) for x in ((ok, [3, 4]), (ok[..., None], [4, 3]), (ok[:1], [4]))] + [ok]
    teacher_weights(*good)
    for bad in other:
        for position in range(4):
            inputs = list(good)
            inputs[position] = bad
            with pytest.raises(ValueError):
                teacher_weights(*inputs)
        for step in (geometric_normalize, negative_reset, reverse_kl_advantage):
            with pytest.raises(ValueError):
                step(good[0], bad)
        with pytest.raises(ValueError):
            teacher_log_ratio(good[0], bad, good[3])


def test_a_nested_tensor_with_holes_is_refused():
    holes = torch.nested.narrow(torch.zeros(2, 6), 1, torch.tensor([0, 1]), torch.tensor([3, 2]), layout=torch.jagged)
    with pytest.raises(ValueError, match="contiguous"):
        geometric_normalize(holes, holes)


@pytest.mark.parametrize("eps_rho", [0.99, 0.0, -3.0, NAN, INF])
def test_a_bad_eps_rho_is_an_error(eps_rho):
    with pytest.raises(ValueError, match="eps_rho must be finite and at least 1"):
        teacher_weights(*random_batch(0), eps_rho=eps_rho)


def test_an_unknown_apply_to_is_an_error_that_lists_the_known():
    with pytest.raises(ValueError, match="positive, negative, all, got 'postive'"):
        teacher_weights(*random_batch(0), apply_to="postive")
    with pytest.raises(ValueError, match="positive, negative, all"):
        negative_reset(torch.zeros(1, 1), torch.zeros(1, 1), "both")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_any_float_comes_out_as_float32_computed_in_float32(dtype, layout):
    teacher, old, advantages, live = random_batch(10)
    teacher, old, advantages = (x.to(dtype) for x in (teacher, old, advantages))
    got = weights_in(layout, teacher, old, advantages, live)
    want = weights_in(layout, teacher.float(), old.float(), advantages.float(), live)
    assert got.w.dtype == got.log_rho.dtype == got.log_rho_bar.dtype == torch.float32
    assert got.applied.dtype == torch.bool
    assert torch.equal(pad(got.w, LENGTHS, 1.0), pad(want.w, LENGTHS, 1.0))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32, torch.bfloat16])
def test_the_mask_may_be_of_any_dtype(dtype, layout):
    teacher, old, advantages, live = random_batch(11)
    want = weights_in(layout, teacher, old, advantages, live)
    got = weights_in(layout, teacher, old, advantages, live.to(dtype))
    assert torch.equal(pad(got.w, LENGTHS, 1.0), pad(want.w, LENGTHS, 1.0))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_inf_under_the_mask_leaves_gradients_finite(layout):
    teacher, old, advantages, live = random_batch(12)
    teacher = torch.where(live, teacher, -INF).requires_grad_()
    old = torch.where(live, old, -INF).requires_grad_()
    weights = weights_in(layout, teacher, old, advantages, live, apply_to="all")
    w = weights.w.values() if layout == "jagged" else weights.w
    (w**2).sum().backward()
    for x in (teacher, old):
        assert torch.isfinite(x.grad).all()
        assert (x.grad[~live] == 0).all()
        assert (x.grad[live] != 0).any()


def test_the_inputs_are_left_as_they_were():
    batch = random_batch(13)
    copies = [x.clone() for x in batch]
    teacher_weights(*batch)
    assert all(torch.equal(x, y) for x, y in zip(batch, copies, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_reverse_kl_advantage_is_minus_the_k1_estimate(layout):
    teacher, old, _, live = random_batch(14)
    mask = lay_out(live, LENGTHS, layout)
    log_rho = teacher_log_ratio(lay_out(teacher, LENGTHS, layout), lay_out(old, LENGTHS, layout), mask)
    got = pad(reverse_kl_advantage(log_rho, mask, coef=0.5), LENGTHS, 0.0)
    want = torch.where(live, -0.5 * (old - teacher), 0.0)  # k1 = log pi_student - log pi_teacher
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


def test_the_reverse_kl_advantage_has_the_gradient_of_the_kl():
    # Two tokens, p = (sigmoid(x), sigmoid(-x)) the student; with A = log(q/p), E_p[A grad log p] is -d KL(p || q)/dx
    x = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    q = torch.tensor([0.9, 0.1], dtype=torch.float64)
    p = torch.stack([torch.sigmoid(x), torch.sigmoid(-x)])
    kl_gradient = torch.autograd.grad((p * (p.log() - q.log())).sum(), x, retain_graph=True)[0]
    log_rho = teacher_log_ratio(q.log()[None], p.detach().log()[None], torch.ones(1, 2))
    advantage = reverse_kl_advantage(log_rho, torch.ones(1, 2))[0].double()
    policy_gradient = torch.autograd.grad((p.detach() * advantage * p.log()).sum(), x)[0]
    assert policy_gradient.item() == pytest.approx(-kl_gradient.item(), abs=1e-6)


def test_ppo_loss_on_w_times_a_is_the_paper_objective():
    from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla
    from verl.workers.config import ActorConfig

    lengths = [7, 1, 12, 4]
    teacher, old, advantages, live = random_batch(15, lengths)
    live[:, 0] = True
    new = (old + 0.3 * torch.randn(old.shape, generator=torch.Generator().manual_seed(16))).clamp(max=0)
    w = teacher_weights(teacher, old, advantages, live).w
    config = ActorConfig(
        strategy="fsdp2", rollout_n=1, use_dynamic_bsz=True, ppo_mini_batch_size=4,
        clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=1e6,
    )  # fmt: skip
    loss, _ = compute_policy_loss_vanilla(old, new, w * advantages, live.float(), "seq-mean-token-mean", config)

    total = 0.0  # J = 1/G sum_i 1/|o_i| sum_t min(r w A, clip(r, 1 - eps_low, 1 + eps_high) w A)
    rows = (x.tolist() for x in (teacher, old, new, advantages, live))
    for t, o, n, a, m in zip(*rows, strict=True):
        weight, terms = slow_weight_row(t, o, a, m, 3.0, True, "positive"), []
        for i in (i for i in range(len(m)) if m[i]):
            r = math.exp(n[i] - o[i])
            terms.append(min(r * weight[i] * a[i], min(max(r, 0.8), 1.28) * weight[i] * a[i]))
        total += sum(terms) / len(terms)
    assert loss.item() == pytest.approx(-total / len(lengths), abs=1e-6)


def test_the_formula_file_stays_short():
    from distilled_rl import objective

    assert len(inspect.getsource(objective).splitlines()) < 150
