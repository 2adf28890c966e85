"""Copy what matters, skip the rest."""

from dataclasses import dataclass
from math import comb
from typing import ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from tasks._random import Rng, arange, sort_
from tasks._splits import CheckDigits, digits_needed
from tasks.base import IGNORE, Labels, Task, register, require_int

GO, BLANK = 0, 1


@register
@dataclass(frozen=True)
class SelectiveCopy(Task):
    """Items at random places in noise, GO, then BLANKs, at which the items are asked in order.

    After Gu and Dao 2023 (Mamba) and MAD.

    >>> import tasks, torch
    >>> task = tasks.get("selective_copy", length=12, items=2)        # GO 0, BLANK 1, noise 2-9, items 10-25
    >>> task.solve(torch.tensor([[5, 3, 4, 17, 9, 9, 2, 11, 6, 0, 1, 1]]))
    tensor([[-100, -100, -100, -100, -100, -100, -100, -100, -100, -100,   17,   11]])

    Items are independent and uniform; their places are a uniform subset of those after the first noise
    tokens, which are the check digits.

    Parameters
    ----------
    length: tokens per sequence.
    items: items to remember.
    item_ids, noise: how many token ids items and noise have.
    """

    length: int = 64
    items: int = 8
    item_ids: int = 16
    noise: int = 8

    name = "selective_copy"
    version = 1
    summary = "repeat the items that stood among noise"
    labels: ClassVar[Labels] = {"control": ("GO", "BLANK")}

    def __post_init__(self) -> None:
        require_int("items", self.items, 1)
        require_int("item_ids", self.item_ids, 2)
        require_int("noise", self.noise, 2)
        require_int("length", self.length, self._first + 2 * self.items + 1)
        self._require_sequences()

    @property
    def vocab_size(self) -> int:  # type: ignore[override]
        return 2 + self.noise + self.item_ids

    @property
    def vocabulary(self) -> dict[str, range]:
        low = 2 + self.noise
        return {"control": range(2), "noise": range(2, low), "item": range(low, self.vocab_size)}

    @property
    def chance(self) -> float:
        return 1 / self.item_ids

    @property
    def _first(self) -> int:
        return digits_needed(self.noise)

    @property
    def _go(self) -> int:
        """Column of GO."""
        return self.length - self.items - 1

    @property
    def _digits(self) -> CheckDigits:
        return CheckDigits(tuple(range(self._first)), 2, self.noise)

    @property
    def sequences(self) -> int:
        body = self._go - self._first
        places = comb(body, self.items)
        return int(places * self.item_ids**self.items * self.noise ** (self._go - self.items))

    def _rows(self, rng: Rng, split: str) -> tuple[Tensor, Tensor]:
        places = sort_(rng.distinct(self._go - self._first, self.items)) + self._first
        r = rng.below((self.noise,) * self._go + (self.item_ids,) * self.items)
        items = r[:, self._go :] + 2 + self.noise
        inputs = torch.nn.functional.pad(r[:, : self._go] + 2, (0, self.items + 1), value=BLANK)
        inputs[:, self._go] = GO
        inputs.scatter_(1, places, items)
        targets = torch.full_like(inputs, IGNORE)
        targets[:, self._go + 1 :] = items
        return self._assign_(inputs, split, rng), targets

    def _ranks(self, inputs: Int[Tensor, "n T"]) -> Int[Tensor, "n items T"]:
        """Does column t hold item j?"""
        is_item = inputs >= 2 + self.noise
        wanted = torch.arange(1, self.items + 1, device=inputs.device)[:, None]
        return ((is_item.cumsum(1)[:, None] == wanted) & is_item[:, None]).long()

    def solve(self, inputs: Int[Tensor, "n T"]) -> Int[Tensor, "n T"]:
        """Count the items: item j is where the count is j."""
        targets = torch.full_like(inputs, IGNORE)
        targets[:, self._go + 1 :] = (self._ranks(inputs) * inputs[:, None]).sum(2)
        return targets

    def slices(self, inputs: Int[Tensor, "n T"], targets: Int[Tensor, "n T"]) -> dict[str, Tensor]:
        """item: which one is asked. distance from the item to the question."""
        out = super().slices(inputs, targets)
        scored, position = targets != IGNORE, arange(inputs.shape[1], inputs.device)
        source = torch.zeros_like(inputs)
        source[:, self._go + 1 :] = self._ranks(inputs).argmax(2)
        out["item"] = (position - self._go - 1).where(scored, -1)
        out["distance"] = (position - source).where(scored, -1)
        return out
