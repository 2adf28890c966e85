"""What came after this token last time?"""

from dataclasses import dataclass
from math import perm

import torch
from jaxtyping import Int
from torch import Tensor

from tasks._random import Rng
from tasks._records import Records, last_match
from tasks.base import IGNORE, register, require_int


@register
@dataclass(frozen=True)
class InductionHeads(Records):
    """A special token stands once among ordinary ones and again at the end; the answer is what followed it.

    After Olsson et al. 2022 and Dao et al. 2023 (H3). The answer is an ordinary token: unlike in recall
    tasks, nothing but its place sets it apart from the filler.

    >>> import tasks, torch
    >>> task = tasks.get("induction_heads", length=12, specials=2, queries=2)     # specials 0-1, tokens 2-17
    >>> task.solve(torch.tensor([[5, 6, 1, 9, 7, 11, 12, 0, 17, 8, 0, 1]]))
    tensor([[-100, -100, -100, -100, -100, -100, -100, -100, -100, -100,   17,    9]])

    All tokens and questions are independent and uniform.

    Parameters
    ----------
    specials: different special tokens, each of which stands once.
    noise: how many ordinary token ids there are.
    """

    queries: int = 1
    noise: int = 16
    specials: int = 1

    name = "induction_heads"
    version = 1
    summary = "the token that followed a special token when it last stood"
    noise_role = "token"
    record_width = 2
    question_width = 1

    def __post_init__(self) -> None:
        require_int("specials", self.specials, 1)
        super().__post_init__()

    @property
    def _records(self) -> int:
        return self.specials

    @property
    def roles(self) -> dict[str, int]:
        return {"control": self.specials, "token": self.noise}

    @property
    def labels(self) -> dict[str, tuple[str, ...]]:
        return {"control": tuple(f"S{i}" for i in range(self.specials))}

    @property
    def _facts(self) -> int:
        return int(perm(self.specials) * self.noise**self.specials)

    @property
    def chance(self) -> float:
        return 1 / self.noise

    def _fill(self, rng: Rng) -> tuple[Tensor, Tensor, Tensor]:
        S, Q = self.specials, self.queries
        special = rng.permutation(S)
        after, asked = rng.below((self.noise,) * S + (S,) * Q).split((S, Q), 1)
        after = after + self._low("token")
        questions = special.gather(1, asked)[:, :, None]
        return torch.stack((special, after), 2), questions, after.gather(1, asked)[:, :, None]

    def _source(self, inputs: Int[Tensor, "n T"]) -> Int[Tensor, "n Q"]:
        return last_match(inputs, self._tail, [(inputs[:, self._tail :], 0)], 2) + 1

    def solve(self, inputs: Int[Tensor, "n T"]) -> Int[Tensor, "n T"]:
        """Compare every question with every column."""
        targets = torch.full_like(inputs, IGNORE)
        targets[:, self._tail :] = inputs.gather(1, self._source(inputs))
        return targets

    def slices(self, inputs: Int[Tensor, "n T"], targets: Int[Tensor, "n T"]) -> dict[str, Tensor]:
        """distance from the answer to the question."""
        source = torch.zeros_like(inputs)
        source[:, self._tail :] = self._source(inputs)
        return self._question_slices(inputs, targets, source)
