"""Launches without the work that Triton repeats before every launch, most of a small scan's time in eager
mode.

The first launch goes through Triton, which returns the compiled kernel; later ones with the same key hand
their arguments to it. The key must tell apart whatever Triton would compile apart: the caller names
dtypes, constants and each integer that the kernel specialises on; devices and 16-byte alignment are seen
to here.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
import triton
from torch import Tensor

_compiled: dict[Hashable, Any] = {}


def evenly(x: Tensor) -> Tensor:
    """x [B, T, ...] with its B * T tokens `stride(1)` apart and the last dimension contiguous; a copy only
    where it is not so.
    """
    even = x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)
    # Not `contiguous()`, which returns x itself where the odd stride is that of a single token.
    return x if even and x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)


def launch(
    kernel: Any,
    grid: tuple[int, int],
    key: Hashable,
    arguments: tuple[Any, ...],
    constants: Mapping[str, Any],
    options: Mapping[str, Any],
) -> None:
    """kernel[grid](*arguments, **constants, **options) on the device of the first tensor of `arguments`.

    `constants` are the kernel's constexpr parameters in order, all of them behind `arguments`.
    """
    if not isinstance(kernel, triton.runtime.JITFunction):  # the interpreter
        kernel[grid](*arguments, **constants)
        return
    device = next(x for x in arguments if isinstance(x, Tensor)).device.index
    if device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return launch(kernel, grid, key, arguments, constants, options)
    aligned = not any(x.data_ptr() & 15 for x in arguments if isinstance(x, Tensor))
    known = (kernel, device, key)
    compiled = _compiled.get(known) if aligned else None
    if compiled is None:
        assert tuple(kernel.arg_names[len(arguments) :]) == tuple(constants), kernel.arg_names
        compiled = kernel[grid](*arguments, **constants, **options)
        if aligned:
            _compiled[known] = compiled
    else:
        compiled[(*grid, 1)](*arguments, *constants.values())
