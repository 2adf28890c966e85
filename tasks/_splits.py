"""Disjoint splits by construction: some tokens of a sequence are its check digits, and they decide its
split.

A family names a few columns whose tokens are free (noise, a value, the first symbols of a word). Together
they are one number d in [0, ring). The rest of the sequence is hashed to a shift in [0, ring), and
(d + shift) mod ring is the sequence's rank: the last sixteenth of the ranks (rounded down, at least one) is
the test split, as many before it are validation, the others training. The split is thus a function of the
sequence alone, no sequence has two, and a generator reaches the split it wants by choosing d: no rejection,
no table of seen sequences. Given the rest, d is uniform over the split's ranks; over the rests it is
uniform, because the shift is. A test sequence is a new sequence, not a new kind of digits.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Int
from torch import Tensor

from tasks._random import Rng, key, mix_, scale_

SPLITS = ("train", "val", "test")
_SHARE = 16


def digits_needed(base: int) -> int:
    """How many check digits of this base give every split at least one rank in sixteen."""
    if base < 2:
        raise ValueError(f"base: expected at least 2 symbols for a check digit, got {base}")
    count = 1
    while base**count < _SHARE:
        count += 1
    return count


@lru_cache(maxsize=256)
def _weights(length: int, device: torch.device) -> Int[Tensor, "T"]:
    return Rng(key("split", length), 1, device=device).words(length)[0] | 1


@dataclass(frozen=True)
class CheckDigits:
    """Columns that hold the digits, and their token ids low .. low+base-1, the least significant digit
    first.
    """

    columns: tuple[int, ...]
    low: int
    base: int

    @property
    def ring(self) -> int:
        return int(self.base ** len(self.columns))

    def ranks(self, split: str) -> tuple[int, int]:
        """First rank of the split and how many it has."""
        held = max(1, self.ring // _SHARE)
        return {
            "train": (0, self.ring - 2 * held),
            "val": (self.ring - 2 * held, held),
            "test": (self.ring - held, held),
        }[split]

    def _shift(self, inputs: Int[Tensor, "n T"], columns: Int[Tensor, "n c"] | None) -> Int[Tensor, "n"]:
        weights = _weights(inputs.shape[1], inputs.device)
        if columns is None:
            rest = inputs.clone()
            for column in self.columns:
                rest[:, column] = 0
        else:
            rest = inputs.scatter(1, columns, 0)
        # The integer product is exact, so both ways give the same number; only the CPU has the fast one.
        h = torch.mv(rest, weights) if inputs.device.type == "cpu" else (rest * weights).sum(1)
        return scale_(mix_(h), self.ring)

    def assign_(
        self,
        inputs: Int[Tensor, "n T"],
        split: str,
        rng: Rng,
        where: Tensor | None = None,
        columns: Int[Tensor, "n c"] | None = None,
    ) -> Int[Tensor, "n T"]:
        """Set the digits so that each row (of `where`, if given) belongs to the split.

        columns: where a row's digits stand, if that differs between rows; it must not depend on them.
        """
        first, count = self.ranks(split)
        d = rng.below(count)[:, 0].add_(first - self.ring).sub_(self._shift(inputs, columns))
        d = d.remainder_(self.ring)
        for j, column in enumerate(self.columns):
            token = d.remainder(self.base).add_(self.low)
            d = d.div(self.base, rounding_mode="floor")
            at = inputs[:, column] if columns is None else inputs.gather(1, columns[:, j : j + 1])[:, 0]
            token = token if where is None else torch.where(where, token, at)
            if columns is None:
                inputs[:, column] = token
            else:
                inputs.scatter_(1, columns[:, j : j + 1], token[:, None])
        return inputs

    def split_of(
        self, inputs: Int[Tensor, "n T"], columns: Int[Tensor, "n c"] | None = None
    ) -> Int[Tensor, "n"]:
        """0, 1, 2 for a train, val, test sequence."""
        digits = inputs[:, list(self.columns)] if columns is None else inputs.gather(1, columns)
        d = torch.zeros_like(inputs[:, 0])
        for j in reversed(range(len(self.columns))):
            d = d * self.base + digits[:, j] - self.low
        rank = (d + self._shift(inputs, columns)) % self.ring
        return (rank >= self.ranks("val")[0]).long() + (rank >= self.ranks("test")[0]).long()
