"""pass@k against brute force, intervals against analytic cases and by simulated coverage, paired comparisons."""

import math
from itertools import combinations

import numpy as np
import pytest
from scipy import stats

from distilled_rl.statistics import (
    mean_with_ci,
    paired_difference,
    paired_seed_difference,
    pass_at_k,
    seed_interval,
)

NAN = float("nan")


def pass_at_k_by_hand(c, n, k):
    """Share of the subsets of size k of n samples, the first c right, that contain a right one."""
    subsets = list(combinations(range(n), k))
    return sum(min(subset) < c for subset in subsets) / len(subsets)


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_pass_at_k_equals_brute_force(n):
    correct = np.arange(n + 1)
    for k in range(1, n + 1):
        expected = [pass_at_k_by_hand(c, n, k) for c in correct]
        np.testing.assert_allclose(pass_at_k(correct, n, k), expected, atol=1e-12)


def test_pass_at_k_takes_other_samples_per_problem_and_is_stable_for_many():
    # C(3,2)/C(4,2) = 1/2; C(1,2) = 0
    np.testing.assert_allclose(pass_at_k([1, 2], [4, 3], 2), [0.5, 1.0])
    # C(2000, 1024)/C(2048, 1024) = prod_{j<48} (1024 - j)/(2048 - j), computed with exact integers
    expected = 1 - math.comb(2000, 1024) / math.comb(2048, 1024)
    np.testing.assert_allclose(pass_at_k([48], 2048, 1024), [expected], rtol=1e-12)
    np.testing.assert_allclose(pass_at_k([3, 0, 8], 8, 1), [3 / 8, 0, 1])


def test_pass_at_k_is_unbiased():
    # p = .3: pass@3 = 1 - .7^3 = .657; 20,000 problems of 8 samples have a standard error below .003
    correct = np.random.default_rng(0).binomial(8, 0.3, size=20_000)
    assert pass_at_k(correct, 8, 3).mean() == pytest.approx(0.657, abs=0.01)


@pytest.mark.parametrize(
    "correct, samples, k, message",
    [
        ([1], 4, 0, "k is 0"),
        ([1, 1], [4, 2], 3, "k is 3"),
        ([5], 4, 1, "between 0 and samples"),
        ([-1], 4, 1, "between 0 and samples"),
        ([0.5], 4, 1, "whole numbers"),
        ([], 4, 1, "non-empty"),
        ([NAN], 4, 1, "not finite"),
    ],
)
def test_pass_at_k_refuses(correct, samples, k, message):
    with pytest.raises(ValueError, match=message):
        pass_at_k(correct, samples, k)


def test_t_interval_of_a_worked_example():
    # mean .5, s^2 = (.25 + 0 + .25)/2 = .25, s/sqrt(3) = .288675; t_{2, .975} = 4.302653: half width 1.242, cut at 0, 1
    interval = mean_with_ci([0.0, 0.5, 1.0], method="t")
    assert (interval.value, interval.low, interval.high) == (0.5, 0.0, 1.0)
    # at level .5: t_{2, .75} = .816497, half width .235702
    interval = mean_with_ci([0.0, 0.5, 1.0], level=0.5, method="t")
    assert (interval.low, interval.high) == pytest.approx((0.264298, 0.735702), abs=1e-6)
    assert (interval.count, interval.method) == (3, "t")


def test_bootstrap_agrees_with_the_normal_interval_for_many_problems():
    scores = np.random.default_rng(1).binomial(4, 0.7, size=2000) / 4
    half = 1.959964 * scores.std(ddof=1) / math.sqrt(2000)
    interval = mean_with_ci(scores)
    assert interval.value == scores.mean()
    assert interval.low == pytest.approx(scores.mean() - half, abs=0.08 * half)
    assert interval.high == pytest.approx(scores.mean() + half, abs=0.08 * half)
    assert interval == mean_with_ci(scores)  # the seed fixes it


def test_bootstrap_follows_the_skew():
    # 3 of 30 right: symmetric intervals would reach below 0, and further down than up
    interval = mean_with_ci([1.0] * 3 + [0.0] * 27)
    assert interval.low > 0 and interval.high - interval.value > 1.5 * (interval.value - interval.low)


def test_problems_are_the_clusters():
    # 64 samples of each of 20 problems that are always or never right say no more than one sample of each
    scores = np.array([1.0] * 12 + [0.0] * 8)
    wide = mean_with_ci(scores)
    as_if_independent = mean_with_ci(np.repeat(scores, 64), resamples=999)
    assert wide.high - wide.low > 5 * (as_if_independent.high - as_if_independent.low)


@pytest.mark.parametrize("method", ["bootstrap", "t"])
def test_without_spread_the_interval_is_exact(method):
    right, wrong = mean_with_ci([1.0] * 30, method=method), mean_with_ci([0.0] * 30, method=method)
    reference = stats.binomtest(30, 30).proportion_ci(0.95, method="exact")
    assert (right.low, right.high) == pytest.approx((reference.low, reference.high))
    assert (wrong.low, wrong.high) == pytest.approx((0.0, 1 - reference.low))
    assert right.method == wrong.method == "exact"
    # u = 1 - .025^(1/30) = .115703: half of it to either side of .5
    half_right = mean_with_ci([0.5] * 30, method=method)
    assert (half_right.low, half_right.high) == pytest.approx((0.442148, 0.557852), abs=1e-6)
    assert mean_with_ci([1.0]).low == pytest.approx(0.025)


def coverage(draw, interval_of, truth, sets=400):
    rng = np.random.default_rng(7)
    intervals = [interval_of(draw(rng)) for _ in range(sets)]
    return sum(i.low <= truth <= i.high for i in intervals) / sets


@pytest.mark.parametrize("method", ["bootstrap", "t"])
def test_coverage_over_problems(method):
    # problems of difficulty Beta(2, 1), 4 samples each: the true mean is 2/3. 400 sets: standard error .011 at .95
    covered = coverage(
        lambda rng: rng.binomial(4, rng.beta(2, 1, size=80)) / 4,
        lambda scores: mean_with_ci(scores, method=method, resamples=999),
        truth=2 / 3,
    )
    assert 0.92 <= covered <= 0.98


def test_coverage_over_seeds():
    covered = coverage(lambda rng: rng.normal(0.7, 0.02, size=5), seed_interval, truth=0.7)
    assert 0.92 <= covered <= 0.98


def test_coverage_and_false_alarms_of_paired_differences():
    # two models on the same problems of spread difficulty, equally good: true difference 0
    rng, inside, alarms = np.random.default_rng(3), 0, 0
    for _ in range(400):
        p = rng.beta(1, 1, size=40)
        result = paired_difference(rng.binomial(4, p) / 4, rng.binomial(4, p) / 4, resamples=499)
        inside += result.low <= 0 <= result.high
        alarms += result.p_value <= 0.05
    assert 0.92 <= inside / 400 <= 0.98
    assert 0.02 <= alarms / 400 <= 0.08


def test_seed_interval_of_a_worked_example():
    # mean .74, deviations -.02 0 .02: s = .02, s/sqrt(3) = .011547, t_{2, .975} = 4.302653: half width .049683
    interval = seed_interval([0.72, 0.74, 0.76])
    assert (interval.low, interval.high) == pytest.approx((0.690317, 0.789683), abs=1e-6)
    assert (interval.count, interval.level, interval.method) == (3, 0.95, "t")
    flat = seed_interval([0.5, 0.5])
    assert (flat.low, flat.high) == (0.5, 0.5)


def test_paired_difference_exact_permutation():
    # differences 1 1 1 0 1: of the 2^5 sign flips 2 x 2 reach |sum| = 4 (the zero flips freely): p = 4/32
    result = paired_difference([1, 1, 1, 0, 1], [0, 0, 0, 0, 0])
    assert (result.value, result.p_value) == (0.8, 0.125)
    # difference .5 .5 0 0: t = mean .25 / (s/2), s^2 = .25/3: t = sqrt(3), two-sided p with 3 degrees of freedom
    result = paired_difference([1, 1, 0.5, 0], [0.5, 0.5, 0.5, 0], method="t")
    assert result.p_value == pytest.approx(2 * stats.t.sf(math.sqrt(3), 3))


def test_pairing_narrows_the_interval():
    rng = np.random.default_rng(5)
    p = rng.beta(0.5, 0.5, size=300)
    a, b = rng.binomial(8, p) / 8, rng.binomial(8, 0.95 * p) / 8
    result, alone = paired_difference(a, b), mean_with_ci(a)
    assert result.high - result.low < 0.5 * (alone.high - alone.low)
    assert result.low > 0 and result.p_value < 0.01
    mirrored = paired_difference(b, a)
    assert mirrored.value == -result.value
    assert mirrored.low == pytest.approx(-result.high, abs=0.003)


def test_equal_models_on_all_problems():
    # no difference in 100 problems: a differing problem has a share of at most u = 1 - .025^(1/100) = .036217
    result = paired_difference([1.0] * 100, [1.0] * 100)
    assert (result.value, result.p_value, result.method) == (0.0, 1.0, "exact")
    assert (result.low, result.high) == pytest.approx((-0.036217, 0.036217), abs=1e-6)
    assert math.isnan(paired_difference([1.0, 1.0], [1.0, 1.0], method="t").p_value)


def test_paired_seeds_of_a_worked_example():
    # differences .04 .05 .06: mean .05, s = .01, t = .05 / (.01/sqrt(3)) = 8.660254, half width 4.302653 x .005774
    result = paired_seed_difference([0.78, 0.80, 0.79], [0.74, 0.75, 0.73])
    assert (result.value, result.low, result.high) == pytest.approx((0.05, 0.025159, 0.074841), abs=1e-6)
    assert result.p_value == pytest.approx(2 * stats.t.sf(8.660254, 2), rel=1e-6)
    assert math.isnan(paired_seed_difference([0.8, 0.9], [0.7, 0.8]).p_value)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: mean_with_ci([]), "non-empty"),
        (lambda: mean_with_ci([[1.0]]), "non-empty vector"),
        (lambda: mean_with_ci([0.5, NAN]), "not finite"),
        (lambda: mean_with_ci([0.5, 1.5]), "within"),
        (lambda: mean_with_ci([0.5, 0.6], level=1.0), "level"),
        (lambda: mean_with_ci([0.5, 0.6], method="normal"), "unknown method"),
        (lambda: seed_interval([0.5]), "two seeds"),
        (lambda: paired_difference([0.5, 0.6], [0.5]), "same problems"),
        (lambda: paired_difference([0.5, 6], [0.5, 1]), "within"),
        (lambda: paired_seed_difference([0.5, 0.6], [0.5]), "same seeds"),
    ],
)
def test_refuses(call, message):
    with pytest.raises(ValueError, match=message):
        call()
