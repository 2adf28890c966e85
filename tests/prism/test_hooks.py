"""Reading and intervening: what is shown, what follows from an edit, and what is left behind."""

import pytest
import torch

from prism import PrismConfig, PrismMixer, PrismModel
from prism.config import PRESETS
from prism.hooks import scale_step

SMALL = {"vocab_size": 13, "d_model": 8}
GROUPED = {"n_heads": 2, "n_value_heads": 4, "head_dim": 3, "expand_v": 5 / 3}
CONFIGS = {name: PrismConfig.preset(name, **SMALL, **GROUPED) for name in PRESETS}
CONFIGS["attention"] = PrismConfig(mixer="attention", **SMALL, **GROUPED)
CONFIGS["no erase"] = PrismConfig(erase="none", **SMALL, **GROUPED)
CONFIGS["no erase, L = 0"] = PrismConfig(erase="none", n_refine=0, **SMALL, **GROUPED)
CONFIGS["no base write"] = PrismConfig(base_write=False, **SMALL, **GROUPED)
CONFIGS["refinement alone"] = PrismConfig(base_write=False, erase="none", **SMALL, **GROUPED)
CONFIGS["serial"] = PrismConfig(anchor="state", **SMALL, **GROUPED)
CONFIGS["shared keys, no gain"] = PrismConfig(refine_keys="shared", gain="one", **SMALL, **GROUPED)


def tokens(B=2, T=9, seed=0):
    return torch.randint(13, (B, T), generator=torch.Generator().manual_seed(seed))


def build(name="prism", **changes):
    return PrismModel(CONFIGS[name].replace(**changes), seed=0).double()


def attached(model):
    return [item for m in model.modules() if hasattr(m, "points") for item in m.points.attached]


@pytest.mark.parametrize("name", CONFIGS)
def test_cache_shows_every_point_in_its_shape_and_changes_nothing(name):
    model, x = build(name), tokens()
    plain = model(x)
    logits, cache = model.run_with_cache(x)
    assert torch.equal(plain, logits)
    assert {n: tuple(t.shape) for n, t in cache.items()} == model.hook_shapes(2, 9)
    assert not any(t.requires_grad for t in cache.values())
    assert not attached(model)
    initial = 0 if name == "attention" else 2 * 2 * 4 * 3 * 5 * 8  # counted, and none was given here
    assert cache.nbytes == model.estimate_cache_bytes((2, 9)) - initial


@pytest.mark.parametrize("name", [n for n in CONFIGS if n != "attention"])
def test_factors_and_replayed_states_are_the_recurrence(name):
    """A_t and B_t formed from the factors give the states, and the states the outputs, whatever the erase."""
    model, x = build(name), tokens()
    _, cache = model.run_with_cache(x)
    for layer in range(2):
        f = cache.factors(layer)
        groups = f.v.shape[2] // f.k.shape[2]
        key = f.k.repeat_interleave(groups, 2)
        S = torch.zeros(2, 4, 5, 3, dtype=torch.float64)
        states = []
        for t in range(9):
            kk = torch.einsum("bhi,bhj->bhij", key[:, t], key[:, t])
            A = f.log_decay[:, t].exp()[..., None, None] * (torch.eye(3) - f.beta[:, t][..., None, None] * kk)
            B = torch.einsum("bh,bhv,bhk->bhvk", f.beta[:, t], f.v[:, t], key[:, t])
            if f.write_k is not None:
                B = B + torch.einsum("bhlv,bhlk->bhvk", f.write_v[:, t], f.write_k[:, t])
            S = S @ A + B
            states.append(S.transpose(-1, -2))
        states = torch.stack(states, 1)
        torch.testing.assert_close(cache.state(layer, range(9)), states, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(
            cache.state(layer, [7, 2, -1]), states[:, [7, 2, 8]], rtol=1e-10, atol=1e-12
        )
        torch.testing.assert_close(
            cache[f"blocks.{layer}.mixer.state"], states[:, -1:], rtol=1e-10, atol=1e-12
        )
        q = cache[f"blocks.{layer}.mixer.q"].repeat_interleave(2, 2)
        scale = model.config.scale or 3**-0.5
        out = scale * torch.einsum("bthk,bthkv->bthv", q, states)
        torch.testing.assert_close(cache[f"blocks.{layer}.mixer.out"], out, rtol=1e-10, atol=1e-12)


def test_states_at_positions_of_the_callers_choice():
    model, x = build(), tokens()
    name = "blocks.1.mixer.state"
    _, cache = model.run_with_cache(x, [name], positions=[0, 3])
    assert cache[name].shape == (2, 2, 4, 3, 5)
    torch.testing.assert_close(cache[name], cache.state(1, [0, 3]))
    assert cache.state(1, 3).shape == (2, 1, 4, 3, 5)
    assert cache.state(1, []).shape == (2, 0, 4, 3, 5)
    with pytest.raises(ValueError, match=r"at: expected positions in \[-9, 9\), came 9"):
        cache.state(1, 9)
    with pytest.raises(
        KeyError, match=r"can replay 1; expected run_with_cache\(names=\['blocks.0.mixer.state'\]\)"
    ):
        cache.state(0, 1)
    with pytest.raises(ValueError, match="at: expected states of at most max_bytes=100"):
        cache.state(1, 0, max_bytes=100)
    single = cache.state(1, [3], dtype=torch.float32)
    assert single.dtype == torch.float32


def test_states_of_a_long_sequence_are_replayed_where_asked():
    model, x = build("prism", n_layers=1), tokens(B=1, T=4096)
    with torch.no_grad():
        _, cache = model.run_with_cache(x, ["*.state"], max_bytes=5_000_000)
        _, half = model(x[:, :2048], use_cache=True)
    states = cache.state(0, [2047, 4095])
    torch.testing.assert_close(states[:, 0], half[0].state, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(states[:, 1:], cache["blocks.0.mixer.state"], rtol=1e-9, atol=1e-12)


def test_continued_sequence_replays_from_its_initial_state():
    model, x = build(), tokens()
    _, whole = model.run_with_cache(x, ["*.state"])
    _, before = model(x[:, :4], use_cache=True)
    (_, after), rest = model.run_with_cache(x[:, 4:], ["*.state"], cache=before, use_cache=True)
    torch.testing.assert_close(rest.state(1, range(5)), whole.state(1, range(4, 9)), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(after[1].state, whole.state(1, -1)[:, 0], rtol=1e-10, atol=1e-12)


def test_a_kept_cache_is_not_changed_by_later_runs_or_edits():
    model, x = build(), tokens()
    _, cache = model.run_with_cache(x)
    kept = {name: t.clone() for name, t in cache.items()}
    state = cache.state(0, 4)

    def spoil(tensor, *, hook):
        tensor.zero_()
        return tensor

    model.run_with_hooks(tokens(seed=1), [("blocks.*.mixer.*", spoil)])
    with torch.no_grad():
        model.embedding.zero_()
    assert all(torch.equal(cache[name], t) for name, t in kept.items())
    assert torch.equal(cache.state(0, 4), state)


def test_entries_of_a_cache_are_copies_of_their_own():
    model, x = build(), tokens()
    _, cache = model.run_with_cache(x)
    state, other = cache.state(0, 4), cache["blocks.1.resid_pre"].clone()
    for name in cache:
        if name != "blocks.1.resid_pre":
            cache[name].zero_()
    assert torch.equal(cache.state(0, 4), state)
    assert torch.equal(cache["blocks.1.resid_pre"], other)


# Names


def test_unknown_names_raise_with_close_ones():
    model = build()
    for call in (
        lambda name: model.run_with_cache(tokens(), [name]),
        lambda name: model.run_with_hooks(tokens(), [(name, lambda t, *, hook: None)]),
        lambda name: model.estimate_cache_bytes((2, 9), name),
    ):
        with pytest.raises(
            ValueError, match=r"came 'blocks.0.mixer.detla'; close names: blocks.0.mixer.delta"
        ):
            call("blocks.0.mixer.detla")
        with pytest.raises(ValueError, match=r"came 'blocks\.7\.\*'"):
            call("blocks.7.*")
    with pytest.raises(ValueError, match="true for none"):
        model.run_with_cache(tokens(), lambda name: False)
    with pytest.raises(ValueError, match="expected a name, a pattern or a predicate, came 3"):
        model.run_with_cache(tokens(), [3])
    with pytest.raises(ValueError, match=r"hooks: expected a function for 'embed', came 5"):
        model.run_with_hooks(tokens(), [("embed", 5)])
    with pytest.raises(ValueError, match=r"came 'blocks.0.mixer.delta'"):
        build("gdn").run_with_cache(tokens(), ["blocks.0.mixer.delta"])
    _, cache = model.run_with_cache(tokens(), ["embed", "*.delta"])
    with pytest.raises(KeyError, match=r"close names: blocks.0.mixer.delta"):
        cache["blocks.0.mixer.delt"]


def test_patterns_predicates_and_lists():
    model, x = build(), tokens()
    _, cache = model.run_with_cache(x, ["blocks.*.mixer.write_?", lambda name: name == "logits"])
    assert set(cache) == {f"blocks.{i}.mixer.write_{n}" for i in range(2) for n in "kv"} | {"logits"}
    assert cache.stack("mixer.write_v").shape == (2, 2, 9, 4, 2, 5)
    with pytest.raises(KeyError, match=r"not in this cache: 'mixer.write_w'"):
        cache.stack("mixer.write_w")


def test_the_function_is_told_where_it_is():
    seen = []
    build().run_with_hooks(
        tokens(), [("blocks.*.mixer.out", lambda t, *, hook: seen.append((hook.name, hook.layer)))]
    )
    assert seen == [("blocks.0.mixer.out", 0), ("blocks.1.mixer.out", 1)]


def test_large_caches_are_refused_before_they_are_computed():
    model = build("prism")
    ran = []
    long = torch.zeros(1, 4096, dtype=torch.int64)
    all_states = model.estimate_cache_bytes((1, 4096), ["*.state"], positions=range(4096))
    assert all_states > 2 * 4096 * 4 * 15 * 8
    with (
        model.hooks([("embed", lambda t, *, hook: ran.append(1))]),
        pytest.raises(
            ValueError, match=r"expected a cache of at most max_bytes=1000000, came 2 names that need"
        ),
    ):
        model.run_with_cache(long, ["*.state"], positions=range(4096), max_bytes=1_000_000)
    assert not ran


# What is left behind


def test_hooks_of_other_origin_stay():
    model, x = build(), tokens()
    own, outer = [], []
    handle = model.blocks[0].register_forward_hook(lambda *a: own.append(1))
    with model.hooks([("embed", lambda t, *, hook: outer.append(1))]):
        model.run_with_cache(x)
        model.run_with_hooks(x, [("embed", lambda t, *, hook: None)])
        assert len(attached(model)) == 1
        model(x)
    model(x)
    assert (len(own), len(outer)) == (4, 3)
    assert not attached(model)
    handle.remove()


def test_nothing_is_left_after_an_exception():
    model, x = build(), tokens()
    plain = model(x)

    def fail(tensor, *, hook):
        raise RuntimeError("inside")

    for call in (
        lambda: model.run_with_hooks(
            x, [("embed", lambda t, *, hook: 0 * t), ("blocks.1.mixer.delta", fail)]
        ),
        lambda: model.run_with_cache(x, hooks=[("blocks.1.mixer.delta", fail)]),
    ):
        with pytest.raises(RuntimeError, match="inside"):
            call()
        assert not attached(model)
    with pytest.raises(ValueError), model.hooks([("embed", lambda t, *, hook: 0 * t), ("nowhere", fail)]):
        pass
    assert not attached(model)
    assert torch.equal(model(x), plain)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # raised inside Dynamo
def test_compiled_models_fire_hooks_or_refuse():
    model, x = build("gdn", n_layers=1), tokens()
    edit = ("blocks.0.mixer.v", lambda t, *, hook: 0 * t)
    with torch.no_grad():
        compiled = torch.compile(model, backend="eager")
        plain = model(x)
        torch.testing.assert_close(compiled(x), plain)
        with model.hooks([edit]):
            # The hooked part leaves the graph: it runs as it is written, and the hook fires.
            assert torch.equal(compiled(x), model(x))
            assert (compiled(x) - plain).abs().max() > 1e-6
        torch.testing.assert_close(compiled(x), plain)
        torch._dynamo.reset()
        whole = torch.compile(model, backend="eager", fullgraph=True)
        torch.testing.assert_close(whole(x), plain)
        with model.hooks([edit]), pytest.raises(torch._dynamo.exc.Unsupported):
            whole(x)  # no graph break allowed: refused
        torch._dynamo.reset()
        _, cache = compiled.run_with_cache(x, ["embed"])  # goes to the model that was compiled
        assert torch.equal(cache["embed"], model.embedding[x])
    model.blocks[0].compile(backend="eager")
    with pytest.raises(RuntimeError, match=r"blocks.0 was compiled in place and could skip them"):
        model.run_with_cache(x)


# Gradients


def random_like(tensor):
    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def slope(model, x, name, direction, size=1e-5):
    """Change of the sum of the logits along a direction of a point's tensor, by a central difference."""

    def push(by):
        return model.run_with_hooks(x, [(name, lambda t, *, hook: t + by * direction)]).sum()

    with torch.no_grad():
        return (push(size) - push(-size)) / (2 * size)


def test_backward_hooks_read_and_replace():
    model, x = build(), tokens()
    seen = {}
    names = ["blocks.1.mixer.write_v", "blocks.1.mixer.step_gate", "blocks.0.mixer.k", "blocks.1.mixer.out"]
    for name in names:
        logits = model.run_with_hooks(
            x, bwd_hooks=[(name, lambda g, *, hook: seen.__setitem__(hook.name, g))]
        )
        logits.sum().backward()
        # Against a finite difference along a random direction.
        direction = random_like(seen[name])
        expected = slope(model, x, name, direction)
        torch.testing.assert_close((seen[name] * direction).sum(), expected, rtol=1e-5, atol=1e-7)
    model.zero_grad()
    model.run_with_hooks(x, bwd_hooks=[("blocks.0.resid_post", lambda g, *, hook: 0 * g)]).sum().backward()
    assert not model.blocks[0].mixer.in_proj.grad.any()
    assert model.blocks[1].mixer.in_proj.grad.any()


@pytest.mark.parametrize("point", ["delta", "residual"])
@pytest.mark.parametrize("residual", ["subtract", "keep"])
def test_gradients_of_the_chain_are_total(point, residual):
    """d logits / d delta^l contains what delta^l does to later steps."""
    model, x = build(residual=residual), tokens()
    name, seen = f"blocks.0.mixer.{point}", []
    model.run_with_hooks(x, bwd_hooks=[(name, lambda g, *, hook: seen.append(g))]).sum().backward()
    (gradient,) = seen
    assert gradient.shape == model.hook_shapes(2, 9)[name]
    if point == "residual" and residual == "keep":
        assert torch.equal(gradient[..., 0, :], gradient[..., 1, :])  # one tensor, and its one gradient
        return
    for step in range(2):
        direction = torch.zeros_like(gradient)
        direction[..., step, :] = random_like(gradient[..., step, :])
        expected = slope(model, x, name, direction)
        torch.testing.assert_close((gradient * direction).sum(), expected, rtol=1e-5, atol=1e-7)
    with pytest.raises(ValueError, match="it can only read"):
        model.run_with_hooks(x, bwd_hooks=[(name, lambda g, *, hook: g)]).sum().backward()


def test_backward_hooks_without_a_gradient_are_refused():
    model, x = build(), tokens()
    with (
        torch.no_grad(),
        pytest.raises(RuntimeError, match="backward hook at embed: the tensor has no gradient"),
    ):
        model.run_with_hooks(x, bwd_hooks=[("embed", lambda g, *, hook: None)])
    with pytest.raises(
        ValueError, match=r"bwd_hooks: expected a point with a gradient, came 'blocks.0.mixer.state'"
    ):
        model.run_with_hooks(x, bwd_hooks=[("blocks.0.mixer.state", lambda g, *, hook: None)])


def test_gradients_flow_through_edits():
    model, x = build(), tokens()
    factor = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    model.run_with_hooks(x, [scale_step(0, 0, factor)]).sum().backward()
    assert factor.grad.abs() > 1e-8


def test_a_mixer_alone_runs_without_hooks_attached():
    mixer = PrismMixer(CONFIGS["prism"], seed=0)
    assert not mixer.points.active
    assert mixer(torch.zeros(1, 3, 8)).shape == (1, 3, 8)
