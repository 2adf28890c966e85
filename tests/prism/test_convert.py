"""Gated DeltaNet layers of other libraries: the same outputs and gradients from their weights."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from prism import PrismConfig, PrismMixer, convert
from prism._oracles import gated_delta_layer
from prism.verify import PEER_TOLERANCE, transformers_layer


class FlaConvolution(nn.Conv1d):
    def __init__(self, channels, width):
        super().__init__(channels, channels, width, groups=channels, bias=False)


class FlaNorm(nn.Module):
    def __init__(self, width, eps, activation="swish"):
        super().__init__()
        self.weight, self.eps, self.activation = nn.Parameter(torch.rand(width) + 0.5), eps, activation


class GatedDeltaNet(nn.Module):
    """fla 0.6's layer as far as its attributes and its state_dict go."""

    def __init__(self, d=12, H=2, HV=4, K=5, V=10, conv=True, gate=True, negative=False):
        super().__init__()
        self.hidden_size, self.num_heads, self.num_v_heads = d, H, HV
        self.head_dim = self.head_k_dim = K
        self.head_v_dim, self.conv_size = V, 4
        self.use_gate, self.use_short_conv, self.allow_neg_eigval = gate, conv, negative
        widths = {"q": H * K, "k": H * K, "v": HV * V}
        for name, rows in {**widths, "a": HV, "b": HV, **({"g": HV * V} if gate else {})}.items():
            setattr(self, f"{name}_proj", nn.Linear(d, rows, bias=False))
        self.A_log = nn.Parameter(torch.empty(HV).uniform_(0.1, 16).log())
        self.dt_bias = nn.Parameter(torch.randn(HV))
        if conv:
            for name, rows in widths.items():
                setattr(self, f"{name}_conv1d", FlaConvolution(rows, 4))
        self.o_norm, self.o_proj = FlaNorm(V, 1e-5), nn.Linear(HV * V, d, bias=False)


def layer(**changes):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return GatedDeltaNet(**changes)


def test_fla_layer_computes_the_same():
    theirs = layer().double()
    ours = convert.from_fla(theirs)
    x = torch.randn(2, 17, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y, cache = ours(x, use_cache=True)
    y_expected, state = gated_delta_layer(dict(theirs.named_parameters()), x, 2, 4, 1e-5)
    torch.testing.assert_close(y, y_expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(cache.state, state, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({}, {}),
        ({"conv": False}, {"short_conv": 0}),
        ({"gate": False}, {"output_gate": False}),
        ({"negative": True}, {"erase": "two_sigmoid"}),
        ({"H": 4, "V": 5}, {"n_heads": 4, "expand_v": 1.0}),
    ],
)
def test_fla_round_trip_and_options(changes, fields):
    theirs = layer(**changes)
    ours = convert.from_fla(theirs)
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())
    back = convert.to_fla(ours)
    assert back.keys() == theirs.state_dict().keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in theirs.state_dict().items())
    expected = {
        "vocab_size": 1,
        "d_model": 12,
        "n_heads": 2,
        "n_value_heads": 4,
        "head_dim": 5,
        "expand_v": 2.0,
    }
    assert ours.config == PrismConfig(**{**expected, "n_refine": 0, **fields})


def test_each_parameter_keeps_its_dtype():
    theirs = layer().bfloat16()
    theirs.A_log.data = theirs.A_log.data.float()
    ours = convert.from_fla(theirs)
    assert (ours.A_log.dtype, ours.in_proj.dtype) == (torch.float32, torch.bfloat16)
    assert ours.A_log._no_weight_decay
    assert ours(torch.zeros(1, 3, 12, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_weights_are_copies():
    theirs = layer()
    ours = convert.from_fla(theirs)
    before = ours.out_proj.clone()
    with torch.no_grad():
        theirs.o_proj.weight.zero_()
    assert torch.equal(ours.out_proj, before)


def test_wrong_modules_raise_clearly():
    with pytest.raises(
        ValueError, match="from_fla: module: expected fla's GatedDeltaNet, came Linear without use_gate"
    ):
        convert.from_fla(nn.Linear(2, 2))
    message = (
        "from_qwen3_next: module: expected transformers' Qwen3NextGatedDeltaNet, came Linear without num_k"
    )
    with pytest.raises(ValueError, match=message):
        convert.from_qwen3_next(nn.Linear(2, 2))
    sigmoid = layer()
    sigmoid.o_norm.activation = "sigmoid"
    with pytest.raises(ValueError, match="expected output_gate_activation swish, came 'sigmoid'"):
        convert.from_fla(sigmoid)
    biased = layer()
    biased.q_conv1d.bias = nn.Parameter(torch.zeros(10))
    with pytest.raises(ValueError, match="expected convolutions without bias, came conv_bias=True"):
        convert.from_fla(biased)
    odd = layer()
    odd.o_proj = nn.Linear(3, 3)
    with pytest.raises(ValueError, match=r"expected out_proj of shape \[12, 40\], came \[3, 3\]"):
        convert.from_fla(odd)


def test_only_gated_deltanet_goes_back():
    for changes, came in (({}, "n_refine=2"), ({"n_refine": 0, "decay": "none"}, "decay='none'")):
        mixer = PrismMixer(PrismConfig(vocab_size=1, **changes), seed=0)
        with pytest.raises(ValueError, match=f"to_fla: mixer: expected Gated DeltaNet .* came {came}"):
            convert.to_fla(mixer)
    bare = PrismMixer(PrismConfig(1, n_refine=0, short_conv=0), seed=0)
    with pytest.raises(
        ValueError, match=r"to_qwen3_next: mixer: expected short_conv > 0.*, came short_conv=0"
    ):
        convert.to_qwen3_next(bare)


@pytest.mark.parametrize("backend", ["recurrent", "chunked"])
def test_qwen3_next_outputs_state_and_gradients(backend):
    pytest.importorskip("transformers", reason="transformers is not installed")
    compared = 0
    for tensor, came, expected in transformers_layer("cpu", torch.float32, backend):
        torch.testing.assert_close(
            came, expected, rtol=0, atol=PEER_TOLERANCE, msg=lambda m, t=tensor: f"{t}: {m}"
        )
        compared += 1
    assert compared == 2 * 10  # equal and grouped heads: output, state, gradients of x and of 7 parameters


def test_qwen3_next_round_trip():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    config = transformers.Qwen3NextConfig(
        hidden_size=24, linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=8,
        linear_value_head_dim=4, num_hidden_layers=1, rms_norm_eps=1e-3,
    )  # fmt: skip
    theirs = Qwen3NextGatedDeltaNet(config, 0)
    ours = convert.from_qwen3_next(theirs)
    assert ours.config.norm_eps == 1e-3
    back = convert.to_qwen3_next(ours)
    assert back.keys() == theirs.state_dict().keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in theirs.state_dict().items())
    x = torch.randn(1, 5, 24)
    theirs.conv1d.bias = nn.Parameter(torch.zeros(theirs.conv1d.weight.shape[0]))
    with pytest.raises(ValueError, match="expected a convolution without bias"):
        convert.from_qwen3_next(theirs)
    assert F.mse_loss(ours(x), theirs(x)) < 1e-12


def test_fla_itself_where_installed():
    fla = pytest.importorskip("fla.layers", reason="fla is not installed")
    theirs = fla.GatedDeltaNet(hidden_size=32, head_dim=8, num_heads=2, num_v_heads=4, expand_v=2)
    ours = convert.from_fla(theirs)
    back = convert.to_fla(ours)
    assert all(torch.equal(back[name], tensor) for name, tensor in theirs.state_dict().items())
