"""A mixer on kernels against the same mixer on formulas: in Triton's interpreter, in bfloat16 on a GPU."""

from __future__ import annotations

import os

import pytest
import torch

from prism import PrismConfig, PrismModel, _fused
from prism._fused import padded_rows, split_linear
from prism.mixer import PrismMixer

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")

SMALL = {"vocab_size": 16, "d_model": 32, "n_layers": 1, "n_heads": 2}
VARIANTS = {
    "gdn": {"n_refine": 0},
    "prism": {},
    "low_rank": {"refine_rank": 8, "n_refine": 3},
    "shared_keys": {"refine_keys": "shared"},
    "base_keys_constant_gain": {"refine_keys": "base", "gain": "one", "activation": "tanh"},
    "closed_form": {
        "activation": "identity",
        "gain": "sigmoid",
        "residual_start": "value",
        "step_gate_bias": 2.0,
    },
    "kept_residual": {"residual": "keep", "step_gate": "raw"},
    "token_anchor": {"anchor": "token"},
    "no_anchor": {"anchor": "none"},
    "source_anchor": {"source": "anchor"},
    "no_convolution": {"short_conv": 0},
    "additive": {"erase": "none", "decay": "none"},
    "unnormalised": {"qk_norm": False, "qkv_activation": "identity", "scale": 0.1},
    "grouped_wide_values": {"n_value_heads": 4, "expand_v": 0.5, "head_dim": 16},
    "no_base_write": {"base_write": False, "erase": "step"},
    "bare": {"output_gate": False, "mlp_ratio": 0},
}
QUICK = (
    "prism",
    "low_rank",
    "base_keys_constant_gain",
    "unnormalised",
    "grouped_wide_values",
    "no_base_write",
)
needs_interpreter = pytest.mark.interpreter


@pytest.fixture
def fuses(monkeypatch):
    """Lets a mixer with scan_backend="triton" take its kernels in the interpreter too."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("TRITON_INTERPRET=1 is not set")
    monkeypatch.setattr(PrismMixer, "_fuses", lambda self, x: self.backend(x) == "triton")


def pair(**changes):
    """The same weights on formulas and on kernels."""
    config = PrismConfig(**SMALL | changes)
    return [PrismModel(config.replace(scan_backend=backend), seed=3) for backend in ("chunked", "triton")]


def tokens(T=7, B=2):
    return torch.randint(16, (B, T), generator=torch.Generator().manual_seed(0))


@needs_interpreter
@pytest.mark.parametrize(
    "variant", [v if v in QUICK else pytest.param(v, marks=pytest.mark.slow) for v in VARIANTS]
)
def test_outputs_and_gradients_are_those_of_the_formulas(variant, fuses):
    formulas, kernels = pair(**VARIANTS[variant])
    x = tokens()
    grads = []
    for model in (formulas, kernels):
        logits = model(x)
        grads.append(torch.autograd.grad(logits.square().sum(), list(model.parameters())))
    torch.testing.assert_close(kernels(x), formulas(x), atol=2e-5, rtol=1e-4)
    for (name, _), want, got in zip(formulas.named_parameters(), *grads, strict=True):
        assert (got - want).norm() <= 2e-4 * want.norm() + 1e-6, name


@needs_interpreter
def test_a_pass_in_two_pieces_is_one_pass(fuses):
    _, model = pair()
    x = tokens(9)
    whole = model(x)
    for cut in (2, 5):
        first, cache = model(x[:, :cut], use_cache=True)
        second, _ = model(x[:, cut:], cache, use_cache=True)
        torch.testing.assert_close(torch.cat([first, second], 1), whole, atol=2e-5, rtol=1e-4)


def gradients(model):
    model(tokens()).square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters()}


@needs_interpreter
@pytest.mark.parametrize(
    "change", [lambda m, a, out: (out[0] * 3, *out[1:]), lambda m, a, out: (out[0].detach(), *out[1:])]
)
def test_hooks_of_pytorch_change_gradients_as_in_the_formulas(change, fuses):
    models = pair()
    for model in models:
        model.blocks[0].mixer.anchor.register_forward_hook(change)
    want, got = (gradients(model) for model in models)
    for name, grad in want.items():
        assert (grad is None) == (got[name] is None), name
        if grad is not None:
            torch.testing.assert_close(got[name], grad, rtol=1e-3, atol=2e-5)


@needs_interpreter
def test_hooks_of_pytorch_see_whole_gradients(fuses):
    seen = []
    for model in pair():
        anchor = model.blocks[0].mixer.anchor
        anchor.register_full_backward_hook(lambda m, inputs, outputs: seen.append(outputs[0]))
        gradients(model)
    torch.testing.assert_close(seen[1], seen[0], rtol=1e-3, atol=2e-5)


@needs_interpreter
def test_stand_ins_that_nothing_reads_cost_nothing(fuses, monkeypatch):
    from prism.scan.triton import short_conv

    whole, given = short_conv._short_conv_backward, []
    monkeypatch.setattr(short_conv, "_short_conv_backward", lambda *a: given.append(a[1]) or whole(*a))
    gradients(pair(refine_rank=8)[1])
    assert given
    assert all(x is None for more in given for x in more)


@needs_interpreter
def test_hooks_see_and_change_what_the_formulas_have(fuses):
    formulas, kernels = pair()
    x = tokens()
    names = [f"blocks.0.mixer.{n}" for n in ("q", "k", "v", "residual", "delta", "write_v", "out")]
    _, want = formulas.run_with_cache(x, names)
    _, found = kernels.run_with_cache(x, names)
    for name in names:
        torch.testing.assert_close(found[name], want[name], atol=2e-5, rtol=1e-4)
    hook = [("blocks.0.mixer.delta", lambda delta, hook: torch.zeros_like(delta))]
    changed = [model.run_with_hooks(x, hook) for model in (formulas, kernels)]
    torch.testing.assert_close(changed[1], changed[0], atol=2e-5, rtol=1e-4)
    assert (changed[1] - kernels(x)).abs().max() > 1e-3


@needs_interpreter
def test_compiles_without_a_graph_break(fuses):
    _, model = pair()
    x = tokens()
    want = model(x)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)
    torch.testing.assert_close(compiled(x), want)


@needs_interpreter
@pytest.mark.parametrize("variant", ["gdn", "prism", "additive", "no_convolution", "low_rank"])
def test_padded_products_change_nothing(variant, fuses, monkeypatch):
    """As in half precision on a GPU, and with zeros behind every product, whose number needs none here."""

    def padded(x, weight):
        return torch.nn.functional.pad(torch.nn.functional.linear(x, weight), (0, 3))

    formulas, kernels = pair(**VARIANTS[variant])
    x = tokens()
    want = torch.autograd.grad(formulas(x).square().sum(), list(formulas.parameters()))
    for module in ("_fused", "mixer", "refinement"):
        monkeypatch.setattr(f"prism.{module}.padded_linear", padded)
    got = torch.autograd.grad(kernels(x).square().sum(), list(kernels.parameters()))
    for (name, _), w, g in zip(formulas.named_parameters(), want, got, strict=True):
        assert (g - w).norm() <= 2e-4 * w.norm() + 1e-6, name


def test_a_product_on_a_cpu_is_split_and_not_padded():
    x, weight = torch.randn(3, 8), torch.randn(5, 8)
    parts = split_linear(x, weight, (2, 3))
    assert [part.shape[-1] for part in parts] == [2, 3]
    assert _fused.padded_linear(x.bfloat16(), weight.bfloat16()).shape == (3, 5)
    assert torch.equal(torch.cat(parts, -1), torch.nn.functional.linear(x, weight))


@pytest.mark.parametrize("rows", [1, 524, 1016, 1017, 1025, 2316, 3084, 3136])
def test_inductor_leaves_the_rows_of_padded_products_where_they_are(rows):
    """Where it does not, it copies the whole product for each operator that reads it."""
    from torch._inductor.ir import Layout

    padded = padded_rows(rows)
    strides = [padded, 1]
    assert rows <= padded < rows + 64
    assert padded % 8 == 0
    assert list(Layout._pad_strides(strides, [16384, padded], torch.bfloat16)) == strides
    assert list(Layout._pad_strides([3088, 1], [16384, 3088], torch.bfloat16)) == [3136, 1]


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("autocast", [True, False])
def test_bfloat16_on_a_gpu_agrees_with_float32(variant, autocast):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    config = PrismConfig(**SMALL | VARIANTS[variant])
    x = tokens(70).cuda()
    exact = PrismModel(config.replace(scan_backend="chunked"), seed=3, device="cuda")
    model = PrismModel(config, seed=3, device="cuda", dtype=None if autocast else torch.bfloat16)
    assert model.blocks[0].mixer._fuses(torch.empty(1, 1, 32, device="cuda", dtype=torch.bfloat16))
    want = torch.autograd.grad(exact(x).square().mean(), list(exact.parameters()))
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        loss = model(x).float().square().mean()
    got = torch.autograd.grad(loss, list(model.parameters()))
    missed = sum((g.float() - w).square().sum() for g, w in zip(got, want, strict=True)).sqrt()
    assert missed < 0.05 * sum(w.square().sum() for w in want).sqrt()
