"""Measures 1 and 2 against dense matrices: update rank, state rank, window rank."""

import gc

import numpy as np
import pytest
import torch

import probes
from prism.hooks import knock_out, patch_state
from probes import rank

# How many different keys write: B_t, and S_t - alpha_t S_{t-1}.
DISTINCT = {
    "gdn": (1, 1),
    "prism": (3, 3),
    "grouped": (4, 4),
    "paper": (2, 2),
    "closed form": (3, 3),
    "no erase": (3, 3),
    "negative eigenvalues": (5, 5),
    "no base write": (2, 3),
    "state anchor": (3, 3),
    "shared key": (2, 2),
    "base key": (1, 1),
}


def test_update_rank_equals_dense_matrices(helpers, arm):
    model, inputs = helpers.make(arm), helpers.tokens()
    ds = probes.update_rank(model, inputs)
    assert set(ds.numerical.dims) == {"layer", "matrix", "sample", "token", "head"}
    for layer in range(2):
        dense = helpers.Dense(model, inputs, layer)
        for matrix, full in (("write", dense.B), ("update", dense.update)):
            sigma = torch.linalg.svdvals(full)
            found = ds.singular_value.sel(layer=layer, matrix=matrix).values
            n = min(found.shape[-1], sigma.shape[-1])
            np.testing.assert_allclose(found[..., :n], sigma[..., :n], rtol=2e-6, atol=1e-7)
            wanted = rank.rank_measures(sigma, 1e-9)
            for name in rank.MEASURES:
                values = ds[name].sel(layer=layer, matrix=matrix).values
                np.testing.assert_allclose(
                    values, wanted[name], rtol=1e-5, atol=1e-5, err_msg=f"{arm} {matrix} {name}"
                )


def test_update_rank_reaches_its_bound_and_never_exceeds_it(helpers, arm):
    ds = probes.update_rank(helpers.make(arm), helpers.tokens())
    assert tuple(ds.bound.isel(layer=0).values) == DISTINCT[arm]
    # The first tokens of a sequence may be special (nothing to erase); later ones reach the bound.
    assert (ds.numerical <= ds.bound).all()
    assert (ds.numerical.isel(token=-1).max(("sample", "head")) == ds.bound).all()


def test_rank_is_capped_by_the_widths(helpers):
    ds = probes.update_rank(helpers.make("prism", n_refine=5, head_dim=2), helpers.tokens())
    assert ds.bound.max() == 2
    assert ds.numerical.max() == 2
    assert ds.sizes["component"] == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_definition_travels_with_the_rank(helpers, dtype):
    model, inputs = helpers.make("base key", dtype=dtype), helpers.tokens()
    for ds in (
        probes.update_rank(model, inputs),
        probes.state_rank(model, inputs),
        probes.window_rank(model, inputs),
    ):
        assert ds.attrs["dtype"] == str(dtype).removeprefix("torch.")
        assert "sigma" in ds.attrs["measure_stable"]
        assert "eps(dtype)" in ds.attrs["tolerance"]
    # One key per token, rounded in bf16 or not, is one direction.
    assert probes.update_rank(model, inputs).numerical.max() == 1


def test_a_model_that_writes_nothing_has_rank_zero_everywhere(helpers):
    model = helpers.make("prism")
    with torch.no_grad():
        for block in model.blocks:
            block.mixer.in_proj.zero_()
            block.mixer.refine.proj.zero_()
    inputs = helpers.tokens()
    for ds in (
        probes.update_rank(model, inputs),
        probes.state_rank(model, inputs),
        probes.window_rank(model, inputs),
    ):
        for name in (*rank.MEASURES, "singular_value"):
            assert (ds[name] == 0).all(), name


def test_state_rank_equals_dense_states(helpers, arm):
    model, inputs, at = helpers.make(arm), helpers.tokens(), [0, 1, 4, 12]
    ds = probes.state_rank(model, inputs, at=at)
    assert ds.token.values.tolist() == at
    for layer in range(2):
        states = helpers.Dense(model, inputs, layer).S[:, at]
        sigma = torch.linalg.svdvals(states)
        np.testing.assert_allclose(ds.singular_value.sel(layer=layer), sigma, rtol=1e-5, atol=1e-7)
        wanted = torch.linalg.matrix_rank(states)
        assert (ds.numerical.sel(layer=layer).values == wanted.numpy()).all()
    assert (ds.numerical <= ds.bound).all()


def test_state_rank_takes_positions_from_the_end_and_refuses_others(helpers):
    model, inputs = helpers.make(), helpers.tokens()
    assert probes.state_rank(model, inputs, at=[-1, 3]).token.values.tolist() == [3, 12]
    assert probes.state_rank(model, inputs).token.values.tolist() == list(range(13))
    with pytest.raises(ValueError, match=r"at: expected positions in -13\.\.12, got \[13\]"):
        probes.state_rank(model, inputs, at=[0, 13])
    with pytest.raises(ValueError, match=r"at: .* got none"):
        probes.state_rank(model, inputs, at=[])


@pytest.mark.parametrize("window", [1, 2, 5])
def test_window_rank_equals_dense_sums(helpers, window):
    model, inputs, at = helpers.make("grouped"), helpers.tokens(), [0, 3, 12]
    ds = probes.window_rank(model, inputs, window=window, at=at)
    for layer in range(2):
        B = helpers.Dense(model, inputs, layer).B
        sums = torch.stack([B[:, max(0, t - window + 1) : t + 1].sum(1) for t in at], 1)
        np.testing.assert_allclose(
            ds.singular_value.sel(layer=layer), torch.linalg.svdvals(sums), rtol=1e-5, atol=1e-7
        )
        assert (ds.numerical.sel(layer=layer).values == torch.linalg.matrix_rank(sums).numpy()).all()
    assert (ds.numerical <= ds.bound).all()
    with pytest.raises(ValueError, match="window: expected at least 1 token, got 0"):
        probes.window_rank(model, inputs, window=0)


def test_interventions_that_are_active_are_measured(helpers):
    model, inputs = helpers.make(), helpers.tokens()
    with model.hooks([knock_out(layer=1)]):
        ds = probes.update_rank(model, inputs)
    assert ds.numerical.sel(layer=0).max() == 3
    assert ds.numerical.sel(layer=1).max() == 1
    state = torch.zeros(3, 1, 8, 8)
    with (
        model.hooks([patch_state(0, 4, state)]),
        pytest.raises(ValueError, match="no hook that replaces the state"),
    ):
        probes.update_rank(model, inputs)


def test_hooks_of_the_user_stay_and_ours_go(helpers):
    model, inputs, seen = helpers.make(), helpers.tokens(), []
    model.blocks[0].mixer.register_forward_hook(lambda *a: seen.append(1))
    probes.update_rank(model, inputs)
    with pytest.raises(ValueError, match="inputs: expected integer tokens"):
        probes.update_rank(model, inputs.float())
    with pytest.raises(IndexError):
        probes.update_rank(model, inputs + 100)
    count = len(seen)
    model(inputs)
    assert len(seen) == count + 1
    assert all(not block.mixer.points.attached for block in model.blocks)


def test_layers_are_read_in_groups_that_fit(helpers, monkeypatch):
    from probes import _factors

    model, inputs = helpers.make(n_layers=4), helpers.tokens()
    whole = probes.update_rank(model, inputs)
    monkeypatch.setattr(_factors, "MAX_BYTES", 1)
    assert probes.update_rank(model, inputs).equals(whole)


def test_an_initial_state_counts(helpers):
    from probes import _factors
    from probes.update import update_factors

    model, inputs = helpers.make("grouped"), helpers.tokens()
    (f, *_) = _factors.layers(model, inputs)
    first, rest = f.slice(0, 6), f.slice(6, 13)
    state = first.states([5])[:, 0]
    torch.testing.assert_close(rest.read_before(initial_state=state), f.read_before()[:, 6:])
    torch.testing.assert_close(
        update_factors(rest, "update", state)[0], update_factors(f, "update")[0][:, 6:]
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_fact_that_is_already_stored_is_not_written_again(dtype):
    """v_t = Sbar_t k_t: the update cancels, and what rounding leaves of it has rank 0."""
    from probes import _factors
    from probes.update import update_factors

    gen = torch.Generator().manual_seed(0)
    key = torch.nn.functional.normalize(torch.randn(2, 1, 1, 16, generator=gen, dtype=torch.float64), dim=-1)
    value = torch.randn(2, 1, 1, 16, generator=gen, dtype=torch.float64)
    wide = torch.promote_types(dtype, torch.float32)
    k, v = (x.to(dtype).to(wide).expand(2, 40, 1, 16) for x in (key, value))
    ones, nothing = k.new_ones(2, 40, 1), k.new_zeros(2, 40, 1, 0, 16)
    f = _factors.Factors(0, dtype, k, v, 0 * ones, ones, nothing, nothing, {})
    left, right, norm = update_factors(f, "update")
    sigma = rank.factor_singular_values(left, right)
    found = rank.rank_measures(sigma, rank.factor_threshold(left, right, dtype, left_norm=norm))
    for name, values in found.items():
        assert (values[:, 0] == 1).all(), name
        assert (values[:, 2:] == 0).all(), name


@pytest.mark.gpu
def test_long_sequences_on_a_gpu_form_no_matrix_per_token(helpers):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    model = helpers.make(d_model=256, n_heads=2, head_dim=128, dtype=torch.float32, n_layers=1).cuda()
    inputs = helpers.tokens(1, 4096).cuda()
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    probes.update_rank(model, inputs)
    assert torch.cuda.max_memory_allocated() - before < 4096 * 2 * 128 * 128 * 4
