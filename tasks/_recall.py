"""Pairs of a key and a value, then keys: what noisy_recall and filler_recall share."""

from dataclasses import dataclass
from math import perm

import torch
from jaxtyping import Int
from torch import Tensor

from tasks._random import Rng
from tasks._records import Records, last_match
from tasks.base import IGNORE, require_int


@dataclass(frozen=True)
class Recall(Records):
    """Parameters: pairs to remember; how many token ids keys and values have."""

    pairs: int = 8
    key_ids: int = 16
    value_ids: int = 16

    record_width = 2
    question_width = 1

    def __post_init__(self) -> None:
        require_int("value_ids", self.value_ids, 2)
        require_int("key_ids", self.key_ids, 1)
        require_int("pairs", self.pairs, 1, self.key_ids)
        super().__post_init__()

    @property
    def _records(self) -> int:
        return self.pairs

    @property
    def roles(self) -> dict[str, int]:
        return {"noise": self.noise, "key": self.key_ids, "value": self.value_ids}

    @property
    def _facts(self) -> int:
        return int(perm(self.key_ids, self.pairs) * self.value_ids**self.pairs)

    @property
    def chance(self) -> float:
        return 1 / self.value_ids

    def _fill(self, rng: Rng) -> tuple[Tensor, Tensor, Tensor]:
        K, Q = self.pairs, self.queries
        keys = rng.distinct(self.key_ids, K) + self._low("key")
        values, asked = rng.below((self.value_ids,) * K + (K,) * Q).split((K, Q), 1)
        values = values + self._low("value")
        questions = keys.gather(1, asked)[:, :, None]
        return torch.stack((keys, values), 2), questions, values.gather(1, asked)[:, :, None]

    def _source(self, inputs: Int[Tensor, "n T"]) -> Int[Tensor, "n Q"]:
        """Columns of the answers, by comparing every question with every column."""
        return last_match(inputs, self._tail, [(inputs[:, self._tail :], 0)], 2) + 1

    def solve(self, inputs: Int[Tensor, "n T"]) -> Int[Tensor, "n T"]:
        targets = torch.full_like(inputs, IGNORE)
        targets[:, self._tail :] = inputs.gather(1, self._source(inputs))
        return targets

    def slices(self, inputs: Int[Tensor, "n T"], targets: Int[Tensor, "n T"]) -> dict[str, Tensor]:
        source = torch.zeros_like(inputs)
        source[:, self._tail :] = self._source(inputs)
        return self._question_slices(inputs, targets, source)
