"""Last in, first out."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from tasks._lengths import PAD, Words
from tasks._random import Rng, arange, sort_
from tasks._splits import CheckDigits, digits_needed
from tasks.base import IGNORE, Labels, register, require_int

POP = 1


@register
@dataclass(frozen=True)
class Stack(Words):
    """A symbol is pushed, POP takes the top one off; the answer at every POP is the symbol taken off.

    >>> import tasks, torch
    >>> task = tasks.get("stack")                        # PAD 0, POP 1, symbols 2-9
    >>> task.solve(torch.tensor([[4, 7, 1, 9, 1, 1]]))
    tensor([[-100, -100,    7, -100,    9,    4]])

    The depth is the absolute value of a symmetric random walk: an empty stack is always pushed to, else
    push and POP are equally likely. Words begin with pushes, whose symbols are the check digits. Symbols
    are independent and uniform, so answers are balanced. There is no final scoring: a word may end in a
    push.

    Parameters
    ----------
    symbols: how many symbol ids there are.
    """

    symbols: int = 8

    name = "stack"
    version = 1
    summary = "the symbol that a POP takes off a stack"
    labels: ClassVar[Labels] = {"control": ("PAD", "POP")}

    def __post_init__(self) -> None:
        require_int("symbols", self.symbols, 2)
        if self.scoring != "dense":
            raise ValueError(f"scoring: expected 'dense' for stack, got {self.scoring!r}")
        super().__post_init__()

    @property
    def vocab_size(self) -> int:  # type: ignore[override]
        return 2 + self.symbols

    @property
    def vocabulary(self) -> dict[str, range]:
        return {"control": range(2), "symbol": range(2, self.vocab_size)}

    @property
    def chance(self) -> float:
        return 1 / self.symbols

    @property
    def _first(self) -> int:
        return digits_needed(self.symbols)

    @property
    def _digits(self) -> CheckDigits:
        return CheckDigits(tuple(range(self._first)), 2, self.symbols)

    def _words_of(self, tokens: int) -> int:
        """A lower bound: pushes only, and one POP."""
        return int(self.symbols ** (tokens - 1)) if tokens > self._first else 0

    def _word(self, rng: Rng, width: int, tokens: Int[Tensor, "n 1"] | None) -> Int[Tensor, "n T"]:
        step, symbol = rng.below((2,) * width + (self.symbols,) * width).split(width, 1)
        walk = 2 * step - 1
        walk[:, : self._first] = 1
        depth = walk.cumsum(1).abs_()
        pops = torch.zeros_like(walk, dtype=torch.bool)
        pops[:, 1:] = depth[:, 1:] < depth[:, :-1]
        return (symbol + 2).masked_fill_(pops, POP)

    def _answers(self, inputs: Int[Tensor, "n T"]) -> Int[Tensor, "n T"]:
        # Sorted by level and time, pushes to a level and POPs from it alternate: a POP follows its push.
        width, pops = inputs.shape[1], inputs == POP
        level = (1 - 2 * pops.long()).cumsum(1) + pops.long()
        key = level.masked_fill_(inputs == PAD, width + 1) << 32
        order = sort_(key | arange(width, inputs.device)) & 0xFFFFFFFF
        symbol = inputs.gather(1, order)
        before = symbol.roll(1, 1).where(symbol == POP, IGNORE)
        return torch.empty_like(inputs).scatter_(1, order, before)

    def _oracle(self, inputs: Int[Tensor, "n T"]) -> Int[Tensor, "n T"]:
        """Work the stack from left to right."""
        stack = torch.zeros_like(inputs)
        depth = torch.zeros_like(inputs[:, :1])
        targets = torch.full_like(inputs, IGNORE)
        for t in range(inputs.shape[1]):
            token = inputs[:, t : t + 1]
            depth = depth - (token == POP).long()
            at = depth.clamp(0)
            targets[:, t : t + 1] = stack.gather(1, at).where(token == POP, IGNORE)
            stack.scatter_(1, at, token.where(token > POP, stack.gather(1, at)))
            depth = depth + (token > POP).long()
        return targets

    def slices(self, inputs: Int[Tensor, "n T"], targets: Int[Tensor, "n T"]) -> dict[str, Tensor]:
        """depth: symbols on the stack before the POP."""
        out = super().slices(inputs, targets)
        pops = inputs == POP
        depth = (inputs > POP).cumsum(1) - pops.cumsum(1) + 1
        out["depth"] = depth.where(targets != IGNORE, -1)
        return out
