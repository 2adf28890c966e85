"""Parity of all bits so far."""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Int
from torch import Tensor

from tasks._tracking import StateTracking
from tasks.base import Labels, register


@register
@dataclass(frozen=True)
class RunningParity(StateTracking):
    """A bit at every position; the answer is the parity of all bits up to and including it.

    >>> import tasks, torch
    >>> task = tasks.get("running_parity", length=16)       # PAD 0, bits 1 and 2, EVEN 3, ODD 4
    >>> task.solve(torch.tensor([[1, 2, 1, 2, 2, 1]]))      # bits 0 1 0 1 1 0
    tensor([[3, 4, 4, 3, 4, 4]])

    EVEN and ODD are equally likely at every position.
    """

    name = "running_parity"
    version = 1
    summary = "parity of all bits so far, asked at every position"
    labels: ClassVar[Labels] = {"symbol": ("0", "1"), "state": ("EVEN", "ODD")}
    symbols = 2
    states = 2

    def _track(self, word: Int[Tensor, "n T"]) -> Int[Tensor, "n T"]:
        return word.cumsum(1).bitwise_and_(1)

    def _step(self, state: Int[Tensor, "n"], symbol: Int[Tensor, "n"]) -> Int[Tensor, "n"]:
        return (state != symbol).long()
