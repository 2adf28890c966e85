import itertools
import math

import numpy as np
import pytest
from scipy import stats

from ablations.statistics import (
    bootstrap_mean,
    chance_corrected,
    equivalence_p,
    paired_difference,
    solved,
    wilson,
)


def test_wilson_is_the_score_interval():
    z = stats.norm.ppf(0.975)
    n, p = 10, 0.7
    middle, half = (p + z**2 / 2 / n), z * math.sqrt(p * (1 - p) / n + z**2 / 4 / n**2)
    estimate = wilson(7, 10)
    assert estimate.value == 0.7
    assert estimate.n == 10
    assert estimate.low == pytest.approx((middle - half) / (1 + z**2 / n))
    assert estimate.high == pytest.approx((middle + half) / (1 + z**2 / n))


@pytest.mark.parametrize("successes", [0, 5])
def test_wilson_at_the_edges_stays_inside_and_open(successes):
    estimate = wilson(successes, 5)
    assert 0 <= estimate.low < estimate.high <= 1
    assert estimate.high - estimate.low > 0.4  # five seeds alike do not make a certainty


def test_one_seed_has_no_interval():
    assert wilson(1, 1).n == 1
    assert np.isnan([wilson(1, 1).low, wilson(1, 1).high]).all()
    single = bootstrap_mean(np.array([0.7]))
    assert (single.value, single.n) == (0.7, 1)
    assert np.isnan([single.low, single.high]).all()


@pytest.mark.parametrize(("successes", "n"), [(0, 0), (-1, 3), (4, 3)])
def test_wilson_refuses(successes, n):
    with pytest.raises(ValueError, match="expected"):
        wilson(successes, n)


def test_bootstrap_is_deterministic_and_shrinks_with_n():
    rng = np.random.default_rng(3)
    few, many = rng.normal(size=8), rng.normal(size=128)
    assert bootstrap_mean(few) == bootstrap_mean(few)
    a, b = bootstrap_mean(few), bootstrap_mean(many)
    assert a.low < few.mean() < a.high
    assert b.high - b.low < a.high - a.low
    assert b.high - b.low == pytest.approx(2 * 1.96 * many.std() / math.sqrt(128), rel=0.15)


def test_bootstrap_stays_among_the_values():
    skewed = np.array([1.0, 1.0, 1.0, 1.0, 1.0, 0.5])
    estimate = bootstrap_mean(skewed)
    resampled = np.random.default_rng(1).choice(skewed, (100_000, 6)).mean(1)
    # 2.5% of the resamples hold 3 of the low value or more, a third holds none
    assert (estimate.low, estimate.high) == pytest.approx(tuple(np.quantile(resampled, [0.025, 0.975])))
    assert estimate.high == 1.0


def test_bootstrap_of_equal_values_is_a_point_without_warnings():
    assert bootstrap_mean(np.ones(4)) == (1.0, 1.0, 1.0, 4)


@pytest.mark.parametrize("values", [[], [[1.0, 2.0]], [1.0, math.nan], [1.0, math.inf]])
def test_bootstrap_refuses(values):
    with pytest.raises(ValueError, match=r"values: expected"):
        bootstrap_mean(np.array(values))


def test_paired_difference_uses_the_pairs():
    base = np.array([0.1, 0.9, 0.3, 0.7, 0.5, 0.2])
    better = base + np.array([0.05, 0.06, 0.04, 0.05, 0.07, 0.03])
    result = paired_difference(better, base)
    assert result.value == pytest.approx(0.05)
    assert result.low > 0  # unpaired, the spread of the seeds would hide it
    assert (result.n, result.n_higher, result.n_lower) == (6, 6, 0)
    assert result.p_value == pytest.approx(2 / 2**6)


def test_five_pairs_never_reach_five_percent():
    assert paired_difference(np.full(5, 0.9) + np.arange(5) / 100, np.full(5, 0.1)).p_value == pytest.approx(
        2 / 2**5
    )


def test_sign_flips_against_all_of_them():
    differences = np.random.default_rng(0).normal(0.3, 1, 9)
    flips = np.array(list(itertools.product([1, -1], repeat=9)))
    means, observed = (flips * differences).mean(1), differences.mean()
    two_sided = (np.abs(means) >= abs(observed) - 1e-12).mean()
    assert paired_difference(differences, np.zeros(9)).p_value == pytest.approx(two_sided)
    for margin in (0.05, 0.5, 2.0):
        sides = [
            ((flips * (margin + s * differences)).mean(1) >= margin + s * observed - 1e-12).mean()
            for s in (1, -1)
        ]
        assert equivalence_p(differences, np.zeros(9), margin) == pytest.approx(max(sides))


def test_four_pairs_are_too_few_for_alike_and_five_are_enough():
    assert equivalence_p(np.ones(4), np.ones(4), 0.01) == pytest.approx(1 / 2**4)
    assert equivalence_p(np.ones(5), np.ones(5), 0.01) == pytest.approx(1 / 2**5)
    assert equivalence_p(np.full(8, 0.9), np.ones(8), 0.01) == 1.0
    with pytest.raises(ValueError, match="margin: expected a positive number, got 0"):
        equivalence_p(np.ones(5), np.ones(5), 0)


def test_paired_difference_of_equal_arms():
    result = paired_difference(np.ones(6), np.ones(6))
    assert (result.value, result.p_value, result.n_higher) == (0.0, 1.0, 0)


def test_paired_difference_refuses_other_lengths():
    with pytest.raises(ValueError, match="second: expected as many values as first"):
        paired_difference(np.ones(3), np.ones(4))


def test_solved_is_95_percent_of_the_way_from_chance_to_ceiling():
    accuracy = np.array([0.975, 0.974, np.nan, 0.96])
    chance, ceiling = np.array([0.5, 0.5, 0.5, 0.1]), np.array([1.0, 1.0, 1.0, 1.0])
    assert solved(accuracy, chance, ceiling).tolist() == [True, False, False, True]


def test_chance_corrected():
    assert chance_corrected(0.75, 0.5, 1.0) == 0.5
    with pytest.raises(ValueError, match="ceiling: expected a value above chance"):
        chance_corrected(0.5, 0.5, 0.5)
