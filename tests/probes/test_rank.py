"""Rank from factors against dense SVDs, planted ranks, and the inputs that break rank measures."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from probes import rank
from probes._factors import Factors
from probes.update import update_factors


def dense(left, right):
    return torch.einsum("...rv,...rk->...vk", left.double(), right.double())


def planted(terms, true_rank, width, seed, dtype=torch.float64):
    """`terms` factors, of which only `true_rank` are independent: the rest are sums of two of them,
    halved.
    """
    gen = torch.Generator().manual_seed(seed)
    left = torch.randn(5, terms, width, generator=gen, dtype=torch.float64)
    right = torch.randn(5, terms, width, generator=gen, dtype=torch.float64)
    for r in range(true_rank, terms):
        left[:, r] = 0.5 * (left[:, r % true_rank] + left[:, (r + 1) % true_rank])
    return left.to(dtype), right.to(dtype)


@pytest.mark.parametrize(
    ("terms", "v", "k"), [(1, 8, 8), (3, 16, 16), (4, 5, 32), (9, 7, 16), (9, 64, 4), (3, 1, 8)]
)
def test_singular_values_equal_a_dense_svd(terms, v, k):
    left, right = torch.randn(2, 5, terms, v), torch.randn(2, 5, terms, k)
    found = rank.factor_singular_values(left, right)
    want = torch.linalg.svdvals(dense(left, right))[..., : min(terms, v, k)]
    assert found.shape == (2, 5, min(terms, v, k))
    torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-12)


def test_smallest_singular_value_survives_a_condition_number_of_250000():
    gen = torch.Generator().manual_seed(0)
    q = torch.linalg.qr(torch.randn(64, 128, 4, generator=gen, dtype=torch.float64)).Q
    mix = torch.linalg.qr(torch.randn(64, 4, 4, generator=gen, dtype=torch.float64)).Q
    left = (q * torch.tensor([1, 1e-1, 1e-3, 4e-6], dtype=torch.float64) @ mix).mT.float()
    right = torch.randn(64, 4, 128, generator=gen)
    want = torch.linalg.svdvals(dense(left, right))[..., :4]
    assert (want[:, 0] / want[:, 3]).median() > 2e5
    found = rank.factor_singular_values(left, right)
    assert ((found - want) / want).abs().max() < 1e-8


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.integers(1, 6).flatmap(lambda terms: st.tuples(st.just(terms), st.integers(1, terms))),
    st.sampled_from([8, 33]),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    st.integers(0, 1000),
)
def test_planted_ranks_are_found(sizes, width, dtype, seed):
    terms, true_rank = sizes
    left, right = planted(terms, true_rank, width, seed, dtype)
    sigma = rank.factor_singular_values(left, right)
    threshold = rank.factor_threshold(left, right, dtype)
    found = rank.rank_measures(sigma, threshold)["numerical"]
    if dtype != torch.float64:  # there the dense SVD's own rounding exceeds the threshold
        visible = torch.linalg.svdvals(dense(left, right)) > threshold[..., None]
        assert (found == visible.sum(-1)).all()
    # bf16 knows two digits: a planted direction may be weaker than that, a spurious one never stronger.
    assert (found <= true_rank).all()
    if dtype != torch.bfloat16:
        assert (found == true_rank).all()


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e30])
def test_measures_do_not_change_with_scale_or_rotation(scale):
    left, right = planted(4, 3, 16, seed=1)
    turn = torch.linalg.qr(torch.randn(16, 16, dtype=torch.float64)).Q

    def measures(a, b):
        sigma = rank.factor_singular_values(a, b)
        return rank.rank_measures(sigma, rank.factor_threshold(a, b, a.dtype))

    before, after = measures(left, right), measures(scale * left @ turn, right @ turn.mT)
    for name in rank.MEASURES:
        torch.testing.assert_close(after[name], before[name], rtol=1e-9, atol=0)


def test_a_zero_matrix_has_rank_zero_by_every_measure():
    zero, some = torch.zeros(2, 3, 8), torch.randn(2, 3, 8)
    cancelled = torch.cat([some, -some], 1), torch.cat([some, some], 1)
    for left, right in ((zero, zero), (zero, some), (some, zero), cancelled):
        sigma = rank.factor_singular_values(left, right)
        for value in rank.rank_measures(sigma, rank.factor_threshold(left, right, torch.float32)).values():
            assert (value == 0).all()
    sigma = rank.matrix_singular_values(torch.zeros(4, 5, 7))
    for value in rank.rank_measures(
        sigma, rank.matrix_threshold(sigma, (5, 7), torch.float32, torch.float32)
    ).values():
        assert (value == 0).all()


def test_measures_by_their_definitions():
    sigma = torch.tensor([[4.0, 2.0, 2.0, 0.0], [3.0, 3.0, 3.0, 3.0], [5.0, 0.0, 0.0, 0.0]])
    measures = rank.rank_measures(sigma, 1e-6)
    p = torch.tensor([0.5, 0.25, 0.25])
    assert measures["numerical"].tolist() == [3, 4, 1]
    torch.testing.assert_close(measures["effective"][0].item(), (-(p * p.log()).sum()).exp().item())
    torch.testing.assert_close(measures["stable"].tolist(), [24 / 16, 4.0, 1.0])
    torch.testing.assert_close(measures["participation"].tolist(), [24**2 / (256 + 16 + 16), 4.0, 1.0])
    assert measures["effective"][1:].tolist() == pytest.approx([4, 1])


def test_the_tolerance_follows_the_stored_dtype():
    gen = torch.Generator().manual_seed(3)
    key = torch.randn(1, 1, 64, generator=gen, dtype=torch.float64)
    left = torch.randn(1, 2, 64, generator=gen, dtype=torch.float64)
    right = torch.cat([key, key * (1 + 1e-3 * torch.randn(1, 1, 64, generator=gen, dtype=torch.float64))], 1)
    ranks = {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        a, b = left.to(dtype), right.to(dtype)
        sigma = rank.factor_singular_values(a, b)
        ranks[dtype] = rank.rank_measures(sigma, rank.factor_threshold(a, b, dtype))["numerical"].item()
    assert ranks == {torch.float64: 2, torch.float32: 2, torch.bfloat16: 1}


def test_a_value_that_the_state_holds_already_writes_nothing():
    """v_2 - Sbar_2 k_2 is then the rounding of v_2 alone, which no singular value should be counted for."""
    gen = torch.Generator().manual_seed(0)
    key = torch.nn.functional.normalize(torch.randn(1, 1, 1, 8, generator=gen, dtype=torch.float64), dim=-1)
    value, decay = torch.randn(1, 1, 1, 8, generator=gen), torch.tensor([0.0, -0.3]).view(1, 2, 1)
    k, v = key.float().expand(1, 2, 1, 8), torch.cat([value, value * decay[0, 1].exp()], 1)
    none = v.new_zeros(1, 2, 1, 0, 8)
    f = Factors(0, torch.float32, k, v, decay, torch.ones(1, 2, 1), none, none, {})
    left, right, norm = update_factors(f)
    sigma = rank.factor_singular_values(left, right)
    threshold = rank.factor_threshold(left, right, f.stored, left_norm=norm)
    assert 0 < sigma[0, 1, 0, 0] < 1e-5
    assert rank.rank_measures(sigma, threshold)["numerical"].flatten().tolist() == [1, 0]


def test_threshold_of_a_matrix_is_the_coarser_of_its_own_and_its_factors():
    sigma = torch.tensor([3.0, 1.0])
    for stored, rtol in (
        (torch.float32, 64 * torch.finfo(torch.float32).eps),
        (torch.bfloat16, 2 * torch.finfo(torch.bfloat16).eps),
    ):
        found = rank.matrix_threshold(sigma, (16, 64), torch.float32, stored).item()
        assert found == pytest.approx(3 * rtol)


def test_bad_factors_are_named():
    good = torch.randn(3, 2, 4)
    with pytest.raises(ValueError, match=r"left: expected finite values, got 1 of 24 that are not"):
        rank.factor_singular_values(good.index_put((torch.tensor(0),) * 3, torch.tensor(torch.nan)), good)
    with pytest.raises(ValueError, match=r"right: expected left's shape"):
        rank.factor_singular_values(good, good[:, :1])


def test_an_empty_batch_and_a_single_matrix():
    assert rank.factor_singular_values(torch.zeros(0, 2, 4), torch.zeros(0, 2, 4)).shape[0] == 0
    left, right = torch.randn(2, 4), torch.randn(2, 6)
    torch.testing.assert_close(
        rank.factor_singular_values(left, right), torch.linalg.svdvals(dense(left, right))[:2]
    )


@pytest.mark.gpu
def test_on_a_gpu_values_equal_the_cpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    left, right = planted(4, 3, 128, seed=2, dtype=torch.float32)
    want = rank.factor_singular_values(left, right)
    torch.testing.assert_close(
        rank.factor_singular_values(left.cuda(), right.cuda()).cpu(), want, rtol=1e-9, atol=1e-12
    )
    states = torch.randn(3, 32, 64)
    want = rank.matrix_singular_values(states)
    torch.testing.assert_close(rank.matrix_singular_values(states.cuda()).cpu(), want, rtol=1e-5, atol=1e-6)
