"""Recall that a gate can silence."""

from dataclasses import dataclass
from math import perm
from typing import ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from tasks._random import Rng
from tasks._records import Records, last_match
from tasks.base import IGNORE, Labels, register, require_int

ON, OFF, QUERY, NULL = 0, 1, 2, 3


@register
@dataclass(frozen=True)
class SilenceGate(Records):
    """[gate, key, value] records in noise, then [QUERY, key]; ON answers the value, OFF answers NULL (the
    paper's).

    >>> import tasks, torch
    >>> task = tasks.get("silence_gate", length=14, records=2, queries=2)
    >>> # ON 0, OFF 1, QUERY 2, NULL 3, noise 4-11, keys 12-27, values 28-43
    >>> task.solve(torch.tensor([[5, 6, 0, 12, 30, 7, 1, 20, 29, 8, 2, 12, 2, 20]]))
    tensor([[-100, -100, -100, -100, -100, -100, -100, -100, -100, -100, -100,   30,
             -100,    3]])

    A gate is ON or OFF with equal probability, so NULL is half of the answers; values are uniform.

    Parameters
    ----------
    records: records in a row, each with a key of its own.
    key_ids, value_ids: how many token ids keys and values have.
    """

    records: int = 4
    key_ids: int = 16
    value_ids: int = 16

    name = "silence_gate"
    version = 1
    summary = "recall of a value, or NULL where its gate was OFF"
    labels: ClassVar[Labels] = {"control": ("ON", "OFF", "QUERY", "NULL")}
    record_width = 3
    question_width = 2

    def __post_init__(self) -> None:
        require_int("value_ids", self.value_ids, 2)
        require_int("key_ids", self.key_ids, 1)
        require_int("records", self.records, 1, self.key_ids)
        super().__post_init__()

    @property
    def _records(self) -> int:
        return self.records

    @property
    def roles(self) -> dict[str, int]:
        return {"control": 4, "noise": self.noise, "key": self.key_ids, "value": self.value_ids}

    @property
    def _facts(self) -> int:
        return int(perm(self.key_ids, self.records) * (2 * self.value_ids) ** self.records)

    @property
    def chance(self) -> float:
        return 1 / (self.value_ids + 1)

    @property
    def majority(self) -> float:
        """Always NULL."""
        return 0.5

    def _fill(self, rng: Rng) -> tuple[Tensor, Tensor, Tensor]:
        R, Q = self.records, self.queries
        keys = rng.distinct(self.key_ids, R) + self._low("key")
        bounds = (self.value_ids,) * R + (2,) * R + (R,) * Q
        values, gates, asked = rng.below(bounds).split((R, R, Q), 1)
        values = values + self._low("value")
        key = keys.gather(1, asked)
        questions = torch.stack((torch.full_like(key, QUERY), key), 2)
        answers = torch.full_like(questions, IGNORE)
        answers[:, :, 1] = values.masked_fill(gates == OFF, NULL).gather(1, asked)
        return torch.stack((gates, keys, values), 2), questions, answers

    def _source(self, inputs: Int[Tensor, "n T"]) -> Int[Tensor, "n Q"]:
        """Columns of the values asked for, by comparing every question with every column."""
        return last_match(inputs, self._tail, [(inputs[:, self._tail + 1 :: 2], 1)], 3) + 2

    def solve(self, inputs: Int[Tensor, "n T"]) -> Int[Tensor, "n T"]:
        source = self._source(inputs)
        gate, value = inputs.gather(1, source - 2), inputs.gather(1, source)
        targets = torch.full_like(inputs, IGNORE)
        targets[:, self._tail + 1 :: 2] = value.where(gate == ON, NULL)
        return targets

    def slices(self, inputs: Int[Tensor, "n T"], targets: Int[Tensor, "n T"]) -> dict[str, Tensor]:
        """distance from the value to the question; gate: 1 where it was ON."""
        source = torch.zeros_like(inputs)
        source[:, self._tail + 1 :: 2] = self._source(inputs)
        out = self._question_slices(inputs, targets, source)
        out["gate"] = (targets != NULL).long().where(targets != IGNORE, -1)
        return out
