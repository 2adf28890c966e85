"""Word problems of small permutation groups."""

from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations

import torch
from jaxtyping import Int
from torch import Tensor

from tasks._random import table
from tasks._scan import prefix
from tasks._tracking import StateTracking
from tasks.base import register, require_choice

Permutation = tuple[int, ...]
GROUPS = {"S3": 3, "S4": 4, "A5": 5, "S5": 5}


def _parity(p: Permutation) -> int:
    return sum(p[i] > p[j] for i in range(len(p)) for j in range(i + 1, len(p))) % 2


@lru_cache(maxsize=8)
def elements(group: str) -> tuple[Permutation, ...]:
    """The group's permutations in lexicographic order; the identity is the first."""
    every = permutations(range(GROUPS[group]))
    return tuple(p for p in every if group[0] == "S" or not _parity(p))


@lru_cache(maxsize=8)
def _products(group: str) -> tuple[int, ...]:
    """Entry a * |G| + b: the element "first a, then b"."""
    every = elements(group)
    number = {p: i for i, p in enumerate(every)}
    return tuple(number[tuple(b[i] for i in a)] for a in every for b in every)


@register
@dataclass(frozen=True)
class WordProblem(StateTracking):
    """A word of permutations; the answer at every position is their product so far.

    Group elements are numbered in lexicographic order of their one-line notation. S3 and S4 are solvable,
    A5 and S5 are not, so their word problems are NC1-complete (Barrington; Merrill, Petty, Sabharwal 2024).

    >>> import tasks, torch
    >>> from tasks.word_problem import elements
    >>> elements("S3")                                   # PAD 0, symbols 1-6, states 7-12
    ((0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0))
    >>> task = tasks.get("word_problem", group="S3")
    >>> task.solve(torch.tensor([[2, 2, 3, 2]]))         # swap 1,2 twice; swap 0,1; swap 1,2
    tensor([[ 8,  7,  9, 11]])

    With all generators every state is equally likely at every position. With swaps the first positions
    favour elements near the identity; the identity is one of the swaps' symbols, so parity is not the clock.

    Parameters
    ----------
    group: "S3", "S4", "A5" or "S5".
    generators: "all" group elements, or "swaps": the identity and all transpositions (not for A5).
    """

    group: str = "S3"
    generators: str = "all"

    name = "word_problem"
    version = 1
    summary = "product of permutations so far, in S3, S4, A5 or S5"

    def __post_init__(self) -> None:
        require_choice("group", self.group, tuple(GROUPS))
        require_choice("generators", self.generators, ("all", "swaps"))
        if self.generators == "swaps" and self.group == "A5":
            raise ValueError("generators: expected 'all' for A5, which has no transposition, got 'swaps'")
        super().__post_init__()

    @property
    def labels(self) -> dict[str, tuple[str, ...]]:
        text = tuple("".join(map(str, p)) for p in elements(self.group))
        return {"symbol": tuple(text[i] for i in self._generators), "state": tuple(f"={p}" for p in text)}

    @property
    def _generators(self) -> tuple[int, ...]:
        every = elements(self.group)
        if self.generators == "all":
            return tuple(range(len(every)))
        return tuple(i for i, p in enumerate(every) if sum(x != j for j, x in enumerate(p)) <= 2)

    @property
    def symbols(self) -> int:
        return len(self._generators)

    @property
    def states(self) -> int:
        return len(elements(self.group))

    def _track(self, word: Int[Tensor, "n T"]) -> Int[Tensor, "n T"]:
        if self.generators == "swaps":
            word = table(self._generators, word.device)[word]
        return prefix(word, table(_products(self.group), word.device).view(self.states, self.states))

    def _step(self, state: Int[Tensor, "n"], symbol: Int[Tensor, "n"]) -> Int[Tensor, "n"]:
        """Move the points: no product table, the permutations themselves."""
        every = torch.tensor(elements(self.group), device=state.device)
        moved = every[torch.tensor(self._generators, device=state.device)[symbol]].gather(1, every[state])
        return (every[None] == moved[:, None]).all(2).long().argmax(1)
