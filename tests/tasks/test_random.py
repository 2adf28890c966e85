"""The counter-based generator: reference values, uniformity, distinctness."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks._random import Rng, key, mix, mix_, scale_, signed, sort_
from tasks._scan import prefix


def test_mix_is_splitmix64():
    # The first outputs of SplitMix64 seeded with 1234567, as published with the Java and C sources.
    state, out = 1234567, []
    for _ in range(5):
        state = state + 0x9E3779B97F4A7C15 & 2**64 - 1
        out.append(mix(state))
    assert out == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=20))
def test_tensor_mix_equals_integer_mix(values):
    assert mix_(torch.tensor([signed(v) for v in values])).tolist() == [signed(mix(v)) for v in values]


def test_keys_tell_order_type_and_boundaries_apart():
    parts = [("ab", "c"), ("a", "bc"), ("abc",), (1, 2), (2, 1), (12,), (-1,), (1,), ("1",), (0,), (0, 0), ()]
    assert len({key(*p) for p in parts}) == len(parts)


def test_words_do_not_depend_on_how_they_are_asked_for():
    whole, parts = Rng(5, 7), Rng(5, 7)
    assert torch.equal(whole.words(11), torch.cat([parts.words(4), parts.words(7)], 1))
    assert torch.equal(Rng(5, 3, start=4).words(6), Rng(5, 7).words(6)[4:])
    assert not torch.equal(Rng(5, 7).words(6), Rng(6, 7).words(6))


def test_several_keys_give_the_rows_of_each():
    keys = [5, key("high bit"), 2**64 - 1]
    assert torch.equal(Rng(keys, 3, 4).words(6), torch.cat([Rng(k, 3, 4).words(6) for k in keys]))
    with torch.device("meta"):  # a default device says nothing about where keys come from
        assert torch.equal(Rng(keys, 3, 4).words(6), Rng(keys, 3, 4).words(6))


@pytest.mark.parametrize("bound", [1, 2, 3, 10, 29, 64, 1000])
def test_below_is_uniform_and_rows_and_columns_are_independent(bound):
    x = Rng(key("uniform", bound), 4000).below(bound, 25)
    assert int(x.min()) >= 0
    assert int(x.max()) < bound
    count = x.flatten().bincount(minlength=bound).double()
    expected = x.numel() / bound
    chi2 = ((count - expected) ** 2 / expected).sum()
    assert float(chi2) < bound - 1 + 6 * (2 * bound) ** 0.5
    if bound > 1:
        z = x.double() - x.double().mean()
        z /= z.std()
        for a, b in [(z[1:], z[:-1]), (z[:, 1:], z[:, :-1]), (z[1:, 1:], z[:-1, :-1])]:
            assert abs(float((a * b).mean())) < 5 / a.numel() ** 0.5


def test_bits_of_words_are_fair():
    words = Rng(9, 20_000).words(1)[:, 0]
    for bit in range(64):
        assert abs(float(((words >> bit) & 1).double().mean()) - 0.5) < 5 * 0.5 / 20_000**0.5


def test_a_bound_per_column():
    x = Rng(3, 5000).below((1, 2, 7, 2**31))
    assert x.amax(0)[:3].tolist() == [0, 1, 6]
    assert 0.99 < float(x[:, 3].double().mean()) / 2**30 < 1.01


def test_scale_covers_the_whole_range():
    ends = torch.tensor([0, 2**32 - 1, -1])
    assert scale_(ends.clone(), 10).tolist() == [0, 9, 9]
    assert scale_(ends.clone(), 2**31).tolist() == [0, 2**31 - 1, 2**31 - 1]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(bound=st.sampled_from([1, 2, 9, 128, 129, 300, 5000, 2**31]), data=st.data())
def test_distinct_values_are_distinct(bound, data):
    count = data.draw(st.integers(1, min(bound, 60)))
    x = Rng(data.draw(st.integers(0, 99)), 50).distinct(bound, count)
    assert x.shape == (50, count)
    assert int(x.min()) >= 0
    assert int(x.max()) < bound
    assert all(len(set(row)) == count for row in x.tolist())


def test_distinct_is_uniform_on_both_of_its_ways():
    for bound in (5, 200):  # a whole permutation; the first different ones of a longer draw
        x = Rng(key("distinct", bound), 40_000).distinct(bound, 3)
        pairs = (x[:, 0] * bound + x[:, 2]).bincount(minlength=bound * bound).double()
        off = ~torch.eye(bound, dtype=torch.bool).flatten()
        assert int(pairs[~off].sum()) == 0
        expected = len(x) / (bound * (bound - 1))
        chi2, df = float(((pairs[off] - expected) ** 2 / expected).sum()), bound * (bound - 1) - 1
        assert abs(chi2 - df) < 6 * (2 * df) ** 0.5


def test_distinct_stays_right_when_draws_repeat(monkeypatch):
    monkeypatch.setattr(Rng, "below", lambda self, bound, count=None: torch.full((self.n, count), 7))
    assert Rng(1, 2).distinct(1000, 4).tolist() == [[7, 8, 9, 10]] * 2


def test_distinct_refuses_more_than_there_are():
    with pytest.raises(ValueError, match="count: expected at most bound = 3, got 4"):
        Rng(1, 2).distinct(3, 4)


def test_sort_is_ascending_and_signed():
    assert sort_(torch.tensor([[3, -1, 2**40], [0, 0, -5]])).tolist() == [[-1, 3, 2**40], [-5, 0, 0]]


@settings(max_examples=20, deadline=None, derandomize=True)
@given(length=st.integers(1, 40), size=st.integers(1, 6), seed=st.integers(0, 9))
def test_prefix_products_of_random_maps(length, size, seed):
    """Composition of maps from a set of two to itself, and of left-zero elements: not commutative."""
    maps = [(a, b) for a in range(2) for b in range(2)]
    table = torch.tensor([[maps.index((g[f[0]], g[f[1]])) for g in maps] for f in maps])
    x = Rng(seed, size).below(4, length)
    expected = x.clone()
    for t in range(1, length):
        expected[:, t] = table[expected[:, t - 1], x[:, t]]
    assert torch.equal(prefix(x, table), expected)
