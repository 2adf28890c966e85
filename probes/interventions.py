"""Interventions: what a run would have done without one of its ingredients.

Those on single tensors come from prism.hooks and are gathered here; they compose in the order given,
propagate to whatever follows, and are gone when the context is left:

    with model.hooks([knock_out(layer=0, step=1, heads=[0]), freeze_gate(1, 0.5)]):
        ds = probes.update_rank(model, inputs)

`without` takes away an ingredient by name, also one that no single tensor holds (erase, convolution).
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from prism.hooks import at, freeze_gate, knock_out, patch_state, replace_step, scale_step, swap_anchor

__all__ = [
    "at",
    "freeze_gate",
    "ingredients",
    "knock_out",
    "patch_state",
    "replace_step",
    "scale_step",
    "swap_anchor",
    "without",
]


def ingredients(config: Any) -> tuple[str, ...]:
    """The names that `without` takes for a model of this configuration.

    step 1 .. step L   delta^l = 0: the step writes nothing and later steps see the residual that it would
                       have reduced
    refinement         no refinement write at all
    base write         no beta v k^T; the erase stays (where L > 0: without any write nothing is left)
    erase              S_{t-1} is decayed and never erased; all writes stay (not for raw gates)
    convolution        the taps of the short convolution on q, k, v that reach back are 0; the current token's
                       stays
    anchor convolution the same for the anchor's convolution
    mlp                the MLP adds nothing

    Of another mixer than `prism` only what is around it can be taken away.
    """
    around = ["mlp"] if config.mlp_ratio > 0 else []
    if config.mixer != "prism":
        return tuple(around)
    names = [f"step {l + 1}" for l in range(config.n_refine)] if config.n_refine > 1 else []
    names += ["refinement"] if config.n_refine else []
    names += ["base write"] if config.base_write and config.n_refine else []
    names += ["erase"] if config.erase in ("sigmoid", "two_sigmoid", "step") else []
    names += ["convolution"] if config.short_conv > 1 else []
    anchored = config.n_refine > 0 or config.source == "anchor"
    names += (
        ["anchor convolution"]
        if anchored and config.anchor == "shortconv" and config.anchor_width > 1
        else []
    )
    return (*names, *around)


@contextmanager
def without(model: Any, ingredient: str, layers: Sequence[int] | None = None) -> Iterator[Any]:
    """A model to run in the `with` block, with the weights of `model` and one ingredient less in the given
    layers (all).

    `model` itself is never changed: erase, base write and convolutions are taken from a copy.

    Raises ValueError for an ingredient that the model does not have.
    """
    config = model.config
    names = ingredients(config)
    if ingredient not in names:
        raise ValueError(f"ingredient: expected one of {', '.join(names)}, got {ingredient!r}")
    chosen = range(config.n_layers) if layers is None else [_layer(i, config.n_layers) for i in layers]
    hooks: list[Any] = []
    if ingredient.startswith("step "):
        hooks = [knock_out(i, int(ingredient.removeprefix("step ")) - 1) for i in chosen]
    elif ingredient == "refinement":
        hooks = [knock_out(i, point="write_v") for i in chosen]
    elif ingredient == "mlp":
        hooks = [(f"blocks.{i}.mlp_out", _zero) for i in chosen]
    else:
        model = copy.deepcopy(model)
        for i in chosen:
            hooks += _strip(model.blocks[i].mixer, ingredient, i)
    with model.hooks(hooks):
        yield model


def _strip(mixer: Any, ingredient: str, layer: int) -> list[Any]:
    """Takes the ingredient from a mixer in place; returns the hooks that this needs."""
    if ingredient in ("convolution", "anchor convolution"):
        weight = mixer.conv if ingredient == "convolution" else mixer.anchor.conv
        with torch.no_grad():
            weight[:, :-1] = 0
        return []
    config = mixer.config
    if ingredient == "base write":
        if config.erase == "none":  # beta gates the base write alone
            return [(f"blocks.{layer}.mixer.beta", _zero)]
        mixer.config = dataclasses.replace(config, base_write=False)
        return []
    mixer.config = dataclasses.replace(config, erase="none")
    # erase="none" gates the base write by a plain sigmoid; twice that is the gate it had.
    return (
        [(f"blocks.{layer}.mixer.beta", _double)]
        if config.erase == "two_sigmoid" and config.base_write
        else []
    )


def _zero(tensor: Tensor, *, hook: Any) -> Tensor:
    return torch.zeros_like(tensor)


def _double(tensor: Tensor, *, hook: Any) -> Tensor:
    return 2 * tensor


def _layer(i: int, n_layers: int) -> int:
    if not -n_layers <= i < n_layers:
        raise ValueError(f"layers: expected layers in -{n_layers}..{n_layers - 1}, got {i}")
    return i % n_layers
