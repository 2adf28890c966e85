"""A walk on a cycle."""

from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor

from tasks._tracking import StateTracking
from tasks.base import register, require_int


@register
@dataclass(frozen=True)
class CycleNavigation(StateTracking):
    """Steps on a cycle of n places; the answer is the place after each step (Delétang et al. 2023).

    >>> import tasks, torch
    >>> task = tasks.get("cycle_navigation", places=5)     # PAD 0, STAY 1, RIGHT 2, LEFT 3, places 4-8
    >>> task.solve(torch.tensor([[2, 2, 1, 3, 3, 3]]))
    tensor([[5, 6, 6, 5, 4, 8]])

    The first positions favour places near the start; the walk forgets it at length.

    Parameters
    ----------
    places: length of the cycle.
    """

    places: int = 5

    name = "cycle_navigation"
    version = 1
    summary = "stay, left or right on a cycle: where are we?"
    symbols = 3

    def __post_init__(self) -> None:
        require_int("places", self.places, 3, 1 << 20)
        super().__post_init__()

    @property
    def labels(self) -> dict[str, tuple[str, ...]]:
        return {"symbol": ("STAY", "RIGHT", "LEFT"), "state": tuple(f"@{i}" for i in range(self.places))}

    @property
    def states(self) -> int:
        return self.places

    def _track(self, word: Int[Tensor, "n T"]) -> Int[Tensor, "n T"]:
        right = word.cumsum(1).sub_((word == 2).cumsum(1), alpha=3)
        return right.remainder_(self.places)

    def _step(self, state: Int[Tensor, "n"], symbol: Int[Tensor, "n"]) -> Int[Tensor, "n"]:
        right = (state + 1).where(state < self.places - 1, 0)
        left = (state - 1).where(state > 0, self.places - 1)
        return state.where(symbol == 0, right.where(symbol == 1, left))
