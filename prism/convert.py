"""Gated DeltaNet layers of other libraries as L = 0 mixers, and back: the same outputs from the same weights.

Sources: fla 0.6 `fla.layers.GatedDeltaNet`; transformers 5.24 `Qwen3NextGatedDeltaNet`. Neither library is
imported: a module is read by its attributes. H, HV, K, V, G = HV / H: key heads, value heads, their widths,
heads per group.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from prism.config import PrismConfig
from prism.mixer import PrismMixer

_PROJECTIONS = {
    "q": "q_proj",
    "k": "k_proj",
    "v": "v_proj",
    "gate": "g_proj",
    "beta": "b_proj",
    "decay": "a_proj",
}


def from_fla(module: nn.Module) -> PrismMixer:
    """An L = 0 mixer with the weights, dtype and device of an fla `GatedDeltaNet`.

    Raises:
        ValueError: another module, or an option that Gated DeltaNet's equations here do not have
            (convolution bias, sigmoid output gate).
    """
    get = _Reader("from_fla", "fla's GatedDeltaNet", module)
    use_gate, use_conv = get("use_gate"), get("use_short_conv")
    if use_conv and any(getattr(get(f"{name}_conv1d"), "bias", None) is not None for name in "qkv"):
        get.fail("convolutions without bias", "conv_bias=True")
    if use_gate and getattr(get("o_norm"), "activation", "swish") not in ("swish", "silu"):
        get.fail("output_gate_activation swish", repr(get("o_norm").activation))
    config = PrismConfig(
        vocab_size=1,
        d_model=get("hidden_size"),
        n_heads=get("num_heads"),
        n_value_heads=get("num_v_heads"),
        head_dim=get("head_k_dim"),
        expand_v=get("head_v_dim") / get("head_k_dim"),
        n_refine=0,
        short_conv=get("conv_size") if use_conv else 0,
        erase="two_sigmoid" if get("allow_neg_eigval") else "sigmoid",
        output_gate=use_gate,
        norm_eps=get("o_norm").eps,
    )
    names = [name for name in _PROJECTIONS.values() if use_gate or name != "g_proj"]
    values = {
        "in_proj": torch.cat([get.weight(name) for name in names]),
        "A_log": get("A_log"),
        "dt_bias": get("dt_bias"),
        "norm": get.weight("o_norm"),
        "out_proj": get.weight("o_proj"),
    }
    if use_conv:
        values["conv"] = torch.cat([get.weight(f"{name}_conv1d").squeeze(1) for name in "qkv"])
    return _fill(PrismMixer(config, seed=0), values, get)


def to_fla(mixer: PrismMixer) -> dict[str, Tensor]:
    """The state_dict of an fla `GatedDeltaNet` with the same weights. Raises ValueError unless it is Gated
    DeltaNet.
    """
    _only_gated_deltanet("to_fla", mixer)
    rows = dict(zip(mixer.rows, mixer.in_proj.detach().split(list(mixer.rows.values())), strict=True))
    made = {f"{_PROJECTIONS[name]}.weight": tensor for name, tensor in rows.items() if tensor.numel()}
    made |= {"A_log": _value(mixer.A_log), "dt_bias": _value(mixer.dt_bias)}
    if mixer.conv is not None:
        channels = mixer.conv.detach().split([mixer.rows[name] for name in "qkv"])
        made |= {f"{name}_conv1d.weight": c.unsqueeze(1) for name, c in zip("qkv", channels, strict=True)}
    return {**made, "o_norm.weight": mixer.norm.detach(), "o_proj.weight": mixer.out_proj.detach()}


def from_qwen3_next(module: nn.Module) -> PrismMixer:
    """An L = 0 mixer with the weights, dtype and device of a transformers `Qwen3NextGatedDeltaNet`.

    Raises:
        ValueError: another module, or an activation other than SiLU.
    """
    get = _Reader("from_qwen3_next", "transformers' Qwen3NextGatedDeltaNet", module)
    H, HV, K, V = get("num_k_heads"), get("num_v_heads"), get("head_k_dim"), get("head_v_dim")
    if get("activation") not in ("silu", "swish"):
        get.fail("activation silu", repr(get("activation")))
    if get("conv1d").bias is not None:
        get.fail("a convolution without bias", "one with it")
    config = PrismConfig(
        vocab_size=1,
        d_model=get("hidden_size"),
        n_heads=H,
        n_value_heads=HV,
        head_dim=K,
        expand_v=V / K,
        n_refine=0,
        short_conv=get("conv_kernel_size"),
        norm_eps=get("layer_norm_epsilon"),
    )
    groups = HV // H
    qkvz = get.weight("in_proj_qkvz").unflatten(0, (H, -1)).split([K, K, groups * V, groups * V], 1)
    b, a = get.weight("in_proj_ba").unflatten(0, (H, -1)).split([groups, groups], 1)
    values = {
        "in_proj": torch.cat([part.flatten(0, 1) for part in (*qkvz, b, a)]),
        "conv": get.weight("conv1d").squeeze(1),
        "A_log": get("A_log"),
        "dt_bias": get("dt_bias"),
        "norm": get.weight("norm"),
        "out_proj": get.weight("out_proj"),
    }
    return _fill(PrismMixer(config, seed=0), values, get)


def to_qwen3_next(mixer: PrismMixer) -> dict[str, Tensor]:
    """The state_dict of a `Qwen3NextGatedDeltaNet` with the same weights.

    Raises:
        ValueError: the mixer is not Gated DeltaNet with a convolution, an output gate and beta in (0, 1).
    """
    _only_gated_deltanet("to_qwen3_next", mixer)
    config = mixer.config
    if mixer.conv is None or not config.output_gate or config.erase != "sigmoid":
        came = ", ".join(f"{n}={getattr(config, n)!r}" for n in ("short_conv", "output_gate", "erase"))
        raise ValueError(
            f"to_qwen3_next: mixer: expected short_conv > 0, output_gate=True, erase='sigmoid', came {came}"
        )
    parts = mixer.in_proj.detach().split(list(mixer.rows.values()))
    q, k, v, z, b, a = (part.unflatten(0, (config.n_heads, -1)) for part in parts)
    return {
        "in_proj_qkvz.weight": torch.cat([q, k, v, z], 1).flatten(0, 1),
        "in_proj_ba.weight": torch.cat([b, a], 1).flatten(0, 1),
        "conv1d.weight": mixer.conv.detach().unsqueeze(1),
        "dt_bias": _value(mixer.dt_bias),
        "A_log": _value(mixer.A_log),
        "norm.weight": mixer.norm.detach(),
        "out_proj.weight": mixer.out_proj.detach(),
    }


class _Reader:
    """Attributes of a foreign module, or a ValueError that says what is missing."""

    def __init__(self, where: str, expected: str, module: nn.Module) -> None:
        self.where, self.expected, self.module = where, expected, module

    def __call__(self, name: str) -> Any:
        if not hasattr(self.module, name):
            self.fail(self.expected, f"{type(self.module).__name__} without {name}")
        return getattr(self.module, name)

    def weight(self, name: str) -> Tensor:
        owner = self(name)
        if not isinstance(getattr(owner, "weight", None), Tensor):
            self.fail(self.expected, f"{type(self.module).__name__} without {name}.weight")
        return owner.weight.detach()

    def fail(self, expected: str, came: str) -> None:
        raise ValueError(f"{self.where}: module: expected {expected}, came {came}")


@torch.no_grad()
def _fill(mixer: PrismMixer, values: dict[str, Tensor], get: _Reader) -> PrismMixer:
    for name, parameter in mixer.named_parameters():
        value = values[name].detach()
        if value.shape != parameter.shape:
            get.fail(f"{name} of shape {list(parameter.shape)}", str(list(value.shape)))
        # Each keeps its own dtype: A_log and dt_bias stay float32 beside bfloat16 projections.
        parameter.data = value.clone()
    return mixer


def _only_gated_deltanet(where: str, mixer: PrismMixer) -> None:
    config = mixer.config
    base = PrismConfig(config.vocab_size)
    same = ("base_write", "decay", "qkv_activation", "qk_norm", "scale", "source")
    wrong = [name for name in same if getattr(config, name) != getattr(base, name)]
    if config.n_refine or config.erase not in ("sigmoid", "two_sigmoid"):
        wrong.append("n_refine" if config.n_refine else "erase")
    if wrong:
        came = f"{wrong[0]}={getattr(config, wrong[0])!r}"
        raise ValueError(f"{where}: mixer: expected Gated DeltaNet (preset 'gdn'), came {came}")


def _value(parameter: Tensor | None) -> Tensor:
    assert parameter is not None
    return parameter.detach()
