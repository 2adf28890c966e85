"""Facts that stand in no sequence."""

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from tasks._random import Rng, key, table
from tasks._splits import CheckDigits, digits_needed
from tasks.base import IGNORE, Labels, Task, register, require_int

ASK = 0


@lru_cache(maxsize=32)
def _facts(keys: int, values: int, dictionary: int) -> tuple[int, ...]:
    """The value of each key: every value belongs to equally many keys."""
    order = Rng(key("memorization", dictionary), 1).permutation(keys)[0]
    return tuple((order % values).tolist())


@register
@dataclass(frozen=True)
class Memorization(Task):
    """Keys, each followed by ASK; the answer at ASK is the key's value in a dictionary that is never shown.

    After MAD: the model must have the dictionary in its weights. It is fixed by the parameter
    `dictionary`, the same for every seed and split; so the splits have no sequence in common, but every
    fact.

    >>> import tasks, torch
    >>> task = tasks.get("memorization", length=4, key_ids=32, value_ids=4)
    >>> # ASK 0, keys 1-32, values 33-36
    >>> sorted(task.solve(torch.tensor([[k, 0] for k in range(1, 33)]))[:, 1].bincount()[33:].tolist())
    [8, 8, 8, 8]

    Keys are independent and uniform and every value belongs to equally many keys, so answers are
    balanced. The first keys are the check digits.

    Parameters
    ----------
    length: tokens per sequence, an even number.
    key_ids: entries of the dictionary.
    value_ids: how many values there are; divides `key_ids`.
    dictionary: which dictionary.
    """

    length: int = 64
    key_ids: int = 256
    value_ids: int = 16
    dictionary: int = 0

    name = "memorization"
    version = 1
    summary = "values of keys from a fixed dictionary that is never shown"
    labels: ClassVar[Labels] = {"control": ("ASK",)}

    def __post_init__(self) -> None:
        require_int("value_ids", self.value_ids, 2)
        require_int("key_ids", self.key_ids, self.value_ids)
        require_int("dictionary", self.dictionary, 0, 2**63 - 1)
        require_int("length", self.length, 2 * digits_needed(self.key_ids))
        if self.length % 2:
            raise ValueError(f"length: expected an even number, got {self.length}")
        if self.key_ids % self.value_ids:
            raise ValueError(
                f"value_ids: expected a divisor of key_ids = {self.key_ids}, got {self.value_ids}"
            )
        self._require_sequences()

    @property
    def vocab_size(self) -> int:  # type: ignore[override]
        return 1 + self.key_ids + self.value_ids

    @property
    def vocabulary(self) -> dict[str, range]:
        low = 1 + self.key_ids
        return {"control": range(1), "key": range(1, low), "value": range(low, self.vocab_size)}

    @property
    def chance(self) -> float:
        return 1 / self.value_ids

    @property
    def _digits(self) -> CheckDigits:
        count = digits_needed(self.key_ids)
        return CheckDigits(tuple(range(0, 2 * count, 2)), 1, self.key_ids)

    @property
    def sequences(self) -> int:
        return int(self.key_ids ** (self.length // 2))

    def _rows(self, rng: Rng, split: str) -> tuple[Tensor, Tensor]:
        keys = rng.below(self.key_ids, self.length // 2).add_(1)
        inputs = torch.stack((keys, torch.full_like(keys, ASK)), 2).flatten(1)
        self._assign_(inputs, split, rng)
        facts = table(_facts(self.key_ids, self.value_ids, self.dictionary), rng.device)
        targets = torch.full_like(inputs, IGNORE)
        targets[:, 1::2] = facts[inputs[:, ::2] - 1] + 1 + self.key_ids
        return inputs, targets

    def solve(self, inputs: Int[Tensor, "n T"]) -> Int[Tensor, "n T"]:
        """For each value, the keys that have it."""
        facts = _facts(self.key_ids, self.value_ids, self.dictionary)
        targets = torch.full_like(inputs, IGNORE)
        for value in range(self.value_ids):
            having = torch.tensor([k + 1 for k, v in enumerate(facts) if v == value], device=inputs.device)
            found = torch.isin(inputs[:, ::2], having)
            targets[:, 1::2] = targets[:, 1::2].masked_fill(found, 1 + self.key_ids + value)
        return targets
