"""Associative recall where a context selects the value."""

from dataclasses import dataclass
from math import perm

import torch
from jaxtyping import Int
from torch import Tensor

from tasks._random import Rng
from tasks._records import Records, last_match
from tasks.base import IGNORE, register, require_int


@register
@dataclass(frozen=True)
class PolyRecall(Records):
    """[context, key, value] records in noise, then [context, key]; the context selects the value (the
    paper's).

    Every key of a row occurs under every context of the row, so neither is enough on its own.

    >>> import tasks, torch
    >>> task = tasks.get("poly_recall", length=14, keys=1, contexts=2, queries=2)
    >>> # noise 0-7, contexts 8-9, keys 10-25, values 26-41
    >>> task.solve(torch.tensor([[3, 1, 8, 12, 30, 2, 9, 12, 27, 5, 9, 12, 8, 12]]))
    tensor([[-100, -100, -100, -100, -100, -100, -100, -100, -100, -100, -100,   27,
             -100,   30]])

    Values and questions are independent and uniform.

    Parameters
    ----------
    keys, contexts: different keys and contexts in a row; there are keys * contexts records in random order.
    context_ids, key_ids, value_ids: how many token ids they have.
    """

    keys: int = 4
    contexts: int = 2
    context_ids: int = 2
    key_ids: int = 16
    value_ids: int = 16

    name = "poly_recall"
    version = 1
    summary = "associative recall where a context selects the value"
    record_width = 3
    question_width = 2

    def __post_init__(self) -> None:
        require_int("value_ids", self.value_ids, 2)
        require_int("context_ids", self.context_ids, 1)
        require_int("key_ids", self.key_ids, 1)
        require_int("contexts", self.contexts, 1, self.context_ids)
        require_int("keys", self.keys, 1, self.key_ids)
        super().__post_init__()

    @property
    def _records(self) -> int:
        return self.keys * self.contexts

    @property
    def roles(self) -> dict[str, int]:
        return {
            "noise": self.noise,
            "context": self.context_ids,
            "key": self.key_ids,
            "value": self.value_ids,
        }

    @property
    def _facts(self) -> int:
        return int(perm(self.key_ids, self.keys) * self.value_ids**self._records)

    @property
    def chance(self) -> float:
        return 1 / self.value_ids

    def _fill(self, rng: Rng) -> tuple[Tensor, Tensor, Tensor]:
        R, Q, C = self._records, self.queries, self.contexts
        keys = rng.distinct(self.key_ids, self.keys) + self._low("key")
        contexts = rng.distinct(self.context_ids, C) + self._low("context")
        order = rng.permutation(R)
        key = keys.gather(1, order.div(C, rounding_mode="floor"))
        context = contexts.gather(1, order.remainder(C))
        values, asked = rng.below((self.value_ids,) * R + (R,) * Q).split((R, Q), 1)
        values = values + self._low("value")
        questions = torch.stack((context.gather(1, asked), key.gather(1, asked)), 2)
        answers = torch.full_like(questions, IGNORE)
        answers[:, :, 1] = values.gather(1, asked)
        return torch.stack((context, key, values), 2), questions, answers

    def _source(self, inputs: Int[Tensor, "n T"]) -> Int[Tensor, "n Q"]:
        """Columns of the answers, by comparing every question with every column."""
        context, key = inputs[:, self._tail :: 2], inputs[:, self._tail + 1 :: 2]
        return last_match(inputs, self._tail, [(context, 0), (key, 1)], 3) + 2

    def solve(self, inputs: Int[Tensor, "n T"]) -> Int[Tensor, "n T"]:
        targets = torch.full_like(inputs, IGNORE)
        targets[:, self._tail + 1 :: 2] = inputs.gather(1, self._source(inputs))
        return targets

    def slices(self, inputs: Int[Tensor, "n T"], targets: Int[Tensor, "n T"]) -> dict[str, Tensor]:
        """distance from the record's value to the question."""
        source = torch.zeros_like(inputs)
        source[:, self._tail + 1 :: 2] = self._source(inputs)
        return self._question_slices(inputs, targets, source)
