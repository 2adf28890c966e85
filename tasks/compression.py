"""Everything through one state."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from tasks._random import Rng
from tasks._splits import CheckDigits, digits_needed
from tasks.base import IGNORE, Labels, Task, register, require_int

SQUEEZE = 0


@register
@dataclass(frozen=True)
class Compression(Task):
    """n symbols, SQUEEZE, then their places in random order; the answer at each place is its symbol.

    After MAD's compression task, which decodes all symbols from the hidden vector at the last token with a
    positional code. Here the place numbers, asked in random order, play the positional code's part: a
    recurrent model must have the whole word in its state at SQUEEZE, and cannot prepare for an order.

    >>> import tasks, torch
    >>> task = tasks.get("compression", symbols=3, symbol_ids=16)     # SQUEEZE 0, symbols 1-16, places 17-19
    >>> task.solve(torch.tensor([[5, 9, 2, 0, 18, 17, 19]]))
    tensor([[-100, -100, -100, -100,    9,    5,    2]])

    Symbols are independent and uniform; the first ones are the check digits.

    Parameters
    ----------
    symbols: n; a sequence has 2n + 1 tokens.
    symbol_ids: how many symbol ids there are.
    """

    symbols: int = 16
    symbol_ids: int = 16

    name = "compression"
    version = 1
    summary = "a whole word, asked back by place numbers in random order"
    labels: ClassVar[Labels] = {"control": ("SQUEEZE",)}

    def __post_init__(self) -> None:
        require_int("symbol_ids", self.symbol_ids, 2)
        require_int("symbols", self.symbols, digits_needed(self.symbol_ids))
        self._require_sequences()

    @property
    def length(self) -> int:  # type: ignore[override]
        return 2 * self.symbols + 1

    @property
    def vocab_size(self) -> int:  # type: ignore[override]
        return 1 + self.symbol_ids + self.symbols

    @property
    def vocabulary(self) -> dict[str, range]:
        low = 1 + self.symbol_ids
        return {"control": range(1), "symbol": range(1, low), "place": range(low, self.vocab_size)}

    @property
    def chance(self) -> float:
        return 1 / self.symbol_ids

    @property
    def _digits(self) -> CheckDigits:
        return CheckDigits(tuple(range(digits_needed(self.symbol_ids))), 1, self.symbol_ids)

    @property
    def sequences(self) -> int:
        """A lower bound: the words alone."""
        return int(self.symbol_ids**self.symbols)

    def _rows(self, rng: Rng, split: str) -> tuple[Tensor, Tensor]:
        n = self.symbols
        word = rng.below(self.symbol_ids, n).add_(1)
        place = rng.permutation(n)
        go = torch.full_like(word[:, :1], SQUEEZE)
        inputs = self._assign_(torch.cat((word, go, place + 1 + self.symbol_ids), 1), split, rng)
        targets = torch.full_like(inputs, IGNORE)
        targets[:, n + 1 :] = inputs.gather(1, place)
        return inputs, targets

    def solve(self, inputs: Int[Tensor, "n T"]) -> Int[Tensor, "n T"]:
        """For each symbol, find where its place is asked."""
        n, targets = self.symbols, torch.full_like(inputs, IGNORE)
        for j in range(n):
            asked = inputs[:, n + 1 :] == self.vocabulary["place"][j]
            targets[:, n + 1 :] = inputs[:, j : j + 1].where(asked, targets[:, n + 1 :])
        return targets

    def slices(self, inputs: Int[Tensor, "n T"], targets: Int[Tensor, "n T"]) -> dict[str, Tensor]:
        """place: which symbol is asked for."""
        out = super().slices(inputs, targets)
        out["place"] = (inputs - 1 - self.symbol_ids).where(targets != IGNORE, -1)
        return out
