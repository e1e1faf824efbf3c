"""Statistics of evaluations: pass@k, means with confidence intervals, paired differences.

The problems are the clusters: several samples of one problem are not independent, so a problem enters as one number,
the mean over its samples, and resampling draws problems. What comes out is the uncertainty over problems *of one
trained model*; the randomness of the training run itself only shows across seeds (`seed_interval`,
`paired_seed_difference`).

Legend: P problems; n samples of a problem, c of them right; alpha = 1 - level; S seeds.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

Method = Literal["bootstrap", "t"]
Floats = NDArray[np.float64]

RESAMPLES = 9999
_BATCH = 1000  # resamples held in memory at once


@dataclass(frozen=True)
class Interval:
    """An estimate and its confidence interval.

    `method`: "bootstrap", "t", or "exact" where all values were the same. `count`: number of problems or seeds.
    """

    value: float
    low: float
    high: float
    level: float
    count: int
    method: str

    def overlaps(self, low: float, high: float) -> bool:
        """Whether this interval and [low, high] have a point in common."""
        return self.low <= high and low <= self.high


@dataclass(frozen=True)
class Difference(Interval):
    """A mean difference a - b with its interval and the two-sided p-value of "no difference" (NaN where undefined)."""

    p_value: float


def pass_at_k(correct: ArrayLike, samples: ArrayLike, k: int) -> Floats:
    """Chance that at least one of k samples is right, per problem, without bias.

        pass@k = 1 - C(n - c, k) / C(n, k) = 1 - prod_{j=0}^{k-1} (n - c - j) / (n - j)

    (Chen et al. 2021, "Evaluating Large Language Models Trained on Code", eq. 1). Plugging c/n into 1 - (1 - p)^k
    instead would be biased downwards.

    Args: correct, the number c of right samples [P]; samples, n, one integer or [P]; k >= 1. Returns float64 [P]; its
    mean is the pass@k of the set. ValueError: not whole numbers, c outside 0..n, k outside 1..min(n), no problem.
    """
    c = _vector("correct", correct)
    n = np.broadcast_to(np.asarray(samples, dtype=np.float64), c.shape)
    if np.any(c != np.floor(c)) or np.any(n != np.floor(n)):
        raise ValueError("correct and samples must be whole numbers")
    if np.any(c < 0) or np.any(c > n):
        raise ValueError("correct must lie between 0 and samples for every problem")
    if not 1 <= k <= n.min():
        raise ValueError(f"k is {k}: must lie between 1 and the smallest number of samples, {int(n.min())}")
    j = np.arange(k)
    # a factor 0 (at j = n - c < k) makes the product 0: no k samples without a right one exist
    factors = np.maximum(n[:, None] - c[:, None] - j, 0.0) / (n[:, None] - j)
    return 1.0 - factors.prod(axis=1)


def mean_with_ci(
    scores: ArrayLike,
    level: float = 0.95,
    method: Method = "bootstrap",
    seed: int = 0,
    *,
    bounds: tuple[float, float] = (0.0, 1.0),
    resamples: int = RESAMPLES,
) -> Interval:
    """Mean over problems with a confidence interval that treats the problems as the clusters.

    "bootstrap": bias-corrected and accelerated bootstrap over problems (Efron 1987; `scipy.stats.bootstrap`),
    reproducible by `seed`. "t": mean ± t_{P-1, 1-alpha/2} s / sqrt(P), cut at the bounds. Both are first-order right
    for any number of samples per problem; with 30 problems of which nearly all score 0 (or 1) their coverage falls to
    about 88 %.

    Guard: when all P problems have the same score v there is no spread to resample. A problem with another score was
    then seen 0 times in P, so its share is at most u = 1 - (alpha/2)^(1/P) (Clopper & Pearson 1934), and the mean lies
    within [v - u (v - bounds[0]), v + u (bounds[1] - v)]; all right gives [(alpha/2)^(1/P), 1], the Clopper-Pearson
    interval.

    Args: scores [P], per problem the mean over its samples, within `bounds`. ValueError: no score, a score that is not
    finite or outside the bounds, a level outside (0, 1), an unknown method.
    """
    x = _vector("scores", scores)
    if x.min() < bounds[0] or x.max() > bounds[1]:
        raise ValueError(f"scores must lie within {bounds}: found {x.min():g} to {x.max():g}")
    return _interval(x, level, method, seed, bounds, resamples)


def seed_interval(values: ArrayLike, level: float = 0.95) -> Interval:
    """Mean over RL seeds with its t-interval, mean ± t_{S-1, 1-alpha/2} s / sqrt(S), s with S - 1 in the denominator.

    Args: values [S], one number per seed, S >= 2. Equal values give an interval of width 0. ValueError: fewer than two
    values, a value that is not finite, a level outside (0, 1).
    """
    x = _vector("values", values)
    _check_level(level)
    if len(x) < 2:
        raise ValueError("an interval over seeds needs at least two seeds")
    return _t_interval(x, level, (-math.inf, math.inf))


def paired_difference(
    a: ArrayLike,
    b: ArrayLike,
    level: float = 0.95,
    method: Method = "bootstrap",
    seed: int = 0,
    *,
    resamples: int = RESAMPLES,
) -> Difference:
    """Mean of a - b over the same problems, its interval and a two-sided p-value.

    "bootstrap": the interval of `mean_with_ci` on the differences d, and the sign-flip permutation test (under "no
    difference" each d_i is as likely -d_i; `scipy.stats.permutation_test`, exact for small P). "t": the t-interval and
    the paired t-test. When all differences equal one v the interval is the guard's of `mean_with_ci` with bounds (-1,
    1); with "t" p is NaN then.

    Args: a, b [P], scores within [0, 1] of the same problems in the same order. ValueError: other lengths, and as
    `mean_with_ci`.
    """
    x, y = _vector("a", a), _vector("b", b)
    for name, values in (("a", x), ("b", y)):
        if values.min() < 0 or values.max() > 1:
            raise ValueError(f"{name} must hold scores within [0, 1]")
    d = _differences(x, y, "problems")
    interval = _interval(d, level, method, seed, (-1.0, 1.0), resamples)
    if method == "t":
        return Difference(**vars(interval), p_value=_t_test(d))
    test = stats.permutation_test(
        (d,),
        np.mean,
        permutation_type="samples",
        vectorized=True,
        n_resamples=resamples,
        batch=_BATCH,
        axis=-1,
        rng=np.random.default_rng(seed),
    )
    return Difference(**vars(interval), p_value=float(test.pvalue))


def paired_seed_difference(a: ArrayLike, b: ArrayLike, level: float = 0.95) -> Difference:
    """Mean of a - b over RL seeds, its t-interval as in `seed_interval`, and the p-value of the paired t-test.

    Args: a, b [S], one number per seed, the same seeds in the same order, S >= 2. p is NaN when all differences are
    equal. ValueError: other lengths, fewer than two seeds, a value that is not finite.
    """
    d = _differences(_vector("a", a), _vector("b", b), "seeds")
    return Difference(**vars(seed_interval(d, level)), p_value=_t_test(d))


def _interval(x: Floats, level: float, method: str, seed: int, bounds: tuple[float, float], resamples: int) -> Interval:
    _check_level(level)
    if method not in ("bootstrap", "t"):
        raise ValueError(f"unknown method {method!r}: choose bootstrap or t")
    if _constant(x):
        value = float(x[0])
        rare = 1.0 - ((1.0 - level) / 2.0) ** (1.0 / len(x))
        low, high = value - rare * (value - bounds[0]), value + rare * (bounds[1] - value)
        return Interval(value, low, high, level, len(x), "exact")
    if method == "t":
        return _t_interval(x, level, bounds)
    result = stats.bootstrap(
        (x,),
        np.mean,
        n_resamples=resamples,
        batch=_BATCH,
        confidence_level=level,
        method="BCa",
        vectorized=True,
        axis=-1,
        rng=np.random.default_rng(seed),
    )
    low, high = result.confidence_interval
    return Interval(float(x.mean()), float(low), float(high), level, len(x), "bootstrap")


def _t_interval(x: Floats, level: float, bounds: tuple[float, float]) -> Interval:
    mean = float(x.mean())
    half = float(stats.t.ppf((1 + level) / 2, len(x) - 1) * stats.sem(x))
    return Interval(mean, max(mean - half, bounds[0]), min(mean + half, bounds[1]), level, len(x), "t")


def _t_test(d: Floats) -> float:
    if _constant(d):
        return math.nan
    return float(np.asarray(stats.ttest_1samp(d, 0.0))[1])


def _constant(x: Floats) -> bool:
    """Equal up to the rounding of sums and differences of scores."""
    return bool(np.ptp(x) <= 1e-12)


def _differences(a: Floats, b: Floats, what: str) -> Floats:
    if len(a) != len(b):
        raise ValueError(f"a paired difference needs the same {what} on both sides: got {len(a)} and {len(b)}")
    return a - b


def _vector(name: str, values: ArrayLike) -> Floats:
    x = np.asarray(values, dtype=np.float64)
    if x.ndim != 1 or len(x) == 0:
        raise ValueError(f"{name} must be a non-empty vector, got shape {x.shape}")
    if not np.isfinite(x).all():
        raise ValueError(f"{name} holds values that are not finite")
    return x


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise ValueError(f"level is {level}: must lie between 0 and 1")
