"""Measures 6 and 7 against loops: eigenvalues, half-lives, read-back, growth of errors."""

import math

import numpy as np
import pytest
import torch
import xarray as xr

import probes
from probes import _factors
from probes.perturbation import _perturbed, fit_growth


def test_eigenvalues_of_the_transition(helpers, arm):
    model, inputs = helpers.make(arm), helpers.tokens(2, 6)
    ds = probes.transition(model, inputs)
    for layer in range(2):
        A = helpers.Dense(model, inputs, layer).A
        found = torch.linalg.eigvalsh(A)
        one = ds.sel(layer=layer)
        # K - 1 eigenvalues are alpha; the other one lies anywhere: compare sums and sums of squares.
        K = A.shape[-1]
        np.testing.assert_allclose((K - 1) * one.decay + one.along_key, found.sum(-1), rtol=1e-5)
        np.testing.assert_allclose(
            (K - 1) * one.decay**2 + one.along_key**2, found.square().sum(-1), rtol=1e-5
        )


def test_half_lives_of_planted_decays(helpers):
    model = helpers.make("no erase", decay="none")
    ds = probes.transition(model, helpers.tokens())
    assert np.isinf(ds.half_life).all()
    assert np.isinf(ds.half_life_erased).all()
    assert (ds.decay == 1).all()
    model, inputs = helpers.make("prism"), helpers.tokens()
    ds = probes.transition(model, inputs)
    dense = helpers.Dense(model, inputs, 0)
    want = math.log(0.5) / dense.alpha.log().mean(1)
    np.testing.assert_allclose(ds.half_life.sel(layer=0), want, rtol=1e-5)
    energy = (dense.A.square().sum((-2, -1)) / dense.A.shape[-1]).log().mean(1)
    np.testing.assert_allclose(ds.half_life_erased.sel(layer=0), math.log(0.25) / energy, rtol=1e-5)
    assert (ds.half_life_erased < ds.half_life).all()


def test_readback_equals_a_loop(helpers):
    model, inputs, at = helpers.make("grouped"), helpers.tokens(3, 20), [2, 9]
    ds = probes.readback(model, inputs, at=at, horizon=8)
    for layer in range(2):
        dense = helpers.Dense(model, inputs, layer)
        for s in at:
            written, answer = dense.update[:, s], torch.einsum("bhvk,bhk->bhv", dense.S[:, s], dense.k[:, s])
            first = torch.einsum("bhvk,bhk->bhv", written, dense.k[:, s])
            for n in range(9):
                if n:
                    written = written @ dense.A[:, s + n]
                left = torch.einsum("bhvk,bhk->bhv", written, dense.k[:, s])
                now = torch.einsum("bhvk,bhk->bhv", dense.S[:, s + n], dense.k[:, s])
                one = ds.sel(layer=layer, token=s, distance=n)
                kept = (left * first).sum(-1) / first.square().sum(-1)
                np.testing.assert_allclose(one.kept, kept, rtol=1e-4, atol=1e-6)
                recalled = (now * answer).sum(-1) / (now.norm(dim=-1) * answer.norm(dim=-1))
                np.testing.assert_allclose(one.recalled, recalled, rtol=1e-4, atol=1e-6)
    first_below = (ds.kept < 0.5).argmax("distance").where((ds.kept < 0.5).any("distance"), np.inf)
    assert (ds.lifetime == first_below).all()
    with pytest.raises(ValueError, match=r"horizon: expected 1\.\.19"):
        probes.readback(model, inputs, horizon=20)
    with pytest.raises(ValueError, match=r"at: expected positions up to 11 .* got 12"):
        probes.readback(model, inputs, at=[12], horizon=8)


def test_nothing_fades_without_decay_and_erase(helpers):
    ds = probes.readback(helpers.make("no erase", decay="none"), helpers.tokens(3, 20), horizon=8)
    np.testing.assert_allclose(ds.kept, 1, atol=1e-6)
    assert np.isinf(ds.lifetime).all()


@pytest.mark.parametrize("target", ["transition", "write"])
@pytest.mark.parametrize("constant", [False, True])
def test_noise_is_of_the_stated_size_and_touches_nothing_else(helpers, target, constant):
    model, inputs, epsilon = helpers.make("grouped"), helpers.tokens(2, 7), 0.05
    (f, *_) = _factors.layers(model, inputs)
    noisy, stride = _perturbed(f, target, epsilon, constant, torch.Generator().manual_seed(0))
    dense = helpers.Dense(model, inputs, 0)
    eye = torch.eye(4, dtype=torch.float64)

    def step(factors, t, state):
        """One token of the scan on a dense state [B, HV, V, K]."""
        key = factors.key[:, t]
        outer = torch.einsum("bhi,bhj->bhij", key, key)
        A = factors.log_decay[:, t].exp()[..., None, None] * (eye - factors.beta[:, t, :, None, None] * outer)
        B = torch.einsum("bh,bhv,bhk->bhvk", factors.beta[:, t], factors.v[:, t], key)
        return state @ A + B + torch.einsum("bhlv,bhlk->bhvk", factors.write_v[:, t], factors.write_k[:, t])

    differences = []
    for t in range(7):
        # An identity state (padded to V x K) shows A_t + B_t; a zero state shows B_t.
        zero = torch.zeros_like(dense.S[:, t])
        unit = zero + torch.eye(6, 4, dtype=torch.float64)
        A, B = unit, zero
        for i in range(stride):
            A, B = step(noisy, stride * t + i, A), step(noisy, stride * t + i, B)
        A = (A - B)[..., :4, :]
        if target == "write":
            torch.testing.assert_close(A, dense.A[:, t])
            size = (B - dense.B[:, t]).norm(dim=(-2, -1)) / dense.B[:, t].norm(dim=(-2, -1))
            torch.testing.assert_close(size, torch.full_like(size, epsilon))
            differences.append(B - dense.B[:, t])
        else:
            torch.testing.assert_close(B, dense.B[:, t])
            relative = A @ torch.linalg.inv(dense.A[:, t]) - eye
            size = torch.linalg.matrix_norm(relative, 2)
            torch.testing.assert_close(size, torch.full_like(size, epsilon))
            differences.append(relative)
    unit = [d / d.norm(dim=(-2, -1), keepdim=True) for d in differences]
    same = all(torch.allclose(unit[0], other) for other in unit[1:])
    assert same == constant


def test_errors_equal_a_dense_replay(helpers):
    model, inputs = helpers.make("prism"), helpers.tokens(2, 16)
    ds = probes.perturbation_growth(model, inputs, trials=2, epsilon=0.01, at=[0, 3, 9, 15], seed=5)
    assert ds.sizes["trial"] == 4
    assert ds.token.values.tolist() == [1, 4, 10, 16]
    generator = torch.Generator().manual_seed(5)
    torch.randint(16, (0,), generator=generator)
    (f, *_) = _factors.layers(model, inputs)
    clean = f.states([0, 3, 9, 15])
    noisy, stride = _perturbed(f, "transition", 0.01, False, generator)
    states = noisy.states([stride * p + stride - 1 for p in (0, 3, 9, 15)])
    want = (states - clean).norm(dim=(-2, -1)) / 0.01
    got = ds.error.sel(layer=0, target="transition").isel(trial=slice(0, 2))
    np.testing.assert_allclose(got, want.detach(), rtol=1e-4)
    relative = ds.relative_error.sel(layer=0, target="transition").isel(trial=slice(0, 2))
    np.testing.assert_allclose(relative, (want / clean.norm(dim=(-2, -1))).detach(), rtol=1e-4)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("form", ["constant", "ln T", "sqrt T", "T", "T^2"])
def test_fits_recognise_planted_growth(form, seed):
    t = 2.0 ** np.arange(3, 17)
    curve = {
        "constant": 0 * t + 3,
        "ln T": 1 + 2 * np.log(t),
        "sqrt T": np.sqrt(t),
        "T": 5 + t / 9,
        "T^2": t**2,
    }[form]
    noise = np.random.default_rng(seed).normal(1, 0.02, size=(12, len(t)))
    error = xr.DataArray(curve * noise, dims=("trial", "token"), coords={"token": t})
    fits = fit_growth(error)
    assert fits.fit_best.item() == form
    low, high = fits.fit_slope_interval.sel(form="ln T" if form == "constant" else form).values
    slope = {"constant": 0.0, "ln T": 2.0, "sqrt T": 1.0, "T": 1 / 9, "T^2": 1.0}[form] / curve.mean()
    assert low <= high
    assert low - 0.02 * abs(slope) - 1e-3 <= slope <= high + 0.02 * abs(slope) + 1e-3
    with pytest.raises(ValueError, match="at: expected at least 4 positions"):
        fit_growth(error.isel(token=slice(3)))


def test_persistent_memory_sums_constant_write_noise_linearly(helpers):
    model, inputs = helpers.make("no erase", n_layers=1), helpers.tokens(2, 32)
    ds = probes.perturbation_growth(
        model, inputs, targets=["write"], noise="constant", persistent=True, length=4096, trials=2
    )
    assert ds.token.max() == 4096
    one = ds.sel(layer=0, target="write")
    assert one.fit_best.item() == "T"
    faded = probes.perturbation_growth(
        model, inputs, targets=["write"], noise="constant", length=4096, trials=2
    )
    assert float(faded.error.isel(token=-1).mean()) < 0.1 * float(ds.error.isel(token=-1).mean())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"targets": ["states"]}, "targets: expected some of transition, write, got"),
        ({"noise": "white"}, "noise: expected 'independent' or 'constant', got 'white'"),
        ({"epsilon": 0.0}, "epsilon and trials: expected above 0"),
    ],
)
def test_bad_options_of_the_perturbation(helpers, options, message):
    with pytest.raises(ValueError, match=message):
        probes.perturbation_growth(helpers.make(), helpers.tokens(), **options)


@pytest.mark.parametrize("name", ["readback", "anchor_horizon", "perturbation_growth"])
def test_measures_over_time_say_how_many_tokens_they_need(helpers, name):
    need = {"readback": 2, "anchor_horizon": 2, "perturbation_growth": 4}[name]
    with pytest.raises(ValueError, match=rf"expected at least {need} tokens .*, got {need - 1}"):
        probes.measure(helpers.make(), helpers.tokens(T=need - 1), name)
    for tokens in range(need, 17):
        found = probes.measure(helpers.make("gdn", n_layers=1), helpers.tokens(T=tokens), name)
        assert found.sizes["token"] >= need - 1
