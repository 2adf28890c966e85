"""Associative recall where keys are written again."""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from tasks._random import Rng, arange
from tasks._records import Records, last_match
from tasks.base import IGNORE, register, require_int


@register
@dataclass(frozen=True)
class OverwriteRecall(Records):
    """Keys are written several times in noise, then asked; the last write wins.

    >>> import tasks, torch
    >>> task = tasks.get("overwrite_recall", length=14, keys=2, writes=3, queries=2)
    >>> # noise 0-7, keys 8-23, values 24-39
    >>> task.solve(torch.tensor([[3, 1, 9, 30, 11, 25, 2, 6, 9, 33, 5, 4, 11, 9]]))
    tensor([[-100, -100, -100, -100, -100, -100, -100, -100, -100, -100, -100, -100,
               25,   33]])

    Every key is written once at a random place; the other writes go to random keys. Values and questions
    are independent and uniform, so that answers are balanced and a value may be written again.

    Parameters
    ----------
    keys: different keys in a row.
    writes: writes in a row, at least one per key.
    key_ids, value_ids: how many token ids keys and values have.
    """

    keys: int = 4
    writes: int = 12
    key_ids: int = 16
    value_ids: int = 16

    name = "overwrite_recall"
    version = 1
    summary = "associative recall where the last write of a key wins"
    record_width = 2
    question_width = 1

    def __post_init__(self) -> None:
        require_int("value_ids", self.value_ids, 2)
        require_int("key_ids", self.key_ids, 1)
        require_int("keys", self.keys, 1, self.key_ids)
        require_int("writes", self.writes, self.keys)
        super().__post_init__()

    @property
    def _records(self) -> int:
        return self.writes

    @property
    def roles(self) -> dict[str, int]:
        return {"noise": self.noise, "key": self.key_ids, "value": self.value_ids}

    @property
    def _facts(self) -> int:
        return int(self.value_ids**self.writes)

    @property
    def chance(self) -> float:
        return 1 / self.value_ids

    def _fill(self, rng: Rng) -> tuple[Tensor, Tensor, Tensor]:
        K, W, Q = self.keys, self.writes, self.queries
        ids = rng.distinct(self.key_ids, K) + self._low("key")
        values, again, asked = rng.below((self.value_ids,) * W + (K,) * (W - K) + (K,) * Q).split(
            (W, W - K, Q), 1
        )
        values = values + self._low("value")
        # Write number order[j] goes to key j for the first K, the others wherever they fell.
        order = rng.permutation(W)
        which = torch.cat((arange(K, rng.device).expand(rng.n, K), again), 1)
        which = torch.empty_like(which).scatter_(1, order, which)
        latest = torch.stack([(arange(W, rng.device)).where(which == j, -1).amax(1) for j in range(K)], 1)
        records = torch.stack((ids.gather(1, which), values), 2)
        answers = values.gather(1, latest.gather(1, asked))
        return records, ids.gather(1, asked)[:, :, None], answers[:, :, None]

    def solve(self, inputs: Int[Tensor, "n T"]) -> Int[Tensor, "n T"]:
        """A dictionary, written from left to right."""
        known = inputs.new_full((len(inputs), self.vocab_size), IGNORE)
        key, value = self.vocabulary["key"], self.vocabulary["value"]
        for t in range(self._tail - 1):
            token, after = inputs[:, t : t + 1], inputs[:, t + 1 : t + 2]
            is_write = (token >= key.start) & (token < key.stop) & (after >= value.start)
            known.scatter_(1, token, after.where(is_write, known.gather(1, token)))
        targets = torch.full_like(inputs, IGNORE)
        targets[:, self._tail :] = known.gather(1, inputs[:, self._tail :])
        return targets

    def slices(self, inputs: Int[Tensor, "n T"], targets: Int[Tensor, "n T"]) -> dict[str, Tensor]:
        """distance from the last write; writes: how often the key was written."""
        source, times = torch.zeros_like(inputs), torch.zeros_like(inputs)
        asked = inputs[:, self._tail :]
        source[:, self._tail :] = last_match(inputs, self._tail, [(asked, 0)], 2) + 1
        times[:, self._tail :] = (asked[:, :, None] == inputs[:, None, : self._tail]).sum(2)
        out = self._question_slices(inputs, targets, source)
        out["writes"] = times.where(targets != IGNORE, -1)
        return out
