"""The skeleton: seeds, ensembles, causality, caches, saving; and attention as its other mixer."""

import copy
import json
import pickle

import pytest
import torch
from torch.func import functional_call, stack_module_state, vmap

from prism import PrismConfig, PrismModel, attention
from prism.config import PRESETS

SMALL = {"vocab_size": 13, "d_model": 8}
CONFIGS = {name: PrismConfig.preset(name, **SMALL) for name in PRESETS}
CONFIGS["attention"] = PrismConfig(mixer="attention", n_heads=2, n_value_heads=4, head_dim=5, **SMALL)
CONFIGS["bare"] = PrismConfig(mlp_ratio=0, short_conv=0, output_gate=False, tie_embeddings=True, **SMALL)


def tokens(B=2, T=11, seed=0):
    return torch.randint(13, (B, T), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", CONFIGS)
def test_shapes_causality_and_gradients(name):
    model = PrismModel(CONFIGS[name], seed=0).double()
    x = tokens()
    logits = model(x)
    assert logits.shape == (2, 11, 13)
    changed = x.clone()
    changed[:, 6:] = (changed[:, 6:] + 1) % 13
    after = model(changed)
    torch.testing.assert_close(after[:, :6], logits[:, :6], rtol=0, atol=1e-12)
    assert (after[:, 6:] != logits[:, 6:]).any(-1).all()
    logits.square().mean().backward()
    idle = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert not idle


@pytest.mark.parametrize("name", CONFIGS)
def test_the_skeleton_is_its_equations(name):
    """Pre-norm residual blocks around the mixers, with norms away from 1 and an epsilon that shows."""
    model, x = PrismModel(CONFIGS[name].replace(norm_eps=0.3), seed=0).double(), tokens()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("norm"):
                parameter += torch.arange(len(parameter)) / 7
    w = dict(model.named_parameters())

    def norm(z, weight):
        return z / (z.square().mean(-1, keepdim=True) + 0.3).sqrt() * weight

    h = w["embedding"][x]
    for i, block in enumerate(model.blocks):
        h = h + block.mixer(norm(h, w[f"blocks.{i}.norm"]))
        if CONFIGS[name].mlp_ratio:
            z = norm(h, w[f"blocks.{i}.mlp_norm"]) @ w[f"blocks.{i}.up"].T
            h = h + (z * (1 + torch.erf(z / 2**0.5)) / 2) @ w[f"blocks.{i}.down"].T
    logits = norm(h, w["norm"]) @ w["embedding" if CONFIGS[name].tie_embeddings else "head"].T
    torch.testing.assert_close(model(x), logits, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", CONFIGS)
def test_initial_scale(name):
    """Embedding N(0, 1), N(0, 1 / d) where tied; matrices uniform within 1 / sqrt(fan in)."""
    tied = CONFIGS[name].tie_embeddings
    model = PrismModel(CONFIGS[name].replace(vocab_size=3000), seed=0)
    assert abs(float(model.embedding.detach().std()) * (8**0.5 if tied else 1) - 1) < 0.05
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith(("head", "up", "down", "out_proj", "in_proj", "refine.proj")):
            bound = parameter.shape[-1] ** -0.5
            assert 0.9 * bound < parameter.abs().max() <= bound, parameter_name


@pytest.mark.parametrize("name", CONFIGS)
def test_decoding_token_by_token_is_the_parallel_pass(name):
    model, x = PrismModel(CONFIGS[name], seed=0).double(), tokens()
    whole = model(x)
    parts, cache = [], None
    for t in range(4):
        logits, cache = model(x[:, t : t + 1], cache, use_cache=True)
        parts.append(logits)
    rest = model(x[:, 4:], cache)
    torch.testing.assert_close(torch.cat([*parts, rest], 1), whole, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(model(x[:, 4:], cache), rest, rtol=0, atol=0)


@pytest.mark.parametrize("name", CONFIGS)
def test_state_size_is_what_a_cache_holds(name):
    model = PrismModel(CONFIGS[name], seed=0)
    _, cache = model(tokens(B=1), use_cache=True)
    state, tails = model.state_size()
    if name == "attention":
        assert (state, tails) == (0, 0)
        return
    assert state == sum(layer.state.numel() for layer in cache)
    assert tails == sum(t.numel() for layer in cache for t in (layer.conv, layer.anchor) if t is not None)


def test_number_of_parameters():
    for config in CONFIGS.values():
        model = PrismModel(config, seed=0)
        assert model.num_parameters() == sum(t.numel() for t in model.state_dict().values())
    tied, untied = (PrismModel(PrismConfig(tie_embeddings=tie, **SMALL), seed=0) for tie in (True, False))
    assert untied.num_parameters() - tied.num_parameters() == 13 * 8


def test_initial_values_are_a_function_of_the_seed_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = PrismModel(CONFIGS["prism"], seed=5)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    second, third = PrismModel(CONFIGS["prism"], seed=5), PrismModel(CONFIGS["prism"], seed=6)
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, second.get_parameter(name))
    assert not torch.equal(first.embedding, third.embedding)
    assert not torch.equal(first.blocks[0].mixer.in_proj, first.blocks[1].mixer.in_proj)


def test_without_a_seed_the_global_generator_governs():
    torch.manual_seed(3)
    first, other = PrismModel(CONFIGS["gdn"]), PrismModel(CONFIGS["gdn"])
    torch.manual_seed(3)
    again = PrismModel(CONFIGS["gdn"])
    assert torch.equal(first.embedding, again.embedding)
    assert not torch.equal(first.embedding, other.embedding)
    with pytest.raises(ValueError, match="seed: expected an int or None, came 'a'"):
        PrismModel(CONFIGS["gdn"], seed="a")


@pytest.mark.parametrize(
    "changes",
    [
        {"n_refine": 0},
        {"n_refine": 4},
        {"activation": "identity"},
        {"anchor": "token"},
        {"gain": "one"},
        {"refine_keys": "shared"},
        {"short_conv": 0},
        {"output_gate": False},
        {"erase": "two_sigmoid"},
        {"n_layers": 3},
        {"mlp_ratio": 0},
    ],
    ids=str,
)
def test_arms_that_differ_in_one_ingredient_start_alike(changes):
    """Every value that both arms have is the same, fused rows and single steps included."""
    base = PrismModel(CONFIGS["prism"], seed=7)
    arm = PrismModel(CONFIGS["prism"].replace(**changes), seed=7)

    def values(model):
        found = {}
        for name, p in model.named_parameters():
            owner = model.get_submodule(name.rpartition(".")[0])
            if name.endswith("mixer.in_proj"):
                rows = zip(owner.rows, p.split(list(owner.rows.values())), strict=True)
                found |= {f"{name}.{n}": t for n, t in rows if t.numel()}
            elif name.endswith("refine.proj"):
                for kind, rows, steps in zip(
                    ("key", "gain", "gate"),
                    p.split(owner.sizes),
                    (owner.n_keys, owner.n_gains, None),
                    strict=True,
                ):
                    steps = owner.config.n_refine if steps is None else steps
                    if steps:
                        per_step = rows.view(owner.config.value_heads, steps, -1, p.shape[1])
                        found |= {f"{name}.{kind}.{l}": per_step[:, l] for l in range(steps)}
            else:
                found[name] = p
        return found

    mine, theirs = values(base), values(arm)
    shared = mine.keys() & theirs.keys()
    assert len(shared) >= len(theirs) / 2
    different = [name for name in shared if not torch.equal(mine[name], theirs[name])]
    assert not different


@pytest.mark.parametrize("name", CONFIGS)
def test_members_of_a_vmapped_stack_are_single_models(name):
    models = [PrismModel(CONFIGS[name], seed=i).double() for i in range(3)]
    stacked, _ = stack_module_state(models)
    x = torch.stack([tokens(seed=i) for i in range(3)])
    logits = vmap(lambda p, t: functional_call(models[0], p, (t,)))(stacked, x)
    logits.square().mean((1, 2, 3)).sum().backward()
    for i, model in enumerate(models):
        expected = model(x[i])
        torch.testing.assert_close(logits[i], expected, rtol=1e-10, atol=1e-12)
        expected.square().mean().backward()
        for parameter_name, parameter in model.named_parameters():
            mine = stacked[parameter_name].grad[i]
            torch.testing.assert_close(mine, parameter.grad, rtol=1e-9, atol=1e-12, msg=parameter_name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_and_loaded_bit_for_bit(tmp_path, dtype):
    model = PrismModel(CONFIGS["prism"], seed=1, dtype=dtype)
    model.save_pretrained(tmp_path / "model")
    assert sorted(f.name for f in (tmp_path / "model").iterdir()) == ["config.json", "model.safetensors"]
    loaded = PrismModel.from_pretrained(tmp_path / "model")
    assert loaded.config == model.config
    for name, parameter in model.named_parameters():
        other = loaded.get_parameter(name)
        assert other.dtype == dtype
        assert torch.equal(other.view(torch.uint8), parameter.view(torch.uint8))
        assert getattr(other, "_no_weight_decay", False) == getattr(parameter, "_no_weight_decay", False)
    assert torch.equal(loaded(tokens()), model(tokens()))


def test_loading_what_does_not_fit_is_refused(tmp_path):
    PrismModel(CONFIGS["gdn"], seed=0).save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, "n_refine": 2}))
    with pytest.raises(ValueError, match=r"came blocks\.0\.mixer\.anchor\.conv of shape None where \[8, 4\]"):
        PrismModel.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**fields, "n_refines": 2}))
    with pytest.raises(ValueError, match="came 'n_refines'"):
        PrismModel.from_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"expected model\.safetensors in"):
        PrismModel.from_pretrained(tmp_path)


def test_variant_keeps_weights_and_says_what_is_missing():
    model = PrismModel(CONFIGS["prism"], seed=2).double()
    same = model.variant()
    assert torch.equal(same(tokens()), model(tokens()))
    without = model.variant(erase="none")
    assert (without(tokens()) - model(tokens())).abs().max() > 1e-3
    with torch.no_grad():
        without.embedding.zero_()
    assert model.embedding.any()
    with pytest.raises(
        ValueError, match=r"variant: expected blocks\.0\.mixer\.refine\.gate_bias .* came none"
    ):
        model.variant(step_gate_bias=1.0)


def test_tokens_are_checked():
    model = PrismModel(CONFIGS["gdn"], seed=0)
    whole = torch.zeros(2, 3, dtype=torch.int64)
    for bad in (whole[0], whole.float(), whole > 0, whole[:, :0], whole[:0], [[1, 2]]):
        with pytest.raises(ValueError, match="tokens: expected integers of shape"):
            model(bad)


@pytest.mark.parametrize("name", ["prism", "attention"])
def test_caches_of_another_model_or_batch_are_refused(name):
    model = PrismModel(CONFIGS[name], seed=0)
    _, cache = model(tokens(), use_cache=True)
    with pytest.raises(ValueError, match="cache: expected one entry per layer, 2, came 1"):
        model(tokens(), cache[:1])
    with pytest.raises(ValueError, match=r"cache: expected .* = \[1, .*, came \[2, "):
        model(tokens(B=1), cache)
    other = PrismModel(CONFIGS[name].replace(n_heads=1, n_value_heads=2, head_dim=2, expand_v=1), seed=0)
    with pytest.raises(ValueError, match=r"cache: expected .* = \[2, .*, came \[2, "):
        other(tokens(), cache)


@pytest.mark.parametrize("preset", PRESETS)
def test_copies_and_pickles_are_whole_and_independent(preset):
    model, x = PrismModel(CONFIGS[preset], seed=0), tokens()
    exempt = {n for n, p in model.named_parameters() if getattr(p, "_no_weight_decay", False)}
    assert {n.rpartition(".")[2] for n in exempt} == {
        "gdn": {"A_log", "dt_bias"},
        "prism": {"A_log", "dt_bias"},
        "paper": set(),
        "closed_form": {"A_log", "dt_bias", "gate_bias"},
    }[preset]
    expected = model(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), expected)
        assert {n for n, p in other.named_parameters() if getattr(p, "_no_weight_decay", False)} == exempt
        with other.hooks([("blocks.*.mixer.v", lambda t, *, hook: 0 * t)]):
            assert torch.equal(model(x), expected)
            assert not torch.equal(other(x), expected)
        with torch.no_grad():
            other.embedding.zero_()
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize("name", CONFIGS)
def test_members_may_share_all_parameters_but_one(name):
    """vmap of functional_call with in_dims None for what is shared, and gradients on that one alone."""
    first, second = (PrismModel(CONFIGS[name], seed=i).double() for i in range(2))
    x, shared = tokens(), {n: p.detach() for n, p in first.named_parameters()}
    for own, value in shared.items():
        stacked = torch.stack([value, second.get_parameter(own).detach()]).requires_grad_()
        in_dims = ({n: 0 if n == own else None for n in shared},)
        logits = vmap(lambda p: functional_call(first, p, (x,)), in_dims)({**shared, own: stacked})
        mixed = {**shared, own: stacked[1]}
        expected = functional_call(first, mixed, (x,))
        torch.testing.assert_close(logits[1], expected, rtol=1e-10, atol=1e-12)
        (got,) = torch.autograd.grad(logits[1].square().sum(), stacked)
        (want,) = torch.autograd.grad(expected.square().sum(), stacked)
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


def test_attention_is_its_equations():
    """One token and one value head at a time; rotations as products of complex numbers."""
    model = PrismModel(CONFIGS["attention"], seed=0).double()
    mixer, x = model.blocks[0].mixer, torch.randn(1, 7, 8, dtype=torch.float64)
    q, k, v = (mixer.in_proj @ x[0].T).T.split(list(mixer.rows.values()), 1)
    q, k, v = q.view(7, 2, 5), k.view(7, 2, 5), v.view(7, 4, 5)
    rate = attention.ROTARY_BASE ** (-torch.arange(2, dtype=torch.float64) / 2)

    def rotated(z, t):
        turned = torch.complex(z[:2], z[2:4]) * torch.exp(1j * t * rate)
        return torch.cat([turned.real, turned.imag, z[4:]])

    for t in range(7):
        heads = []
        for j in range(4):
            query = rotated(q[t, j // 2], t)
            weights = torch.stack([(query @ rotated(k[s, j // 2], s) / 5**0.5).exp() for s in range(t + 1)])
            heads.append((weights / weights.sum()) @ v[: t + 1, j])
        torch.testing.assert_close(mixer(x)[0, t], mixer.out_proj @ torch.cat(heads), rtol=1e-5, atol=1e-6)


def test_attention_fused_and_explicit_agree(monkeypatch):
    model, x = PrismModel(CONFIGS["attention"], seed=0).double(), tokens()
    explicit = model(x)
    _, cache = model(x[:, :5], use_cache=True)
    continued = model(x[:, 5:], cache)
    monkeypatch.setattr(attention, "EXPLICIT_LENGTH", 0)
    torch.testing.assert_close(model(x), explicit, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(model(x[:, 5:], cache), continued, rtol=1e-10, atol=1e-12)


def test_rotation_depends_on_distance_only():
    q, k = torch.randn(2, 1, 1, 1, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    scores = [(attention.rotate(q, 3 + s) * attention.rotate(k, s)).sum() for s in (0, 5, 90)]
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(scores[0], scores[2], rtol=1e-5, atol=1e-6)
    assert abs(scores[0] - (attention.rotate(q, 4) * attention.rotate(k, 0)).sum()) > 1e-3
