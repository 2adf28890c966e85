"""The named tensors of one module, and the functions attached to them while someone looks or intervenes.

A module asks `points.active` (an attribute look-up and a truth value) and does nothing else when nothing is
attached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Hook:
    """Handed to every attached function as `hook`: where it is."""

    name: str
    """Full dotted name, e.g. "blocks.0.mixer.delta"."""
    layer: int | None
    """Index of the block, None outside blocks."""


class Pinned(NamedTuple):
    """A function may return this instead of a tensor: `values` where `mask` is true, the rest left alone.

    In the refinement it also fixes elements whose new value equals the old one, which a plain tensor does
    not.
    """

    values: Tensor
    mask: Tensor


@dataclass
class Attached:
    """One function at one point.

    kind: "edit" may replace the tensor; "read" sees the final one; "backward" its gradient; "factors", at a
    state, what the scan was given.
    """

    name: str
    kind: str
    function: Callable[..., Any]
    position: int | None = None
    """For edits of a state: the token after which the state is replaced; None: after the last."""


class HookPoints:
    """Points of one module: short names, and what is attached to each.

    `edit` runs the edits of a point in the order of attachment and returns the tensor to go on with; `read`
    shows the final tensor to the readers. A module calls `edit` where the tensor is made and `read` where
    it can no longer change.
    """

    def __init__(self, *names: str) -> None:
        self.names = names
        self.prefix = ""
        self.layer: int | None = None
        self.attached: list[Attached] = []

    @property
    def active(self) -> bool:
        if not self.attached:
            return False
        if torch.compiler.is_compiling():
            raise RuntimeError("hooks do not fire inside a compiled graph; run the model that was compiled")
        return True

    def hook(self, name: str) -> Hook:
        return Hook(self.prefix + name, self.layer)

    def of(self, name: str, *kinds: str) -> Iterator[Attached]:
        return (item for item in self.attached if item.name == name and item.kind in kinds)

    def wants(self, *names: str) -> bool:
        return any(item.name in names for item in self.attached)

    def edit(self, name: str, tensor: Tensor) -> Tensor:
        for item in self.of(name, "edit"):
            tensor = self.replace(item, tensor)
        return tensor

    def replace(self, item: Attached, tensor: Tensor) -> Tensor:
        made = self.apply(item, tensor)
        return torch.where(made.mask, made.values, tensor) if isinstance(made, Pinned) else made

    def apply(self, item: Attached, tensor: Tensor) -> Tensor | Pinned:
        """What the function makes of the tensor: its return value, or its in-place edits of a private copy.

        The tensor itself where the function leaves it alone.
        """
        given = tensor.clone()
        version = given._version
        made = item.function(given, hook=self.hook(item.name))
        if made is None:
            return given if given._version != version else tensor
        where = f"hook at {self.prefix}{item.name}"
        if isinstance(made, Pinned):
            mask = torch.as_tensor(made.mask, dtype=torch.bool, device=tensor.device).expand_as(tensor)
            return Pinned(torch.as_tensor(made.values).to(tensor).expand_as(tensor), mask)
        if not isinstance(made, Tensor):
            raise ValueError(
                f"{where}: expected a tensor or None from the function, came {type(made).__name__}"
            )
        if made.shape != tensor.shape:
            raise ValueError(
                f"{where}: expected a tensor of shape {list(tensor.shape)}, came {list(made.shape)}"
            )
        return made.to(tensor)

    def read(self, name: str, tensor: Tensor) -> None:
        for item in self.of(name, "read"):
            item.function(tensor, hook=self.hook(name))
        for item in self.of(name, "backward"):
            on_gradient(tensor, item.function, self.hook(name))

    def fire(self, name: str, tensor: Tensor) -> Tensor:
        """`edit` and `read` at once, for a tensor that nothing later in the module can change."""
        tensor = self.edit(name, tensor)
        self.read(name, tensor)
        return tensor


def on_gradient(tensor: Tensor, function: Callable[..., Any], hook: Hook) -> None:
    """Calls function(gradient, hook=hook) in the backward pass; what it returns, if anything, goes
    upstream.
    """
    if not tensor.requires_grad:
        raise RuntimeError(
            f"backward hook at {hook.name}: the tensor has no gradient (no_grad, or frozen parameters)"
        )

    def call(gradient: Tensor) -> Tensor | None:
        made = function(gradient.clone(), hook=hook)
        if made is not None and made.shape != gradient.shape:
            shapes = f"expected a gradient of shape {list(gradient.shape)}, came {list(made.shape)}"
            raise ValueError(f"backward hook at {hook.name}: {shapes}")
        return made

    tensor.register_hook(call)


def on_gradients(steps: tuple[Tensor, ...], function: Callable[..., Any], hook: Hook) -> None:
    """As `on_gradient` for a chain of steps: the total gradient of each, stacked at dimension 3, in one call.

    The gradient of a step contains that of the later ones, so that a stack comes too late to be replaced.
    """
    seen: dict[int, Tensor] = {}

    def gather(step: int, gradient: Tensor) -> None:
        seen[step] = gradient.clone()
        if step == 0:
            parts = [seen.get(l, torch.zeros_like(gradient)) for l in range(len(steps))]
            seen.clear()
            if function(torch.stack(parts, 3), hook=hook) is not None:
                raise ValueError(
                    f"backward hook at {hook.name}: expected None (it can only read), came a value"
                )

    # Step 0 last: where the steps are one tensor, its hooks run in the order of registration.
    for l, tensor in reversed(list(enumerate(steps))):
        if tensor.requires_grad:
            tensor.register_hook(partial(gather, l))
        elif l == 0:
            raise RuntimeError(f"backward hook at {hook.name}: the tensor has no gradient")
