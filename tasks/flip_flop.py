"""A one-cell memory among distractors."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from tasks._lengths import Words
from tasks._random import Rng, arange
from tasks._splits import CheckDigits, digits_needed
from tasks.base import IGNORE, Labels, register, require_int

WRITE, SKIP, READ, BLANK = 1, 2, 3, 4


@register
@dataclass(frozen=True)
class FlipFlop(Words):
    """[WRITE v], [SKIP v] and [READ BLANK] pairs; the answer at the BLANK is the last value written.

    After the flip-flop language of Liu et al. 2023, with the answer asked for instead of printed.

    >>> import tasks, torch
    >>> task = tasks.get("flip_flop", values=2)    # WRITE 1, SKIP 2, READ 3, BLANK 4, values 5 and 6
    >>> task.solve(torch.tensor([[1, 6, 2, 5, 3, 4, 1, 5, 2, 6, 3, 4]]))
    tensor([[-100, -100, -100, -100, -100,    6, -100, -100, -100, -100, -100,    5]])

    A word begins with writes (their values are its check digits), then instructions are independent. All
    values are equally likely, so answers are balanced. With final scoring a word ends in a READ.

    Parameters
    ----------
    values: how many values the cell can hold.
    write, read: parts of 100 of the instructions that write and read; the rest is SKIP.
    """

    values: int = 2
    write: int = 20
    read: int = 20

    name = "flip_flop"
    version = 1
    summary = "last value written to a one-cell memory, among values to be skipped"
    labels: ClassVar[Labels] = {"control": ("PAD", "WRITE", "SKIP", "READ", "BLANK")}
    unit = 2

    def __post_init__(self) -> None:
        require_int("values", self.values, 2, 1 << 20)
        require_int("write", self.write, 1, 98)
        require_int("read", self.read, 1, 99 - self.write)
        super().__post_init__()

    @property
    def vocab_size(self) -> int:  # type: ignore[override]
        return 5 + self.values

    @property
    def vocabulary(self) -> dict[str, range]:
        return {"control": range(5), "value": range(5, self.vocab_size)}

    @property
    def chance(self) -> float:
        return 1 / self.values

    @property
    def _first(self) -> int:
        return digits_needed(self.values)

    @property
    def _digits(self) -> CheckDigits:
        return CheckDigits(tuple(range(1, 2 * self._first, 2)), 5, self.values)

    def _words_of(self, tokens: int) -> int:
        """A lower bound: words that never skip and end in a READ."""
        return int(self.values ** (tokens // 2 - 1)) if tokens // 2 > self._first else 0

    def _word(self, rng: Rng, width: int, tokens: Int[Tensor, "n 1"] | None) -> Int[Tensor, "n T"]:
        pairs = width // 2
        draw, value = rng.below((100,) * pairs + (self.values,) * pairs).split(pairs, 1)
        verb = 1 + (draw >= self.write).long() + (draw >= 100 - self.read)
        verb[:, : self._first] = WRITE
        if self.scoring == "final":
            last = arange(pairs, rng.device) == (width if tokens is None else tokens) // 2 - 1
            verb = verb.masked_fill(last, READ)
        return torch.stack((verb, (value + 5).masked_fill(verb == READ, BLANK)), 2).flatten(1)

    def _answers(self, inputs: Int[Tensor, "n T"]) -> Int[Tensor, "n T"]:
        verb, value = inputs[:, ::2], inputs[:, 1::2]
        last = arange(verb.shape[1], inputs.device).where(verb == WRITE, 0).cummax(1).values
        targets = torch.full_like(inputs, IGNORE)
        targets[:, 1::2] = value.gather(1, last).where(verb == READ, IGNORE)
        return targets

    def _oracle(self, inputs: Int[Tensor, "n T"]) -> Int[Tensor, "n T"]:
        """Keep the cell while reading from left to right."""
        cell = torch.full_like(inputs[:, 0], IGNORE)
        targets = torch.full_like(inputs, IGNORE)
        for t in range(0, inputs.shape[1], 2):
            cell = inputs[:, t + 1].where(inputs[:, t] == WRITE, cell)
            targets[:, t + 1] = cell.where(inputs[:, t] == READ, IGNORE)
        return targets

    def slices(self, inputs: Int[Tensor, "n T"], targets: Int[Tensor, "n T"]) -> dict[str, Tensor]:
        """distance: tokens from the value's WRITE to the READ."""
        out = super().slices(inputs, targets)
        position = arange(inputs.shape[1], inputs.device)
        at_write = position.where(inputs == WRITE, 0).cummax(1).values
        out["distance"] = (position - at_write - 1).where(targets != IGNORE, -1)
        return out
