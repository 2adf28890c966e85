"""A counter modulo n."""

from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor

from tasks._tracking import StateTracking
from tasks.base import register, require_choice, require_int


@register
@dataclass(frozen=True)
class ModularCount(StateTracking):
    """Increments modulo n; the answer at every position is their sum so far (the group Z_n).

    >>> import tasks, torch
    >>> task = tasks.get("modular_count", modulus=3, increments="all")   # PAD 0, +0 +1 +2: 1-3, states 4-6
    >>> task.solve(torch.tensor([[2, 3, 1, 3, 3]]))                      # +1 +2 +0 +2 +2
    tensor([[5, 4, 4, 6, 5]])

    With all increments every state is equally likely at every position. With "unit" (only +0 and +1) the
    first positions favour small states.

    Parameters
    ----------
    modulus: n.
    increments: "all" (0 .. n-1) or "unit" (0 and 1, so that the count is of ones).
    """

    modulus: int = 5
    increments: str = "all"

    name = "modular_count"
    version = 1
    summary = "sum of increments modulo n, asked at every position (Z_n)"

    def __post_init__(self) -> None:
        require_int("modulus", self.modulus, 2, 1 << 20)
        require_choice("increments", self.increments, ("all", "unit"))
        super().__post_init__()

    @property
    def labels(self) -> dict[str, tuple[str, ...]]:
        return {
            "symbol": tuple(f"+{i}" for i in range(self.symbols)),
            "state": tuple(f"={i}" for i in range(self.states)),
        }

    @property
    def symbols(self) -> int:
        return self.modulus if self.increments == "all" else 2

    @property
    def states(self) -> int:
        return self.modulus

    def _track(self, word: Int[Tensor, "n T"]) -> Int[Tensor, "n T"]:
        return word.cumsum(1).remainder_(self.modulus)

    def _step(self, state: Int[Tensor, "n"], symbol: Int[Tensor, "n"]) -> Int[Tensor, "n"]:
        after = state + symbol
        return after.where(after < self.modulus, after - self.modulus)
