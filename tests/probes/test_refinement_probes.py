"""Measures 3 to 5 against loops: residual decay, cosines, anchor, gain and solver fidelity."""

import numpy as np
import pytest
import torch

import probes
from probes.anchor import linear_r2
from probes.fidelity import activation_slope


def cosine(a, b, dims=-1):
    return (a * b).sum(dims) / (a.square().sum(dims) * b.square().sum(dims)).sqrt()


def test_residual_decay_equals_the_chain(helpers, refined_arm):
    model, inputs = helpers.make(refined_arm), helpers.tokens()
    ds = probes.residual_decay(model, inputs)
    L = model.config.n_refine
    assert ds.step.values.tolist() == list(range(1, L + 2))
    for layer in range(2):
        cache = helpers.Dense(model, inputs, layer).cache
        r = cache["v"] - cache["anchor"] if model.config.residual_start == "value-anchor" else cache["v"]
        norms = [r.norm(dim=-1)]
        for l in range(L):
            r = r - cache["delta"][..., l, :]
            norms.append(r.norm(dim=-1))
        norms = torch.stack(norms, -1)
        one = ds.sel(layer=layer)
        np.testing.assert_allclose(one.ratio, norms / norms[..., :1], rtol=1e-5)
        np.testing.assert_allclose(one.initial_norm, norms[..., 0], rtol=1e-5)
        np.testing.assert_allclose(one.removed.sum("refine_step"), 1 - one.ratio.isel(step=-1), atol=1e-6)


def test_residual_decay_of_a_planted_chain(helpers):
    # Constant gain, identity, subtraction: the first step removes everything, the second nothing.
    with pytest.warns(UserWarning, match="delta"):
        model = helpers.make("prism", gain="one", activation="identity")
    ds = probes.residual_decay(model, helpers.tokens())
    np.testing.assert_allclose(ds.ratio.mean(("layer", "sample", "token", "head")), [1, 0, 0], atol=1e-7)
    np.testing.assert_allclose(ds.removed.mean(("layer", "sample", "token", "head")), [1, 0], atol=1e-7)


def test_a_zero_residual_is_undefined_not_a_number_made_up(helpers):
    model = helpers.make("closed form")
    with torch.no_grad():
        model.blocks[0].mixer.in_proj.zero_()
    ds = probes.residual_decay(model, helpers.tokens())
    assert ds.ratio.sel(layer=0).isnull().all()
    assert not ds.ratio.sel(layer=1).isnull().any()
    assert (ds.initial_norm.sel(layer=0) == 0).all()


def test_measures_of_the_refinement_refuse_a_model_without_one(helpers):
    model, inputs = helpers.make("gdn"), helpers.tokens()
    tensors = {
        "residual_decay": "residual",
        "step_cosines": "delta",
        "anchor_fidelity": "anchor",
        "gain_fidelity": "gain",
        "solver_fidelity": "write_k",
    }
    for name, tensor in tensors.items():
        with pytest.raises(
            ValueError, match=rf"model: expected {tensor}.* in blocks.0.mixer, which has q, k"
        ):
            probes.measure(model, inputs, name)


def test_step_cosines_equal_loops(helpers):
    model, inputs = helpers.make("grouped"), helpers.tokens()
    ds = probes.step_cosines(model, inputs)
    cache = helpers.Dense(model, inputs, 1).cache
    keys = torch.cat([cache["k"].repeat_interleave(2, 2)[..., None, :], cache["write_k"]], -2)
    one = ds.sel(layer=1)
    for i in range(4):
        for j in range(4):
            np.testing.assert_allclose(
                one.key[..., i, j], cosine(keys[..., i, :], keys[..., j, :]), atol=1e-6
            )
    delta = cache["delta"]
    for i in range(3):
        np.testing.assert_allclose(one.value[..., i], cosine(delta[..., i, :], cache["v"]), atol=1e-6)
        for j in range(3):
            np.testing.assert_allclose(
                one.delta[..., i, j], cosine(delta[..., i, :], delta[..., j, :]), atol=1e-6
            )
    assert (abs(probes.step_cosines(helpers.make("base key"), inputs).key - 1) < 1e-6).all()


def test_anchor_fidelity_equals_the_dense_read(helpers):
    model, inputs = helpers.make("grouped"), helpers.tokens(6, 13)
    ds = probes.anchor_fidelity(model, inputs)
    for layer in range(2):
        dense = helpers.Dense(model, inputs, layer)
        u = dense.cache["anchor"]
        previous = torch.einsum("bthvk,bthk->bthv", dense.before, dense.k)
        for name, read in (("previous", previous), ("decayed", dense.alpha[..., None] * previous)):
            one = ds.sel(layer=layer, read=name).isel(token=slice(1, None))
            np.testing.assert_allclose(one.cosine, cosine(u, read)[:, 1:], rtol=1e-4, atol=1e-6)
            error = (u - read).norm(dim=-1) / read.norm(dim=-1)
            np.testing.assert_allclose(one.relative_error, error[:, 1:], rtol=1e-4)
    assert ds.cosine.isel(token=0).isnull().all()
    assert ds.attrs["anchor_width"] == 4


def test_the_state_anchor_is_perfectly_faithful(helpers):
    ds = probes.anchor_fidelity(helpers.make("state anchor"), helpers.tokens(12, 13))
    later = ds.sel(read="decayed").isel(token=slice(1, None))
    np.testing.assert_allclose(later.cosine, 1, atol=1e-6)
    np.testing.assert_allclose(later.relative_error, 0, atol=1e-6)
    np.testing.assert_allclose(later.r2, 1, atol=1e-4)
    assert (later.baseline_r2 < 0.9).all()


def test_linear_r2_equals_scikit_learn():
    from sklearn.linear_model import LinearRegression
    from sklearn.metrics import r2_score

    gen = torch.Generator().manual_seed(0)
    x = torch.randn(6, 20, 2, 5, generator=gen, dtype=torch.float64)
    y = (
        x @ torch.randn(5, 3, generator=gen, dtype=torch.float64)
        + torch.randn(6, 20, 2, 3, generator=gen)
        + 2
    )
    found = linear_r2(x, y)
    for h in range(2):
        halves = [z[i::2, :, h].reshape(60, -1).numpy() for z in (x, y) for i in (0, 1)]
        fit_x, test_x, fit_y, test_y = halves
        predicted = LinearRegression().fit(fit_x, fit_y).predict(test_x)
        # One total over components, as in the docstring: weight each by its spread around the test half's
        # mean.
        want = r2_score(test_y, predicted, multioutput="variance_weighted")
        assert found[h].item() == pytest.approx(want, abs=1e-6)
    with pytest.raises(ValueError, match=r"inputs: expected \[B, T\] with B >= 2"):
        probes.anchor_fidelity(None, torch.zeros(1, 5, dtype=torch.int64))


def test_anchor_horizon_equals_windows_run_by_hand(helpers):
    model, inputs = helpers.make("negative eigenvalues"), helpers.tokens(3, 24)
    ds = probes.anchor_horizon(model, inputs, widths=[1, 3, 8], at=[8, 20])
    for layer in range(2):
        dense = helpers.Dense(model, inputs, layer)
        for t in (8, 20):
            read = torch.einsum("bhvk,bhk->bhv", dense.before[:, t], dense.k[:, t])
            for n in (1, 3, 8):
                state = torch.zeros_like(dense.before[:, 0])
                growth = torch.ones(3, 1, dtype=torch.float64)
                for s in range(t - n, t):
                    state = state @ dense.A[:, s] + dense.B[:, s]
                    growth = growth * torch.linalg.matrix_norm(dense.A[:, s], 2)
                near = torch.einsum("bhvk,bhk->bhv", state, dense.k[:, t])
                size = read.norm(dim=-1)
                one = ds.sel(layer=layer, token=t, width=n)
                np.testing.assert_allclose(one.error, (read - near).norm(dim=-1) / size, rtol=1e-4, atol=1e-7)
                start = dense.before[:, t - n].norm(dim=(-2, -1))
                bound = start * growth * dense.k[:, t].norm(dim=-1) / size
                np.testing.assert_allclose(one.bound, bound, rtol=1e-4, atol=1e-7)
    assert (ds.error <= ds.bound + 1e-6).all()
    with pytest.raises(ValueError, match=r"widths: expected widths in 1\.\.23"):
        probes.anchor_horizon(model, inputs, widths=[24])
    with pytest.raises(ValueError, match=r"at: expected positions from 8 .* on, got 5"):
        probes.anchor_horizon(model, inputs, widths=[8], at=[5])


@pytest.mark.parametrize("name", ["gelu", "silu", "tanh", "identity"])
def test_activation_slope_equals_finite_differences(name):
    from prism.refinement import ACTIVATIONS

    x = torch.linspace(-3, 3, 41, dtype=torch.float64)
    want = (ACTIVATIONS[name](x + 1e-5) - ACTIVATIONS[name](x - 1e-5)) / 2e-5
    torch.testing.assert_close(activation_slope(name, x), want, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("kind", ["grouped", "paper"])
def test_gain_fidelity_equals_loops(helpers, kind):
    model, inputs = helpers.make(kind), helpers.tokens()
    ds = probes.gain_fidelity(model, inputs)
    dense = helpers.Dense(model, inputs, 1)
    read = torch.einsum("bthvk,bthk->bthv", dense.before, dense.k)
    slope, gain = activation_slope("gelu", read), dense.cache["gain"]
    one = ds.sel(layer=1)
    for l in range(gain.shape[3]):
        p = gain[..., l, :]
        np.testing.assert_allclose(one.cosine[..., l], cosine(p, slope), atol=1e-6)
        error = (p - slope).norm(dim=-1) / slope.norm(dim=-1)
        np.testing.assert_allclose(one.relative_error[..., l], error, rtol=1e-5)
        for h in range(gain.shape[2]):
            want = np.corrcoef(p[:, :, h].flatten(), slope[:, :, h].flatten())[0, 1]
            assert float(one.correlation[h, l]) == pytest.approx(want, abs=1e-5)
    np.testing.assert_allclose(one.baseline_cosine, cosine(slope, torch.ones_like(slope)), atol=1e-6)


@pytest.mark.parametrize("kind", ["prism", "grouped", "no erase", "no base write"])
def test_solver_fidelity_equals_dense_matrices(helpers, kind):
    model, inputs = helpers.make(kind), helpers.tokens()
    ds = probes.solver_fidelity(model, inputs)
    for layer in range(2):
        dense = helpers.Dense(model, inputs, layer)
        mixer, cache = model.blocks[layer].mixer, dense.cache
        heads = dense.v.shape[2] // cache["k"].shape[2]
        key = cache["k"].repeat_interleave(heads, 2)
        read = dense.alpha[..., None] * torch.einsum("bthvk,bthk->bthv", dense.before, key)

        def matrix(values, keys):
            return torch.einsum("bthlv,bthlk->bthvk", values, keys)

        with torch.no_grad():
            refined = mixer.refine(read, cache["v"], cache["k"])
        mine, serial = matrix(cache["write_v"], cache["write_k"]), matrix(refined.write_v, refined.write_k)
        phi = torch.nn.functional.gelu
        gradient = activation_slope("gelu", read) * (cache["v"] - phi(read))
        gradient = torch.einsum("bthv,bthk->bthvk", gradient, key)
        base = dense.update - mine
        for write, own, solver in (("refinement", mine, serial), ("update", dense.update, base + serial)):
            one = ds.sel(layer=layer, write=write)
            got = one.sel(reference="serial")
            np.testing.assert_allclose(got.cosine, cosine(own, solver, (-2, -1)), atol=1e-5)
            error = (own - solver).norm(dim=(-2, -1)) / own.norm(dim=(-2, -1))
            np.testing.assert_allclose(got.relative_error, error, rtol=1e-4, atol=1e-6)
            np.testing.assert_allclose(
                one.sel(reference="gradient").cosine, cosine(own, gradient, (-2, -1)), atol=1e-5
            )


def test_the_state_anchor_is_the_serial_solver(helpers):
    ds = probes.solver_fidelity(helpers.make("state anchor"), helpers.tokens()).sel(reference="serial")
    assert (
        ds.cosine.sel(write="refinement").isel(token=0).isnull().all()
    )  # an empty state is read: nothing is written
    ds = ds.isel(token=slice(1, None))
    np.testing.assert_allclose(ds.cosine, 1, atol=1e-6)
    np.testing.assert_allclose(ds.relative_error, 0, atol=1e-6)


def test_anchors_of_different_widths_are_lined_up(helpers):
    models = [helpers.make("prism", anchor_width=width) for width in (4, 2)]
    models.append(helpers.make("prism", anchor="token"))
    inputs = helpers.tokens(8, 20)
    ds = probes.anchor_by_width(models, inputs)
    assert ds.anchor_width.values.tolist() == [1, 2, 4]
    for width, model in zip((4, 2, 1), models, strict=True):
        r2 = (
            probes.anchor_fidelity(model, inputs)
            .r2.sel(read="previous", direction="anchor_to_read")
            .mean("head")
        )
        np.testing.assert_allclose(ds.anchor.sel(anchor_width=width), np.sqrt(1 - r2.clip(0, 1)))
        horizon = probes.anchor_horizon(model, inputs, widths=[width])
        np.testing.assert_allclose(
            ds.window.sel(anchor_width=width), horizon.error.median(("sample", "token", "head", "width"))
        )
    assert (ds.window <= ds.bound).all()
    assert probes.plot_anchor_by_width(ds).get_title() == "layer 1, n = 8 sequences"
    with pytest.raises(ValueError, match="models: expected anchors of different widths, got two of width 4"):
        probes.anchor_by_width([models[0], models[0]], inputs)
    with pytest.raises(ValueError, match="models: expected at least 2 of one depth, got 1"):
        probes.anchor_by_width(models[:1], inputs)
