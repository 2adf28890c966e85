"""What torch.func and autograd ask of every operator here: whether they look on at all, members of a vmap
folded into the batch, and an error where a gradient is differentiated again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def plain(*tensors: Tensor | None) -> bool:
    """Nothing but autograd looks at these tensors: the operator's dispatch, half of a small call, can go."""
    if torch._C._len_torch_dispatch_stack():
        return False
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    return all(x is None or (type(x) in _TENSORS and not wrapped(x)) for x in tensors)


_TENSORS = (Tensor, torch.nn.Parameter)


def fold(E: int, dims: Sequence[int | None], inputs: Sequence[Any]) -> list[Any]:
    """Arguments of one call for E members: tensors [E, B, ...] as [E * B, ...], everything else as it is."""
    folded = []
    for x, dim in zip(inputs, dims, strict=True):
        if isinstance(x, Tensor):
            x = (x.unsqueeze(0).expand(E, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)
        folded.append(x)
    return folded


def folded_call(
    run: Callable[..., Sequence[Tensor]],
    info: Any,
    dims: Sequence[int | None],
    *args: Any,
    results: int | None = None,
) -> tuple[list[Tensor], list[int | None]]:
    """The vmap rule of an operator that returns several tensors whose first dimension is the batch. Those
    behind the first `results` stay folded, for a folded backward call to read."""
    made = run(*fold(info.batch_size, dims, args))
    count = len(made) if results is None else results
    unfolded = [x.unflatten(0, (info.batch_size, -1)) for x in made[:count]]
    rest = list(made[count:])
    return [*unfolded, *rest], [0] * count + [None] * len(rest)  # type: ignore[list-item]


class _Once(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(message: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in tensors[:count])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.message = inputs[0]

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[None, ...]:
        raise RuntimeError(ctx.message)


def differentiable_once(
    message: str,
    gradients: Callable[[], Sequence[Tensor | None]],
    inputs: Sequence[Tensor | None],
) -> tuple[Tensor | None, ...]:
    """What `gradients` returns, in a backward pass; differentiated again by `inputs` it raises RuntimeError
    with the message.

    torch's own `once_differentiable` leaves inputs out of the graph: where they reach the second loss by
    another path too, autograd then returns that path's share alone and says nothing.
    """
    if not torch.is_grad_enabled():
        return tuple(gradients())
    with torch.no_grad():
        found = gradients()
    given = [g for g in found if g is not None]
    marked = iter(_Once.apply(message, len(given), *given, *(x for x in inputs if x is not None)))
    return tuple(None if g is None else next(marked) for g in found)
