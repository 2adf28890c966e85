"""Initial values that are a pure function of (seed, parameter name): the same on every device, in every arm.

Each parameter is drawn on the CPU from a generator of its own, keyed on the seed and the parameter's dotted
name. Two models that differ in one ingredient therefore start from equal values wherever they have the same
parameter, and comparisons can be paired by seed. The global generator is not touched.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn


def exempt_from_weight_decay(*parameters: nn.Parameter | None) -> None:
    """Flags parameters `_no_weight_decay`, which optimisers here look for.

    Copying a parameter loses the flag, so modules set it in `__setstate__` too (copy.deepcopy, pickle).
    """
    for parameter in parameters:
        if parameter is not None:
            parameter._no_weight_decay = True  # type: ignore[attr-defined]


class Initializer:
    """Draws float32 CPU tensors for names below `prefix`; `child` goes one level deeper."""

    def __init__(self, seed: int | None, prefix: str = "") -> None:
        if seed is None:
            # Only an unseeded model takes from the global generator, so that torch.manual_seed governs it.
            seed = int(torch.randint(0, 2**62, (), device="cpu"))
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise ValueError(f"seed: expected an int or None, came {seed!r}")
        self.seed = seed
        self.prefix = prefix

    def child(self, name: str) -> Initializer:
        return Initializer(self.seed, f"{self.prefix}{name}.")

    def _generator(self, name: str) -> torch.Generator:
        digest = hashlib.sha256(f"{self.seed}/{self.prefix}{name}".encode()).digest()
        return torch.Generator("cpu").manual_seed(int.from_bytes(digest[:4], "little"))

    def uniform(self, name: str, shape: tuple[int, ...], low: float = 0.0, high: float = 1.0) -> Tensor:
        """Uniform on [low, high)."""
        unit = torch.rand(shape, generator=self._generator(name), dtype=torch.float32, device="cpu")
        return unit * (high - low) + low

    def normal(self, name: str, shape: tuple[int, ...], std: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=self._generator(name), dtype=torch.float32, device="cpu") * std

    def linear(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """As nn.Linear and nn.Conv1d: uniform within 1 / sqrt(fan in), the fan in being the last size."""
        bound = 1 / math.sqrt(shape[-1])
        return self.uniform(name, shape, -bound, bound)
