"""Reading and intervening, in the manner that users of TransformerLens know.

    logits, cache = model.run_with_cache(tokens, names=["blocks.*.mixer.delta"])
    logits = model.run_with_hooks(tokens, hooks=[("blocks.0.mixer.step_gate", fn)])      # fn(tensor, *, hook)
    with model.hooks([knock_out(layer=0, step=1)]):
        logits, cache = model.run_with_cache(tokens)

Where: `model.hook_shapes(B, T)` lists every name with its shape; a name may be a glob pattern or a
predicate on names, and one that matches nothing raises with the names that are close. What: a function
returns None (or edits its tensor, a private copy, in place) or the tensor to go on with. Functions at one
name run in the order given. Everything is removed on leaving, by an exception too, and hooks of other
origin are left alone.

What follows from an edit, in a mixer:
    q, k, v, beta, log_decay   all that reads them: anchors from the state, r^1 = v - u, the scan
    anchor                     the projections and r^1
    gain, step_gate            the chain from that step on; its writes
    residual                   r^l: delta^l and all later steps
    delta                      delta^l: its write, r^{l+1} and all later steps
    write_k, write_v           the scan only (and its erase where erase="step")
    state                      the reads of later tokens (`at` says after which token; by default the last)
    out                        the rest of the layer
In the refinement (anchor to write_v) an edit fixes the elements whose value it changes and the others
follow from them; return `Pinned(values, mask)` to fix elements whose value stays. The functions at one
point run before those at the next in the order above; a function that must see the result of all edits
belongs in a cache, which is read last. With a serial anchor, or `swap_anchor`, later tokens' anchors follow
too.

States are not stored for every token: a cache keeps the scan's inputs and computes any state again from them.

Compiled models: with torch.compile(model), the parts with hooks leave the graph and the hooks fire, or, with
fullgraph=True, the call is refused; a model or block compiled in place refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from prism._activations import MAX_BYTES, ActivationCache, near, replay_state
from prism._hookpoints import Attached, Hook, HookPoints, Pinned
from prism.mixer import ScanFactors

__all__ = [
    "ActivationCache",
    "Hook",
    "Hooked",
    "Pinned",
    "at",
    "freeze_gate",
    "knock_out",
    "patch_state",
    "replace_step",
    "replay_state",
    "scale_step",
    "swap_anchor",
]

WIDE = ("log_decay", "initial_state")
"""Kept in float32 at least, whatever the dtype of the model."""
Where = str | Callable[[str], bool]
Function = Callable[..., Any]
Intervention = tuple[Where, Function]


class _AtPosition(NamedTuple):
    position: int
    function: Function

    def __call__(self, tensor: Tensor, *, hook: Hook) -> Any:
        return self.function(tensor, hook=hook)


class _TrueRead:
    def __call__(self, tensor: Tensor, *, hook: Hook) -> None:
        raise AssertionError("the mixer swaps the anchor itself")


class Hooked(nn.Module):
    """What `PrismModel` inherits: names, caches and hooks over every submodule that has `points`."""

    def _owners(self) -> list[Any]:
        return [
            module for module in self.modules() if isinstance(getattr(module, "points", None), HookPoints)
        ]

    def _points(self) -> dict[str, tuple[HookPoints, str]]:
        return {m.points.prefix + name: (m.points, name) for m in self._owners() for name in m.points.names}

    def hook_shapes(self, B: int, T: int) -> dict[str, tuple[int, ...]]:
        """Every name with the shape it would have for tokens [B, T], without running (a state: one
        position).
        """
        shapes: dict[str, tuple[int, ...]] = {}
        for module in self._owners():
            shapes |= {
                module.points.prefix + name: shape for name, shape in module.point_shapes(B, T).items()
            }
        return shapes

    def match_hooks(self, where: Where | Sequence[Where] | None) -> list[str]:
        """Names that a name, glob pattern, predicate or a list of these stands for; None: all.

        Raises:
            ValueError: one of them matches nothing; the message lists close names.
        """
        names = list(self._points())
        if where is None:
            return names
        found: list[str] = []
        for one in [where] if isinstance(where, str) or callable(where) else where:
            if isinstance(one, str):
                matches = [name for name in names if fnmatchcase(name, one)]
                if not matches:
                    raise ValueError(
                        f"hooks: expected a hook point's name or pattern, came {one!r}{near(one, names)}"
                    )
            elif callable(one):
                matches = [name for name in names if one(name)]
                if not matches:
                    raise ValueError(
                        f"hooks: expected a predicate that is true for some name, came {one!r}, true for none"
                    )
            else:
                raise ValueError(f"hooks: expected a name, a pattern or a predicate, came {one!r}")
            found += [name for name in matches if name not in found]
        return found

    def estimate_cache_bytes(
        self,
        shape: tuple[int, int],
        names: Where | Sequence[Where] | None = None,
        positions: Sequence[int] | None = None,
    ) -> int:
        """Bytes that `run_with_cache` on tokens of that shape [B, T] would hold, factors for `state`
        included (under autocast no more than these).
        """
        dtype = next(self.parameters()).dtype
        wide = torch.promote_types(dtype, torch.float32)
        wanted = set(self.match_hooks(names))
        total = 0
        for module in self._owners():
            prefix, shapes = module.points.prefix, module.point_shapes(*shape)
            kept = {name: s for name, s in shapes.items() if prefix + name in wanted}
            states = _numel(kept.pop("state", (0,))) * (1 if positions is None else len(positions))
            sizes = [(name, _numel(s)) for name, s in kept.items()]
            if states:
                sizes += [(name, _numel(s)) for name, s in module.factor_shapes(*shape).items()]
            total += states * wide.itemsize
            total += sum(n * (wide if name in WIDE else dtype).itemsize for name, n in sizes)
        return total

    @contextmanager
    def hooks(
        self, hooks: Sequence[Intervention] = (), bwd_hooks: Sequence[Intervention] = ()
    ) -> Iterator[Hooked]:
        """Attaches functions to points while the context lasts.

        hooks: (name, fn) with fn(tensor, *, hook); bwd_hooks: the same with the gradient at that point,
        which a returned tensor replaces (gradients at `residual` and `delta` are total ones, stacked, and
        can only be read).

        Raises:
            ValueError: a name that matches nothing, or a function where it cannot act.
            RuntimeError: the model, or a part of it, was compiled in place and could skip hooks.
        """
        made = [item for where, fn in hooks for item in self._attach(where, fn, "edit")]
        made += [item for where, fn in bwd_hooks for item in self._attach(where, fn, "backward")]
        with self._attached(made):
            yield self

    def _attach(self, where: Where, function: Function, kind: str) -> list[tuple[HookPoints, Attached]]:
        points = self._points()
        position = None
        if isinstance(function, _AtPosition):
            position, function = function
        if not callable(function):
            raise ValueError(f"hooks: expected a function for {where!r}, came {function!r}")
        made = []
        for name in self.match_hooks(where):
            owner, short = points[name]
            if short != "state" and position is not None:
                raise ValueError(f"hooks: expected a state for at(...), came {name!r}")
            if short == "state" and kind == "backward":
                raise ValueError(
                    f"bwd_hooks: expected a point with a gradient, came {name!r}, which only reads the state"
                )
            if isinstance(function, _TrueRead):
                if kind != "edit" or short != "anchor":
                    raise ValueError(f"hooks: expected an anchor for swap_anchor, came {name!r}")
                made.append((owner, Attached(short, "true_read", function)))
            else:
                made.append((owner, Attached(short, kind, function, position)))
        return made

    @contextmanager
    def _attached(self, items: Sequence[tuple[HookPoints, Attached]]) -> Iterator[None]:
        for name, module in self.named_modules():
            if getattr(module, "_compiled_call_impl", None) is not None:
                raise RuntimeError(f"hooks: {name or 'the model'} was compiled in place and could skip them")
        try:
            for owner, item in items:
                owner.attached.append(item)
            yield
        finally:
            for owner, item in items:
                owner.attached[:] = [other for other in owner.attached if other is not item]

    def run_with_hooks(
        self,
        tokens: Int[Tensor, "B T"],
        hooks: Sequence[Intervention] = (),
        bwd_hooks: Sequence[Intervention] = (),
        **kw: Any,
    ) -> Any:
        """What `self(tokens, **kw)` returns with the functions attached (see `hooks`).

        Backward hooks fire in a backward pass after this call too: they belong to this run's graph.
        """
        with self.hooks(hooks, bwd_hooks):
            return self(tokens, **kw)

    def run_with_cache(
        self,
        tokens: Int[Tensor, "B T"],
        names: Where | Sequence[Where] | None = None,
        *,
        hooks: Sequence[Intervention] = (),
        positions: Sequence[int] | None = None,
        max_bytes: int = MAX_BYTES,
        **kw: Any,
    ) -> tuple[Any, ActivationCache]:
        """What `self(tokens, **kw)` returns, and the tensors of the points that `names` stands for (None:
        all).

        "blocks.i.mixer.state" is the final state [B, 1, HV, K, V], or that after each token of `positions`,
        and makes the cache keep what `cache.state(i, at)` needs.

        Raises:
            ValueError: a name that matches nothing; a cache above `max_bytes`, before anything is computed.
        """
        wanted = self.match_hooks(names)
        size = self.estimate_cache_bytes((tokens.shape[0], tokens.shape[1]), wanted, positions)
        if size > max_bytes:
            raise ValueError(
                f"names: expected a cache of at most max_bytes={max_bytes}, came {len(wanted)} names "
                f"that need {size} bytes; name fewer, shorten the batch, or raise max_bytes"
            )
        cache, points = ActivationCache(), self._points()

        # Every entry is a copy of its own, factors too: editing one in place leaves the others alone.
        def copy(tensor: Tensor) -> Tensor:
            return tensor.detach().clone()

        def keep(tensor: Tensor, *, hook: Hook) -> None:
            cache._tensors[hook.name] = copy(tensor)

        def keep_factors(
            backend: str, factors: ScanFactors, patches: dict[int, Tensor], *, hook: Hook
        ) -> None:
            held = ScanFactors._make(None if f is None else copy(f) for f in factors)
            assert hook.layer is not None
            cache._scans[hook.layer] = (held, {p: copy(s) for p, s in patches.items()}, backend)
            if positions is not None:
                cache._tensors[hook.name] = cache.state(hook.layer, positions, max_bytes=max_bytes)

        readers = []
        for name in wanted:
            owner, short = points[name]
            if short != "state" or positions is None:
                readers.append((owner, Attached(short, "read", keep)))
            if short == "state":
                backend = getattr(getattr(self, "config", None), "scan_backend", "auto")
                readers.append((owner, Attached(short, "factors", partial(keep_factors, backend))))
        with self.hooks(hooks), self._attached(readers):
            result = self(tokens, **kw)
        cache._tensors = {name: cache._tensors[name] for name in wanted}
        return result, cache


def _numel(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def at(position: int, function: Function) -> Any:
    """For the name of a state: applies function(state [B, 1, HV, K, V], *, hook) after the token
    `position`.
    """
    if isinstance(position, bool) or not isinstance(position, int):
        raise ValueError(f"position: expected an int, came {position!r}")
    return _AtPosition(position, function)


def patch_state(layer: int, position: int, state: Float[Tensor, "B HV K V"]) -> Intervention:
    """Puts a state, e.g. `other_cache.state(layer, p)[:, 0]`, in place of the one after token `position`,
    and goes on.

    The read of that token itself is made before; reads of all later tokens see the patch.
    """
    return f"blocks.{layer}.mixer.state", at(
        position, lambda tensor, *, hook: _spread("state", state, tensor[:, 0]).unsqueeze(1)
    )


def _layer_name(layer: int | None, point: str) -> str:
    return f"blocks.{'*' if layer is None else layer}.mixer.{point}"


def _spread(name: str, value: Tensor | float, tensor: Tensor) -> Tensor:
    """`value` with the shape, dtype and device of the tensor that it is put in place of."""
    value = torch.as_tensor(value, dtype=tensor.dtype, device=tensor.device)
    try:
        return value.expand_as(tensor)
    except RuntimeError:
        expected, came = list(tensor.shape), list(value.shape)
        raise ValueError(f"{name}: expected a shape that broadcasts to {expected}, came {came}") from None


def _mask(tensor: Tensor, step: Any, tokens: Any, heads: Any, step_dim: int = 3) -> Tensor:
    """True at the chosen tokens, heads and steps of a tensor [B, T, HV, L, ...]; None chooses all."""
    mask = torch.ones((), dtype=torch.bool, device=tensor.device)
    for dim, chosen, what in ((1, tokens, "tokens"), (2, heads, "heads"), (step_dim, step, "step")):
        if chosen is None:
            continue
        size = tensor.shape[dim]
        index = (
            torch.arange(size, device=tensor.device)[chosen]
            if isinstance(chosen, slice)
            else torch.as_tensor(chosen)
        )
        index = index.to(tensor.device)
        if index.dtype == torch.bool:
            if index.shape != (size,):
                raise ValueError(f"{what}: expected a mask of {size}, came one of shape {list(index.shape)}")
        elif index.is_floating_point() and index.numel():
            raise ValueError(f"{what}: expected indices or a mask, came {chosen!r}")
        elif index.numel() and not (-size <= int(index.min()) and int(index.max()) < size):
            raise ValueError(f"{what}: expected indices in [{-size}, {size}), came {chosen!r}")
        line = torch.zeros(size, dtype=torch.bool, device=tensor.device)
        line[index if index.numel() else index.long()] = True
        mask = mask & line.view([-1 if d == dim else 1 for d in range(tensor.ndim)])
    return mask.expand_as(tensor)


def scale_step(
    layer: int | None,
    step: Any,
    factor: float,
    *,
    tokens: Any = None,
    heads: Any = None,
    point: str = "delta",
) -> Intervention:
    """Multiplies what refinement step(s) `step` (0-based) find by a factor at chosen tokens and value heads
    (None: all).

    point "delta": later steps see the residual that is left; "write_v": only the write changes. layer None:
    every layer.
    """
    if point not in ("delta", "write_v"):
        raise ValueError(f"point: expected delta or write_v, came {point!r}")

    def scale(tensor: Tensor, *, hook: Hook) -> Pinned:
        return Pinned(tensor * factor, _mask(tensor, step, tokens, heads))

    return _layer_name(layer, point), scale


def knock_out(
    layer: int | None = None, step: Any = None, *, tokens: Any = None, heads: Any = None, point: str = "delta"
) -> Intervention:
    """`replace_step` by 0, whatever was there (0 times infinity is no knock-out); step None: the whole
    refinement.
    """
    return replace_step(layer, step, 0.0, tokens=tokens, heads=heads, point=point)


def replace_step(
    layer: int | None,
    step: Any,
    value: Tensor | float,
    *,
    tokens: Any = None,
    heads: Any = None,
    point: str = "delta",
) -> Intervention:
    """Puts `value` (broadcast against [B, T, HV, L, V]) in place of delta or write_v, as `scale_step`
    chooses them.
    """
    if point not in ("delta", "write_v"):
        raise ValueError(f"point: expected delta or write_v, came {point!r}")

    def replace(tensor: Tensor, *, hook: Hook) -> Pinned:
        return Pinned(_spread("value", value, tensor), _mask(tensor, step, tokens, heads))

    return _layer_name(layer, point), replace


def freeze_gate(
    layer: int | None, value: Tensor | float, *, step: Any = None, tokens: Any = None, heads: Any = None
) -> Intervention:
    """Fixes step_gate [B, T, HV, L] to a number, or to the gate of another run."""

    def freeze(tensor: Tensor, *, hook: Hook) -> Pinned:
        return Pinned(_spread("value", value, tensor), _mask(tensor, step, tokens, heads))

    return _layer_name(layer, "step_gate"), freeze


def swap_anchor(layer: int | None = None) -> Intervention:
    """Puts the true read Sbar_t k_t in the anchor's place: the serial solver with the same weights (a token
    loop).
    """
    return _layer_name(layer, "anchor"), _TrueRead()
