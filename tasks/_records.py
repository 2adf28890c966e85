"""Records in noise, then questions: the frame that recall tasks share.

    noise .. record .. noise .. record .. noise | question question ...

Each record stands somewhere in one of as many equal stretches (`packed` families: one right after the
other, and the noise comes between the last record and the questions). The questions end the sequence. The
first tokens are always
noise: they are the check digits of the split, so records and answers are untouched by it.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from tasks._random import Rng, arange
from tasks._splits import CheckDigits, digits_needed
from tasks.base import IGNORE, Task, require_int


@dataclass(frozen=True)
class Records(Task):
    """A family gives `_records` (how many), `record_width`, `question_width`, `roles` and `_fill`.

    Parameters
    ----------
    length: tokens per sequence.
    queries: questions per sequence.
    noise: how many token ids fill the places between records.
    """

    length: int = 64
    queries: int = 4
    noise: int = 8

    packed: ClassVar[bool] = False
    noise_role: ClassVar[str] = "noise"

    def __post_init__(self) -> None:
        require_int("queries", self.queries, 1)
        require_int("noise", self.noise, 2)
        need = self._first + self._records * self.record_width + self.queries * self.question_width
        require_int("length", self.length, need)
        self._require_sequences()

    # --- what a family implements ---

    @property
    def _records(self) -> int:
        raise NotImplementedError

    @property
    def record_width(self) -> int:
        """Tokens per record."""
        raise NotImplementedError

    @property
    def question_width(self) -> int:
        """Tokens per question."""
        raise NotImplementedError

    @property
    def roles(self) -> dict[str, int]:
        """How many ids each role has, in order; "noise" among them."""
        raise NotImplementedError

    def _fill(self, rng: Rng) -> tuple[Int[Tensor, "n R w"], Int[Tensor, "n Q u"], Int[Tensor, "n Q u"]]:
        """Tokens of the records, of the questions, and the targets at the questions' tokens."""
        raise NotImplementedError

    @property
    def _facts(self) -> int:
        """How many different sets of records there are (or a lower bound)."""
        raise NotImplementedError

    # --- what they share ---

    @property
    def vocabulary(self) -> dict[str, range]:
        out, low = {}, 0
        for role, count in self.roles.items():
            out[role] = range(low, low + count)
            low += count
        return out

    @property
    def vocab_size(self) -> int:  # type: ignore[override]
        return sum(self.roles.values())

    def _low(self, role: str) -> int:
        return self.vocabulary[role].start

    @property
    def _first(self) -> int:
        return digits_needed(self.noise)

    @property
    def _tail(self) -> int:
        """Column of the first question."""
        return self.length - self.queries * self.question_width

    @property
    def _stretch(self) -> int:
        return self.record_width if self.packed else (self._tail - self._first) // self._records

    @property
    def _digits(self) -> CheckDigits:
        return CheckDigits(tuple(range(self._first)), self._low(self.noise_role), self.noise)

    @property
    def sequences(self) -> int:
        """A lower bound: records and noise, wherever the records are."""
        spare = self.length - self._records * self.record_width - self.queries * self.question_width
        return int(self._facts * self.noise**spare)

    def _rows(self, rng: Rng, split: str) -> tuple[Tensor, Tensor]:
        records, questions, answers = self._fill(rng)
        R, w = self._records, self.record_width
        spare = self._stretch - w + 1
        r = rng.below((self.noise,) * self._tail + (spare,) * (R if spare > 1 else 0))
        at = arange(R, rng.device) * self._stretch + self._first
        at = r[:, self._tail :] + at if spare > 1 else at.expand(rng.n, R)
        inputs = torch.cat((r[:, : self._tail] + self._low(self.noise_role), questions.flatten(1)), 1)
        columns = (at[:, :, None] + arange(w, rng.device)).flatten(1)
        inputs.scatter_(1, columns, records.flatten(1))
        targets = torch.full_like(inputs, IGNORE)
        targets[:, self._tail :] = answers.flatten(1)
        return self._assign_(inputs, split, rng), targets

    def _question_slices(
        self, inputs: Int[Tensor, "n T"], targets: Int[Tensor, "n T"], source: Int[Tensor, "n T"]
    ) -> dict[str, Tensor]:
        """position, and distance: tokens from `source` (the column that holds the answer) to the
        question.
        """
        out = super().slices(inputs, targets)
        scored, position = targets != IGNORE, arange(inputs.shape[1], inputs.device)
        out["distance"] = (position - source).where(scored, -1)
        return out


def last_match(
    inputs: Int[Tensor, "n T"], tail: int, parts: list[tuple[Tensor, int]], end: int
) -> Int[Tensor, "n S"]:
    """For each of S questions the last start column before `tail` of a record that agrees with it, or -1.

    parts: (tokens [n, S] that the question gives, offset inside the record at which they must stand).
    end: tokens of a record.
    """
    starts = tail - end + 1
    agree = torch.ones(1, dtype=torch.bool, device=inputs.device)
    for tokens, offset in parts:
        agree = agree & (inputs[:, None, offset : offset + starts] == tokens[:, :, None])
    return (arange(starts, inputs.device) + 1).where(agree, 0).amax(2) - 1
