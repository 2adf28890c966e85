"""Associative recall with keys and values of several tokens."""

from dataclasses import dataclass
from math import perm
from typing import ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from tasks._random import Rng
from tasks._records import Records, last_match
from tasks.base import IGNORE, Labels, register, require_int

BLANK = 0


@register
@dataclass(frozen=True)
class FuzzyRecall(Records):
    """Keys of several tokens, each with a value of several tokens, in noise; then keys (after MAD).

    A question is a key and then BLANKs; the value's tokens are asked from the key's last token on. Keys
    of a row differ, but may share tokens: only the whole key decides.

    >>> import tasks, torch
    >>> task = tasks.get("fuzzy_recall", length=13, pairs=2, queries=1, key_ids=8)
    >>> # BLANK 0, noise 1-8, key tokens 9-16, value tokens 17-32
    >>> task.solve(torch.tensor([[3, 1, 9, 12, 30, 17, 9, 13, 25, 26, 9, 12, 0]]))
    tensor([[-100, -100, -100, -100, -100, -100, -100, -100, -100, -100, -100,   30,
               17]])

    Value tokens and questions are independent and uniform.

    Parameters
    ----------
    pairs: pairs to remember.
    key_width, value_width: tokens of a key and of a value.
    key_ids, value_ids: how many token ids they draw on.
    """

    pairs: int = 6
    key_width: int = 2
    value_width: int = 2
    key_ids: int = 16
    value_ids: int = 16

    name = "fuzzy_recall"
    version = 1
    summary = "associative recall with keys and values of several tokens"
    labels: ClassVar[Labels] = {"control": ("BLANK",)}

    def __post_init__(self) -> None:
        require_int("key_width", self.key_width, 1)
        require_int("value_width", self.value_width, 1)
        require_int("value_ids", self.value_ids, 2)
        require_int("key_ids", self.key_ids, 1)
        if self.key_ids**self.key_width > 2**31:
            raise ValueError(f"key_width: expected at most 2**31 different keys, got {self.key_width}")
        require_int("pairs", self.pairs, 1, self.key_ids**self.key_width)
        super().__post_init__()

    @property
    def _records(self) -> int:
        return self.pairs

    @property
    def record_width(self) -> int:
        return self.key_width + self.value_width

    @property
    def question_width(self) -> int:
        return self.key_width + self.value_width - 1

    @property
    def roles(self) -> dict[str, int]:
        return {"control": 1, "noise": self.noise, "key": self.key_ids, "value": self.value_ids}

    @property
    def _facts(self) -> int:
        keys = perm(self.key_ids**self.key_width, self.pairs)
        return int(keys * self.value_ids ** (self.pairs * self.value_width))

    @property
    def chance(self) -> float:
        return 1 / self.value_ids

    def _fill(self, rng: Rng) -> tuple[Tensor, Tensor, Tensor]:
        K, Q, v = self.pairs, self.queries, self.value_width
        number = rng.distinct(self.key_ids**self.key_width, K)
        keys = torch.stack(
            [
                number.div(self.key_ids**j, rounding_mode="floor") % self.key_ids
                for j in range(self.key_width)
            ],
            2,
        ).add_(self._low("key"))
        values, asked = rng.below((self.value_ids,) * (K * v) + (K,) * Q).split((K * v, Q), 1)
        values = values.unflatten(1, (K, v)) + self._low("value")
        questions = torch.full((rng.n, Q, self.question_width), BLANK, device=rng.device)
        answers = torch.full_like(questions, IGNORE)
        questions[:, :, : self.key_width] = keys.gather(1, asked[:, :, None].expand(-1, -1, self.key_width))
        answers[:, :, self.key_width - 1 :] = values.gather(1, asked[:, :, None].expand(-1, -1, v))
        return torch.cat((keys, values), 2), questions, answers

    def _source(self, inputs: Int[Tensor, "n T"]) -> Int[Tensor, "n Q v"]:
        """Columns of each answer's tokens, by comparing every question with every column."""
        asked = inputs[:, self._tail :].unflatten(1, (self.queries, self.question_width))
        parts = [(asked[:, :, j], j) for j in range(self.key_width)]
        start = last_match(inputs, self._tail, parts, self.record_width)
        return start[:, :, None] + self.key_width + torch.arange(self.value_width, device=inputs.device)

    def _spread(self, inputs: Tensor, answers: Int[Tensor, "n Q v"], fill: int) -> Int[Tensor, "n T"]:
        out = torch.full_like(inputs, fill)
        tail = out[:, self._tail :].unflatten(1, (self.queries, self.question_width))
        tail[:, :, self.key_width - 1 :] = answers
        return out

    def solve(self, inputs: Int[Tensor, "n T"]) -> Int[Tensor, "n T"]:
        source = self._source(inputs)
        return self._spread(inputs, inputs.gather(1, source.flatten(1)).view_as(source), IGNORE)

    def slices(self, inputs: Int[Tensor, "n T"], targets: Int[Tensor, "n T"]) -> dict[str, Tensor]:
        return self._question_slices(inputs, targets, self._spread(inputs, self._source(inputs), 0))
