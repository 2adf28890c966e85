"""Measures 8 and 9, and the interventions behind them."""

import copy
import dataclasses

import numpy as np
import pytest
import torch

import probes
from probes.causal import accuracy
from probes.interventions import ingredients, without
from probes.readout import control_labels


def rebuilt(model, **changes):
    """A model of a changed configuration with the same weights, by the model's own route."""
    other = type(model)(dataclasses.replace(model.config, **changes), seed=1, dtype=torch.float64)
    other.load_state_dict(model.state_dict())
    return other


def test_ingredients_are_those_that_the_model_has(helpers):
    assert ingredients(helpers.make("gdn").config) == ("erase", "convolution", "mlp")
    assert ingredients(helpers.make("prism").config) == (
        "step 1", "step 2", "refinement", "base write", "erase", "convolution", "anchor convolution", "mlp",
    )  # fmt: skip
    bare = helpers.make("prism", short_conv=0, mlp_ratio=0, erase="none", anchor="token", n_refine=1)
    assert ingredients(bare.config) == ("refinement", "base write")
    assert ingredients(helpers.make("paper").config)[:4] == ("step 1", "step 2", "refinement", "erase")

    other = helpers.make("gdn", mixer="attention", mlp_ratio=0)
    assert ingredients(other.config) == ()
    inputs = helpers.tokens()
    with pytest.raises(ValueError, match="knockouts: expected at least one ingredient, got none"):
        probes.causal_share(other, inputs, inputs)


def test_every_knock_out_changes_the_output_and_leaves_the_model_alone(helpers, arm):
    model, inputs = helpers.make(arm), helpers.tokens()
    before, weights = model(inputs), copy.deepcopy(model.state_dict())
    for name in ingredients(model.config):
        with without(model, name) as cut:
            after = cut(inputs)
        assert not torch.allclose(before, after), name
        with without(model, name, layers=[1]) as cut:
            one = cut(inputs)
        assert not torch.allclose(before, one), name
        assert not torch.allclose(after, one), name
        assert torch.equal(model(inputs), before), name
    assert all(torch.equal(weights[k], v) for k, v in model.state_dict().items())
    with pytest.raises(RuntimeError, match="stop"), without(model, "mlp"):
        raise RuntimeError("stop")
    assert torch.equal(model(inputs), before)


def test_knock_outs_equal_models_built_without_the_ingredient(helpers):
    model, inputs = helpers.make("prism"), helpers.tokens()
    wanted = {"erase": rebuilt(model, erase="none"), "base write": rebuilt(model, base_write=False)}
    two = helpers.make("negative eigenvalues")
    for name, other in wanted.items():
        with without(model, name) as cut:
            torch.testing.assert_close(cut(inputs), other(inputs))
    with without(two, "erase") as cut:
        ds = probes.transition(cut, inputs)
        update = helpers.Dense(cut, inputs, 0)
    np.testing.assert_allclose(ds.along_key, ds.decay)
    # The writes of the first layer stay as they were, the gate in (0, 2) included.
    torch.testing.assert_close(update.B, helpers.Dense(two, inputs, 0).B)


def test_convolutions_see_one_token_after_their_knock_out(helpers):
    model = helpers.make("prism", n_layers=1)
    near, far = helpers.tokens(1, 6), helpers.tokens(1, 6)
    far[0, 3] = (far[0, 3] + 1) % 12

    def moved(cut, name):
        caches = [cut.run_with_cache(x, names=[f"blocks.0.mixer.{name}"])[1] for x in (near, far)]
        a, b = (cache[f"blocks.0.mixer.{name}"] for cache in caches)
        return (a != b).flatten(2).any(-1)[0].tolist()

    assert moved(model, "v") == [False, False, False, True, True, True]
    with without(model, "convolution") as cut:
        assert moved(cut, "v") == [False, False, False, True, False, False]
        assert moved(cut, "anchor") == [False, False, False, True, True, True]
    with without(model, "anchor convolution") as cut:
        assert moved(cut, "anchor") == [False, False, False, True, False, False]


def test_unknown_ingredients_and_layers_are_refused(helpers):
    model = helpers.make("gdn")
    refused = pytest.raises(ValueError, match=r"ingredient: expected one of erase, .* got 'refinement'")
    with refused, without(model, "refinement"):
        pass
    with (
        pytest.raises(ValueError, match=r"layers: expected layers in -2\.\.1, got 2"),
        without(model, "erase", [2]),
    ):
        pass


def test_accuracy_counts_scored_positions_only(helpers):
    model, inputs = helpers.make(), helpers.tokens(5, 7)
    answers = model(inputs).argmax(-1)
    targets = answers.clone()
    targets[:, ::2] = -100
    assert accuracy(model, inputs, targets, batch_size=2) == 1.0
    targets[0, 1] = (targets[0, 1] + 1) % 12
    assert accuracy(model, inputs, targets) == 1 - 1 / 15
    with pytest.raises(ValueError, match="targets: expected at least one position"):
        accuracy(model, inputs, torch.full_like(inputs, -100))


def test_causal_share_of_planted_answers(helpers):
    models, inputs = [helpers.make("prism", seed=s) for s in range(3)], helpers.tokens(8, 13)
    # The targets are one model's own answers: it alone is right everywhere.
    targets = models[0](inputs).argmax(-1)
    ds = probes.causal_share(models, inputs, targets, chance=0.0, each_layer=True, draws=50)
    assert float(ds.intact[0]) == 1
    assert ds.layer.values.tolist() == ["all", "0", "1"]
    for s, model in enumerate(models):
        for name in ds.ingredient.values:
            for layer in ("all", "1"):
                with without(model, name, None if layer == "all" else [1]) as cut:
                    want = float((cut(inputs).argmax(-1) == targets).double().mean())
                one = ds.sel(seed=s, ingredient=name, layer=layer)
                assert float(one.accuracy) == pytest.approx(want)
                assert float(one.share) == pytest.approx(1 - want / float(ds.intact[s]))
    assert (ds.share_interval.sel(edge="low") <= ds.share_mean).all()
    assert (ds.share_mean <= ds.share_interval.sel(edge="high")).all()
    np.testing.assert_allclose(ds.share_mean, ds.share.mean("seed"))
    assert ds.attrs["n_seeds"] == 3


def test_causal_share_makes_no_interval_of_one_seed_and_no_share_of_chance(helpers):
    model, inputs = helpers.make("gdn"), helpers.tokens(8, 13)
    targets = model(inputs).argmax(-1)
    ds = probes.causal_share(model, inputs, targets)
    assert ds.share_interval.isnull().all()
    assert not ds.share_mean.isnull().any()
    ds = probes.causal_share(model, inputs, (targets + 1) % 12, chance=0.1)
    assert ds.share.isnull().all()
    assert ds.share_mean.isnull().all()
    with pytest.raises(ValueError, match="models: expected at least one model, all of one configuration"):
        probes.causal_share([model, helpers.make("prism")], inputs, targets)
    with pytest.raises(ValueError, match=r"targets: expected the shape of inputs \[8, 13\], got \[8, 12\]"):
        probes.causal_share(model, inputs, targets[:, 1:])


def test_readout_finds_what_is_there_and_not_what_is_not(helpers):
    model, inputs = helpers.make("prism", dtype=torch.float32), helpers.tokens(200, 10)
    current = inputs % 3
    ds = probes.readout(model, inputs, current, at=[4, 9], untrained=helpers.make("prism", seed=1))
    assert ds.sizes["weights"] == 2
    # Every residual stream carries its own token; no classifier knows a coin that no token shows.
    assert (ds.accuracy.sel(label="hidden", source="residual", layer=0) > 0.9).all()
    coin = torch.randint(2, inputs.shape, generator=torch.Generator().manual_seed(9))
    ds = probes.readout(model, inputs, coin, at=[4, 9])
    hidden = ds.accuracy.sel(label="hidden")
    assert float(abs(hidden - 0.5).max()) < 0.2
    inside = (ds.interval.sel(edge="low") <= ds.accuracy) & (ds.accuracy <= ds.interval.sel(edge="high"))
    assert inside.all()


def test_readout_equals_scikit_learn_by_hand(helpers):
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    model, inputs = helpers.make("grouped"), helpers.tokens(60, 8)
    labels = (inputs % 2).cumsum(1) % 2
    ds = probes.readout(model, inputs, labels, sources=["state"], at=[7])
    dense = helpers.Dense(model, inputs, 1)
    features = dense.S[:, 7].mT.flatten(1).float().numpy()
    train, test = np.arange(60) % 2 == 0, np.arange(60) % 2 == 1
    scaler, wanted = StandardScaler().fit(features[train]), labels[:, 7].numpy()
    fitted = LogisticRegression(max_iter=200, tol=1e-3).fit(scaler.transform(features[train]), wanted[train])
    score = fitted.score(scaler.transform(features[test]), wanted[test])
    got = float(ds.accuracy.sel(source="state", layer=1, token=7, label="hidden", weights="trained"))
    assert got == pytest.approx(score, abs=1 / 30 + 1e-9)
    small = probes.readout(model, inputs, labels, sources=["state"], at=[7], max_features=5)
    assert small.accuracy.shape == ds.accuracy.shape


def test_controls_depend_on_the_window_alone():
    inputs = torch.randint(3, (50, 9), generator=torch.Generator().manual_seed(0))
    labels = inputs.clone()
    labels[:, 0] = -100
    control = control_labels(inputs, labels, 2, seed=0)
    assert (control[:, 0] == -100).all()
    seen = {}
    for row, answers in zip(inputs.tolist(), control.tolist(), strict=True):
        for t in range(1, 9):
            assert seen.setdefault(tuple(row[t - 1 : t + 1]), answers[t]) == answers[t]
    assert set(seen.values()) == {0, 1, 2}
    assert not torch.equal(control, control_labels(inputs, labels, 2, seed=1))
    with pytest.raises(ValueError, match="labels: expected at least 2 classes beside -100, got"):
        control_labels(inputs, torch.zeros_like(inputs), 2, seed=0)
    with pytest.raises(ValueError, match="control_window: expected at least 1, got 0"):
        control_labels(inputs, labels, 0, seed=0)


def test_readout_leaves_undefined_what_too_few_labels_define(helpers):
    model, inputs = helpers.make(), helpers.tokens(40, 6)
    labels = inputs % 2
    labels[:, 2] = -100
    labels[:, 3] = 1
    ds = probes.readout(model, inputs, labels, at=[2, 3, 4], sources=["mixer"])
    hidden = ds.accuracy.sel(label="hidden")
    assert hidden.sel(token=[2, 3]).isnull().all()
    assert not hidden.sel(token=4).isnull().any()
    assert np.isnan(float(ds.majority.sel(label="hidden", token=2)))
    assert ds.answers.sel(label="hidden").values.tolist() == [0, 20, 20]
    assert "n = 20 test answers" in probes.plot_readout(ds).get_title()
    # Left to itself, it reads where labels are; the plot shows the last token that has an accuracy.
    labels[:, [0, 5]] = -100
    labels[:16, 4] = -100
    assert probes.readout(model, inputs, labels, sources=["mixer"]).token.values.tolist() == [1, 3, 4]
    assert "token 4" in probes.plot_readout(ds).get_title()
    assert "token 4" in probes.plot_readout(ds.isel(token=[2, 1, 0])).get_title()
    with pytest.raises(ValueError, match="ds: expected an accuracy at one token at least"):
        probes.plot_readout(ds.sel(token=[2, 3]))
    with pytest.raises(ValueError, match="at least 8 labels in either half of the sequences, got 7 at most"):
        probes.readout(model, inputs[:15], labels[:15])
    with pytest.raises(ValueError, match="sources: expected some of state, mixer, residual, got"):
        probes.readout(model, inputs, labels, sources=["logits"])
    with pytest.raises(ValueError, match=r"labels: expected the shape of inputs \[40, 6\], got \[40, 5\]"):
        probes.readout(model, inputs, labels[:, 1:])
