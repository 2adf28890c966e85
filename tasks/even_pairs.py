"""Is the number of unequal neighbours even?"""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Int
from torch import Tensor

from tasks._tracking import StateTracking
from tasks.base import Labels, register


@register
@dataclass(frozen=True)
class EvenPairs(StateTracking):
    """Letters a and b; the answer after each: is the number of "ab" and "ba" so far even (Delétang 2023)?

    The generator uses the short way (equal first and last letter), the oracle counts the pairs.

    >>> import tasks, torch
    >>> task = tasks.get("even_pairs", length=16)        # PAD 0, a 1, b 2, EVEN 3, ODD 4
    >>> task.solve(torch.tensor([[1, 1, 2, 2, 1]]))      # a a b b a: pairs 0 0 1 1 2
    tensor([[3, 3, 4, 4, 3]])

    The first answer is always EVEN, all later ones are balanced.
    """

    name = "even_pairs"
    version = 1
    summary = "is the number of neighbouring unequal letters even?"
    labels: ClassVar[Labels] = {"symbol": ("a", "b"), "state": ("EVEN", "ODD")}
    symbols = 2
    states = 2

    def _track(self, word: Int[Tensor, "n T"]) -> Int[Tensor, "n T"]:
        return word ^ word[:, :1]

    # The machine: 0 before the word, then 1 + 2 * last letter + parity of the unequal pairs.
    @property
    def _machine(self) -> int:
        return 5

    def _answer(self, state: Int[Tensor, "*n"]) -> Int[Tensor, "*n"]:
        return (state - 1) % 2

    def _step(self, state: Int[Tensor, "n"], symbol: Int[Tensor, "n"]) -> Int[Tensor, "n"]:
        last, odd = (state - 1) // 2, (state - 1) % 2
        odd = (1 - odd).where(last != symbol, odd).where(state > 0, 0)
        return 1 + 2 * symbol + odd
