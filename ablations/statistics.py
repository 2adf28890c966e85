"""Intervals over seeds. Every estimate carries its n, and n = 1 has no interval.

Coverage of a percentile bootstrap over five seeds is nearer 85% than 95%: five values do not say much about
their spread, and two that agree say nothing. `paired_difference` therefore gives a sign-flip p-value beside
its interval, `equivalence_p` one for "alike", and `claims` asks for both. Sign flips are all enumerated up to
13 pairs, 9,999 are drawn beyond.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float
from scipy import stats

SOLVED_SHARE = 0.95


class Estimate(NamedTuple):
    """A value, its two-sided interval (NaN where n does not support one) and the number of seeds."""

    value: float
    low: float
    high: float
    n: int


class Paired(NamedTuple):
    """Mean of the paired differences, its interval, the two-sided sign-flip p-value, and the pairs."""

    value: float
    low: float
    high: float
    p_value: float
    n: int
    n_higher: int
    n_lower: int


def solved(
    accuracy: Float[np.ndarray, " n"], chance: Float[np.ndarray, " n"], ceiling: Float[np.ndarray, " n"]
) -> Bool[np.ndarray, " n"]:
    """Whether accuracy reaches chance + 0.95 (ceiling - chance); a failed seed (NaN) has solved nothing."""
    accuracy = np.asarray(accuracy, dtype=float)
    # 1e-9: an accuracy that equals the bar up to the rounding of the bar itself counts.
    return accuracy >= np.asarray(chance) + SOLVED_SHARE * (np.asarray(ceiling) - np.asarray(chance)) - 1e-9


def chance_corrected(accuracy: float, chance: float, ceiling: float) -> float:
    """(accuracy - chance) / (ceiling - chance): 0 at chance, 1 at the best reachable accuracy."""
    if not ceiling > chance:
        raise ValueError(f"ceiling: expected a value above chance = {chance}, got {ceiling}")
    return (accuracy - chance) / (ceiling - chance)


def wilson(successes: int, n: int, confidence: float = 0.95) -> Estimate:
    """Success rate with Wilson's score interval.

    One trial has an interval too (0 of 1 is [0, 0.79]), but a rate over one seed is refused as evidence: n =
    1 gives NaN bounds. Raises ValueError for n < 1 or successes outside 0..n.
    """
    _check_confidence(confidence)
    if n < 1:
        raise ValueError(f"n: expected at least one trial, got {n}")
    if not 0 <= successes <= n:
        raise ValueError(f"successes: expected 0 to n = {n}, got {successes}")
    if n == 1:
        return Estimate(float(successes), np.nan, np.nan, 1)
    interval = stats.binomtest(int(successes), int(n)).proportion_ci(confidence, method="wilson")
    return Estimate(successes / n, float(interval.low), float(interval.high), n)


def bootstrap_mean(
    values: Float[np.ndarray, " n"], confidence: float = 0.95, resamples: int = 9999
) -> Estimate:
    """Mean over seeds with a percentile bootstrap interval; deterministic. n = 1 gives NaN bounds.

    Raises ValueError for an empty or non-finite sample: a failed seed is the caller's to count.
    """
    _check_confidence(confidence)
    sample = _finite("values", values)
    if sample.size == 1:
        return Estimate(float(sample[0]), np.nan, np.nan, 1)
    if (
        np.ptp(sample) == 0
    ):  # every resample is the same: the interval is a point, and n says how little that is
        return Estimate(float(sample[0]), float(sample[0]), float(sample[0]), sample.size)
    interval = stats.bootstrap(
        (sample,),
        np.mean,
        n_resamples=resamples,
        confidence_level=confidence,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return Estimate(float(sample.mean()), float(interval.low), float(interval.high), sample.size)


def paired_difference(
    first: Float[np.ndarray, " n"], second: Float[np.ndarray, " n"], confidence: float = 0.95
) -> Paired:
    """Mean of first - second over paired seeds: bootstrap interval and sign-flip test.

    The smallest two-sided p-value that n pairs can give is 2 / 2^n, so five pairs never reach 0.05 and six
    do.
    """
    a, b = _finite("first", first), _finite("second", second)
    if a.shape != b.shape:
        raise ValueError(f"second: expected as many values as first ({a.size}), got {b.size}")
    differences = a - b
    estimate = bootstrap_mean(differences, confidence)
    higher, lower = int((differences > 0).sum()), int((differences < 0).sum())
    return Paired(*estimate[:3], _sign_flip_p(differences), a.size, higher, lower)


def equivalence_p(first: Float[np.ndarray, " n"], second: Float[np.ndarray, " n"], margin: float) -> float:
    """p-value for |mean of first - second| < margin: the larger of two one-sided sign-flip tests (TOST).

    The smallest that n pairs can give is 1 / 2^n: four pairs never reach 0.05, five do.
    """
    if not margin > 0:
        raise ValueError(f"margin: expected a positive number, got {margin}")
    differences = _finite("first", first) - _finite("second", second)
    return max(_sign_flip_p(margin + side * differences, "greater") for side in (1, -1))


def _sign_flip_p(
    differences: np.ndarray, alternative: Literal["two-sided", "greater"] = "two-sided"
) -> float:
    if differences.size == 1:
        return np.nan
    if not differences.any():
        return 1.0
    result = stats.permutation_test(
        (differences, np.zeros_like(differences)),
        lambda x, y, axis: np.mean(x - y, axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=9999,
        alternative=alternative,
        rng=np.random.default_rng(0),
    )
    return float(result.pvalue)


def _finite(name: str, values: np.ndarray) -> np.ndarray:
    sample = np.asarray(values, dtype=float)
    if sample.ndim != 1 or sample.size == 0:
        raise ValueError(f"{name}: expected one value per seed (1-D, at least one), got shape {sample.shape}")
    if not np.isfinite(sample).all():
        raise ValueError(f"{name}: expected finite values, got {sample[~np.isfinite(sample)][0]}")
    return sample


def _check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence: expected a value in (0, 1), got {confidence}")
