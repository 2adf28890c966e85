"""What follows from an edit: in the chain of a refinement, in serial anchors, in states and what reads
them.
"""

import pytest
import torch

from prism import PrismConfig, PrismModel
from prism.config import PRESETS
from prism.hooks import (
    Pinned,
    at,
    freeze_gate,
    knock_out,
    patch_state,
    replace_step,
    scale_step,
    swap_anchor,
)

SMALL = {"vocab_size": 13, "d_model": 8}
GROUPED = {"n_heads": 2, "n_value_heads": 4, "head_dim": 3, "expand_v": 5 / 3}
CONFIGS = {name: PrismConfig.preset(name, **SMALL, **GROUPED) for name in PRESETS}
CONFIGS["no erase"] = PrismConfig(erase="none", **SMALL, **GROUPED)
CONFIGS["no base write"] = PrismConfig(base_write=False, **SMALL, **GROUPED)
CONFIGS["serial"] = PrismConfig(anchor="state", **SMALL, **GROUPED)


def tokens(B=2, T=9, seed=0):
    return torch.randint(13, (B, T), generator=torch.Generator().manual_seed(seed))


def build(name="prism", **changes):
    return PrismModel(CONFIGS[name].replace(**changes), seed=0).double()


def consistent(cache, layer=0):
    """The chain's equations hold between what a cache shows."""
    get = {n: cache[f"blocks.{layer}.mixer.{n}"] for n in ("residual", "delta", "step_gate", "write_v")}
    torch.testing.assert_close(get["residual"][..., 1:, :], get["residual"][..., :-1, :] - get["delta"])
    torch.testing.assert_close(get["write_v"], get["step_gate"].unsqueeze(-1) * get["delta"])


@pytest.mark.parametrize("name", ["prism", "paper", "serial", "closed_form"])
def test_knocked_out_step_propagates(name):
    model, x = build(name, n_refine=3), tokens()
    plain, before = model.run_with_cache(x)
    logits, after = model.run_with_cache(x, hooks=[knock_out(0, 1, tokens=[2, 5], heads=[3])])
    here = "blocks.0.mixer."
    delta, was = after[here + "delta"], before[here + "delta"]
    assert not delta[:, [2, 5], 3, 1].any()
    consistent(after)
    # Step 3 (index 2) works on the residual that step 2 no longer reduces; where nothing was asked, nothing
    # changes.
    gain = after[here + "gain"][..., 2, :]
    phi = torch.nn.functional.gelu if name != "closed_form" else lambda z: z
    torch.testing.assert_close(delta[..., 2, :], phi(gain * after[here + "residual"][..., 2, :]))
    assert (delta[:, 2, 3, 2] - was[:, 2, 3, 2]).abs().max() > 1e-6
    assert torch.equal(delta[:, :2], was[:, :2])
    if name != "serial":
        assert torch.equal(delta[:, :, :3], was[:, :, :3])
    assert torch.equal(logits[:, :2], plain[:, :2])
    assert (logits[:, 2:] != plain[:, 2:]).any(-1).all()


def test_knocking_out_only_the_write_leaves_the_chain():
    model, x = build(), tokens()
    _, before = model.run_with_cache(x)
    _, after = model.run_with_cache(x, hooks=[knock_out(0, 0, point="write_v")])
    assert torch.equal(after["blocks.0.mixer.delta"], before["blocks.0.mixer.delta"])
    assert not after["blocks.0.mixer.write_v"][..., 0, :].any()
    assert torch.equal(
        after["blocks.0.mixer.write_v"][..., 1, :], before["blocks.0.mixer.write_v"][..., 1, :]
    )
    assert (after["logits"] != before["logits"]).any()


def test_knocking_out_the_refinement_is_gated_deltanet():
    gdn, model = build("gdn"), build("prism")
    torch.testing.assert_close(
        model.run_with_hooks(tokens(), [knock_out()]), gdn(tokens()), rtol=1e-10, atol=1e-12
    )


def test_edits_compose_in_order_and_see_what_the_one_before_left():
    model, x = build(n_refine=2), tokens()
    name = "blocks.0.mixer.delta"
    _, double_then_add = model.run_with_cache(
        x, hooks=[(name, lambda t, *, hook: 2 * t), (name, lambda t, *, hook: t + 1)]
    )
    _, add_then_double = model.run_with_cache(
        x, hooks=[(name, lambda t, *, hook: t + 1), (name, lambda t, *, hook: 2 * t)]
    )
    _, plain = model.run_with_cache(x)
    torch.testing.assert_close(double_then_add[name][..., 0, :], 2 * plain[name][..., 0, :] + 1)
    torch.testing.assert_close(add_then_double[name][..., 0, :], 2 * plain[name][..., 0, :] + 2)
    # Step by step: the second edit acts on the step that the first one's residual makes.
    _, both = model.run_with_cache(x, hooks=[scale_step(0, 0, 0.0), scale_step(0, 1, 3.0)])
    r = plain["blocks.0.mixer.residual"][..., 0, :]
    expected = 3 * torch.nn.functional.gelu(plain["blocks.0.mixer.gain"][..., 1, :] * r)
    torch.testing.assert_close(both[name][..., 1, :], expected)
    consistent(both)


def test_replaced_residual_reaches_its_step_and_later_ones():
    model, x = build(), tokens()
    _, plain = model.run_with_cache(x)

    def first(t, *, hook):
        t[..., 0, :] = 0.5
        return t

    _, after = model.run_with_cache(x, hooks=[("blocks.0.mixer.residual", first)])
    consistent(after)
    gain = plain["blocks.0.mixer.gain"]
    expected = torch.nn.functional.gelu(0.5 * gain[..., 0, :])
    torch.testing.assert_close(after["blocks.0.mixer.delta"][..., 0, :], expected)


def test_values_that_stay_can_be_pinned():
    """An edit to the value that was there leaves it free, Pinned fixes it."""
    model, x = build(), tokens()
    name = "blocks.0.mixer.delta"
    _, plain = model.run_with_cache(x)
    second = plain[name][..., 1, :]

    def keep_second(t, *, hook):
        mask = torch.zeros_like(t, dtype=torch.bool)
        mask[..., 1, :] = True
        return Pinned(t, mask)

    _, free = model.run_with_cache(x, hooks=[knock_out(0, 0)])
    _, held = model.run_with_cache(x, hooks=[(name, keep_second), knock_out(0, 0)])
    assert (free[name][..., 1, :] - second).abs().max() > 1e-6
    assert torch.equal(held[name][..., 1, :], second)


def test_edits_in_place_count_and_none_means_no_change():
    model, x = build(), tokens()
    plain = model(x)

    def in_place(t, *, hook):
        t.mul_(0)

    assert (model.run_with_hooks(x, [("blocks.0.mixer.v", in_place)]) != plain).any()
    assert torch.equal(model.run_with_hooks(x, [("blocks.0.mixer.v", lambda t, *, hook: None)]), plain)
    with pytest.raises(
        ValueError, match=r"hook at blocks.0.mixer.v: expected a tensor of shape \[2, 9, 4, 5\]"
    ):
        model.run_with_hooks(x, [("blocks.0.mixer.v", lambda t, *, hook: t[:1])])
    with pytest.raises(
        ValueError, match=r"hook at embed: expected a tensor or None from the function, came int"
    ):
        model.run_with_hooks(x, [("embed", lambda t, *, hook: 3)])


POINTS = [n for n in build("prism", n_layers=1).hook_shapes(1, 1) if n != "blocks.0.mixer.state"]


@pytest.mark.parametrize("name", POINTS)
def test_every_point_acts_on_the_logits(name):
    model, x = build("prism", n_layers=1), tokens()
    after = model.run_with_hooks(x, [(name, lambda t, *, hook: 0.5 * t - 0.1)])
    assert (after - model(x)).abs().max() > 1e-6


@pytest.mark.parametrize("name", ["k", "beta", "write_k", "v"])
def test_papers_erase_has_points_of_its_own(name):
    model, x = build("paper", n_layers=1), tokens()
    after = model.run_with_hooks(x, [(f"blocks.0.mixer.{name}", lambda t, *, hook: 0.5 * t)])
    assert (after - model(x)).abs().max() > 1e-8


def test_frozen_gate_and_replaced_step():
    model, x = build(), tokens()
    _, cache = model.run_with_cache(
        x, hooks=[freeze_gate(None, 0.25, step=1), replace_step(1, 0, 2.0, tokens=[4])]
    )
    assert (cache.stack("mixer.step_gate")[..., 1] == 0.25).all()
    assert (cache.stack("mixer.step_gate")[..., 0] != 0.25).all()
    assert (cache["blocks.1.mixer.delta"][:, 4, :, 0] == 2.0).all()
    consistent(cache, 0)
    consistent(cache, 1)
    with pytest.raises(ValueError, match=r"step: expected indices in \[-2, 2\), came 2"):
        model.run_with_hooks(x, [knock_out(0, 2)])
    with pytest.raises(ValueError, match="point: expected delta or write_v, came 'gain'"):
        knock_out(0, 0, point="gain")
    with pytest.raises(ValueError, match=r"tokens: expected a mask of 9, came one of shape \[2\]"):
        model.run_with_hooks(x, [knock_out(0, 0, tokens=[True, False])])
    with pytest.raises(ValueError, match=r"heads: expected indices or a mask, came 0.5"):
        model.run_with_hooks(x, [knock_out(0, 0, heads=0.5)])
    for wrong in (replace_step(0, 0, torch.zeros(3)), patch_state(0, 3, torch.zeros(2, 4, 5, 3))):
        with pytest.raises(
            ValueError, match=r"(value|state): expected a shape that broadcasts to \[2, .*, came \["
        ):
            model.run_with_hooks(x, [wrong])


def test_a_choice_of_nothing_changes_nothing_and_masks_are_indices():
    model, x = build(), tokens()
    assert torch.equal(model.run_with_hooks(x, [knock_out(0, 0, tokens=[])]), model(x))
    mask = torch.arange(9) % 4 == 2
    for by_mask, by_index in (
        (knock_out(0, 0, tokens=mask), knock_out(0, 0, tokens=[2, 6])),
        (freeze_gate(0, 0.5, tokens=mask, heads=[1]), freeze_gate(0, 0.5, tokens=slice(2, 7, 4), heads=[1])),
    ):
        assert torch.equal(model.run_with_hooks(x, [by_mask]), model.run_with_hooks(x, [by_index]))
    _, cache = model.run_with_cache(x, hooks=[freeze_gate(0, 0.5, step=0, tokens=mask, heads=[1])])
    _, plain = model.run_with_cache(x)
    name = "blocks.0.mixer.step_gate"
    changed = cache[name] != plain[name]
    assert changed[:, mask, 1, 0].all()
    assert int(changed.sum()) == 2 * 2
    assert (cache[name][changed] == 0.5).all()


def test_what_is_not_finite_can_be_knocked_out():
    model, x = build(), tokens()
    overflow = ("blocks.0.mixer.delta", lambda t, *, hook: t * float("inf"))
    out = model.run_with_hooks(x, [overflow, knock_out(0)])
    torch.testing.assert_close(out, model.run_with_hooks(x, [knock_out(0)]))


@pytest.mark.parametrize("name", ["prism", "closed_form", "no erase", "no base write"])
def test_swapped_anchor_is_the_serial_model(name):
    model, x = build(name), tokens()
    serial = model.variant(anchor="state")
    torch.testing.assert_close(model.run_with_hooks(x, [swap_anchor()]), serial(x), rtol=1e-10, atol=1e-12)
    assert (model(x) - serial(x)).abs().max() > 1e-6
    half = model.run_with_hooks(x, [swap_anchor(0)])
    assert (half - serial(x)).abs().max() > 1e-8


def test_swapping_an_anchor_that_makes_its_own_key_is_refused():
    with pytest.raises(ValueError, match="swap_anchor: expected a mixer with a key of its own"):
        build("paper").run_with_hooks(tokens(), [swap_anchor()])
    with pytest.raises(ValueError, match="expected an anchor for swap_anchor, came 'embed'"):
        build().run_with_hooks(tokens(), [("embed", swap_anchor()[1])])


def test_edits_reach_later_anchors_of_a_serial_mixer():
    model, x = build("serial", n_layers=1), tokens()
    _, plain = model.run_with_cache(x)
    _, after = model.run_with_cache(x, hooks=[knock_out(0, tokens=[3])])
    name = "blocks.0.mixer.anchor"
    assert torch.equal(after[name][:, :4], plain[name][:, :4])
    assert (after[name][:, 4:] - plain[name][:, 4:]).abs().max() > 1e-8
    states = torch.nn.functional.pad(after.state(0, range(9)), (0, 0, 0, 0, 0, 0, 1, 0))[:, :9]
    key = after["blocks.0.mixer.k"].repeat_interleave(2, 2)
    read = torch.einsum("bthkv,bthk,bth->bthv", states, key, after["blocks.0.mixer.log_decay"].exp())
    torch.testing.assert_close(after[name], read, rtol=1e-9, atol=1e-12)


# States


def test_patched_state_continues_from_another_run():
    model, x, other = build(), tokens(), tokens(seed=1)
    _, source = model.run_with_cache(other)
    patch = source.state(0, 4)[:, 0]
    logits, cache = model.run_with_cache(x, hooks=[patch_state(0, 4, patch)])
    plain = model(x)
    torch.testing.assert_close(logits[:, :5], plain[:, :5], rtol=1e-10, atol=1e-12)
    assert (logits[:, 5:] - plain[:, 5:]).abs().amax((0, 2)).min() > 1e-8
    assert torch.equal(cache.state(0, 4)[:, 0], patch)
    # The same by hand: the layer's cache with its state exchanged.
    _, before = model(x[:, :5], use_cache=True)
    _, there = model(other[:, :5], use_cache=True)
    mixed = (before[0]._replace(state=there[0].state), before[1])
    torch.testing.assert_close(logits[:, 5:], model(x[:, 5:], mixed), rtol=1e-10, atol=1e-12)


def test_own_state_put_back_changes_nothing_and_edits_compose():
    model, x = build(), tokens()
    _, cache = model.run_with_cache(x)
    back = [patch_state(layer, p, cache.state(layer, p)[:, 0]) for layer in range(2) for p in (0, 3, 8)]
    torch.testing.assert_close(model.run_with_hooks(x, back), model(x), rtol=1e-10, atol=1e-12)
    name = "blocks.0.mixer.state"
    halves = [(name, at(3, lambda s, *, hook: s / 2)), (name, at(-6, lambda s, *, hook: s + 1))]
    _, after = model.run_with_cache(x, hooks=halves)
    torch.testing.assert_close(after.state(0, 3), cache.state(0, 3) / 2 + 1)
    torch.testing.assert_close(after.state(0, 8), after[name])


def test_final_state_edit_reaches_the_cache_that_continues():
    model, x = build(), tokens()
    _, cache = model.run_with_hooks(x, [("blocks.0.mixer.state", lambda s, *, hook: 0 * s)], use_cache=True)
    assert not cache[0].state.any()
    assert cache[1].state.any()


def test_positions_outside_and_positions_elsewhere_are_refused():
    model, x = build(), tokens()
    with pytest.raises(ValueError, match=r"blocks.0.mixer.state: expected positions in \[-9, 9\), came 9"):
        model.run_with_hooks(x, [("blocks.0.mixer.state", at(9, lambda s, *, hook: s))])
    with pytest.raises(ValueError, match=r"expected a state for at\(...\), came 'embed'"):
        model.run_with_hooks(x, [("embed", at(1, lambda s, *, hook: s))])
