"""Marked blocks in noise: the frame that xor, parity and the paper's other logic tasks share.

    noise noise  o1 o2 ... ow MARK  noise noise  o1 ... ow MARK  noise ...

Scoring "dense": `blocks` blocks, one somewhere in each of as many equal stretches, and the answer is
asked at each MARK. Scoring "final": one block anywhere, and the answer is asked once, at the QUERY token
that ends the sequence. The first tokens are always noise: they are the check digits of the split, so
labels and operands are untouched by it.
"""

from dataclasses import dataclass
from math import prod
from typing import ClassVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tasks._random import Rng, arange
from tasks._splits import CheckDigits, digits_needed
from tasks.base import IGNORE, Task, require_choice, require_int

MARK, QUERY = 0, 1


@dataclass(frozen=True)
class MarkedBlocks(Task):
    """A family gives `block_width`, `answers`, `operand_ids`, `_draw` and `judge`.

    Parameters
    ----------
    length: tokens per sequence.
    vocab_size: all ids; what controls, answers and operands leave over is noise.
    scoring: "dense" or "final", see the module's docstring.
    blocks: blocks per sequence when dense (default: one per 8 tokens); 1 when final.
    """

    length: int = 64
    vocab_size: int = 32
    scoring: str = "dense"
    blocks: int | None = None

    # False where answers are operands (numbers, values) instead of tokens of their own.
    own_answers: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_int("length", self.length, 2)
        require_int("vocab_size", self.vocab_size, self.operand_low + self.operand_ids + 2)
        require_choice("scoring", self.scoring, ("dense", "final"))
        if self.blocks is not None:
            require_int("blocks", self.blocks, 1, None if self.scoring == "dense" else 1)
        if self._stretch < self.block_width + 1:
            need = self._first + self._blocks * (self.block_width + 1) + (self.scoring == "final")
            raise ValueError(
                f"length: expected at least {need} for {self._blocks} blocks of {self.block_width + 1} "
                f"tokens and {self._first} of noise before them, got {self.length}"
            )
        self._require_sequences()

    # --- what a family implements ---

    @property
    def block_width(self) -> int:
        """Operands per block."""
        raise NotImplementedError

    @property
    def operand_ids(self) -> int:
        """How many token ids operands use."""
        raise NotImplementedError

    def _draw_bounds(self) -> tuple[int, ...]:
        """Bounds of the random numbers that one block needs."""
        raise NotImplementedError

    def _draw(self, r: tuple[Int[Tensor, "n B"], ...]) -> tuple[list[Tensor], Int[Tensor, "n B"]]:
        """Operands (block_width tensors, from 0) and the answer (from 0) of each block, from its random
        numbers.
        """
        raise NotImplementedError

    def judge(self, operands: Int[Tensor, "n B w"]) -> Int[Tensor, "n B"]:
        """The answer to each block, for the oracle."""
        raise NotImplementedError

    # --- what they share ---

    @property
    def answers(self) -> int:
        """How many answers there are."""
        return 2

    @property
    def operand_low(self) -> int:
        return 2 + self.answers if self.own_answers else 2

    @property
    def answer_low(self) -> int:
        return 2

    @property
    def labels(self) -> dict[str, tuple[str, ...]]:
        return {"control": ("MARK", "QUERY"), "answer": ("NO", "YES")}

    @property
    def _noise(self) -> range:
        return range(self.operand_low + self.operand_ids, self.vocab_size)

    @property
    def vocabulary(self) -> dict[str, range]:
        out = {"control": range(2)}
        if self.own_answers:
            out["answer"] = range(2, 2 + self.answers)
        out["operand"] = range(self.operand_low, self.operand_low + self.operand_ids)
        return {**out, "noise": self._noise}

    @property
    def _first(self) -> int:
        return digits_needed(len(self._noise))

    @property
    def _blocks(self) -> int:
        if self.blocks is not None:
            return self.blocks
        return (
            max(1, (self.length - self._first) // max(8, self.block_width + 1))
            if self.scoring == "dense"
            else 1
        )

    @property
    def _stretch(self) -> int:
        return (self.length - self._first - (self.scoring == "final")) // self._blocks

    @property
    def _digits(self) -> CheckDigits:
        return CheckDigits(tuple(range(self._first)), self._noise.start, len(self._noise))

    @property
    def chance(self) -> float:
        return 1 / self.answers

    @property
    def _block_forms(self) -> int:
        """How many different blocks there are (or a lower bound)."""
        return prod(self._draw_bounds())

    @property
    def sequences(self) -> int:
        """A lower bound: the noise and the operands, wherever the blocks are."""
        noise = self.length - self._blocks * (self.block_width + 1) - (self.scoring == "final")
        return int(len(self._noise) ** noise * self._block_forms**self._blocks)

    def _rows(self, rng: Rng, split: str) -> tuple[Tensor, Tensor]:
        B, w, noise = self._blocks, self.block_width, self._noise
        per_block = (self._stretch - w, *self._draw_bounds())
        bounds = (len(noise),) * self.length + tuple(b for b in per_block for _ in range(B))
        r = rng.below(bounds)
        offset, *numbers = r[:, self.length :].unflatten(1, (len(per_block), B)).unbind(1)
        operands, answer = self._draw(tuple(numbers))

        inputs = r[:, : self.length] + noise.start
        at = offset + (arange(B, rng.device) * self._stretch + self._first)
        block = torch.stack((*(o + self.operand_low for o in operands), torch.full_like(at, MARK)), 2)
        inputs.scatter_(1, (at[:, :, None] + arange(w + 1, rng.device)).flatten(1), block.flatten(1))
        targets = torch.full_like(inputs, IGNORE)
        if self.scoring == "dense":
            targets.scatter_(1, at + w, answer + self.answer_low)
        else:
            inputs[:, -1] = QUERY
            targets[:, -1] = answer[:, 0] + self.answer_low
        return self._assign_(inputs, split, rng), targets

    def solve(self, inputs: Int[Tensor, "n T"]) -> Int[Tensor, "n T"]:
        """Look at the tokens before every MARK and judge them; when final, hand that answer to the QUERY."""
        w = self.block_width
        marks: Bool[Tensor, "n T"] = inputs == MARK
        before = torch.stack([inputs.roll(w - j, 1) for j in range(w)], 2) - self.operand_low
        answer = (self.judge(before) + self.answer_low).where(marks, IGNORE)
        if self.scoring == "dense":
            return answer
        return answer.amax(1, keepdim=True).where(inputs == QUERY, IGNORE)

    def slices(self, inputs: Int[Tensor, "n T"], targets: Int[Tensor, "n T"]) -> dict[str, Tensor]:
        """block: how many blocks came before. distance: tokens from the block's last operand to the
        question.
        """
        out = super().slices(inputs, targets)
        scored, position = targets != IGNORE, arange(inputs.shape[1], inputs.device)
        last = position.where(inputs == MARK, 0).cummax(1).values - 1
        out["block"] = (scored.cumsum(1) - 1).where(scored, -1)
        out["distance"] = (position - last).where(scored, -1)
        return out
