"""What the public PRISM release generates, as it generates it: the frame of its nine tasks.

One sequence has one answer, asked at the last token. These tasks exist to reproduce the published table;
they are not well-posed in general: noise may use the ids of operands and controls, and then even the
Bayes rule errs. `solve` is that rule, `ceiling` its accuracy. The only addition is the split: one token
that the release draws uniformly and that does not touch the label (or, in mqar, the value itself) is the
check digit.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tasks._random import Rng, arange
from tasks._splits import CheckDigits
from tasks.base import IGNORE, Task, require_int

CEILING_ROWS = 1 << 16


@dataclass(frozen=True)
class Release(Task):
    """A family gives `_noise`, `_draw`, `_target` and either `_answer` or `posterior`.

    Parameters
    ----------
    length: tokens per sequence.
    vocab_size: all ids.
    """

    length: int = 64
    vocab_size: int = 32

    def __post_init__(self) -> None:
        require_int("length", self.length, 24)
        require_int("vocab_size", self.vocab_size, 32)

    # --- what a family implements ---

    @property
    def _noise(self) -> range:
        """Ids of the noise."""
        raise NotImplementedError

    def _draw(self, rng: Rng) -> tuple[Int[Tensor, "n T"], Int[Tensor, "n"]]:
        """Inputs and answers."""
        raise NotImplementedError

    def posterior(self, inputs: Int[Tensor, "n T"]) -> Int[Tensor, "n V"]:
        """Weight of each answer given the inputs, up to a factor per row: exact, in integers."""
        raise NotImplementedError

    # --- what they share ---

    @property
    def _digits(self) -> CheckDigits:
        return CheckDigits((self.length - 3,), self._noise.start, len(self._noise))

    @property
    def sequences(self) -> int:
        """A lower bound: half of the noise."""
        return int(len(self._noise) ** (self.length // 2))

    @property
    def vocabulary(self) -> dict[str, range]:
        low, high = self._noise.start, self._noise.stop
        out = {"reserved": range(low), "token": self._noise, "control": range(high, self.vocab_size)}
        return {role: ids for role, ids in out.items() if len(ids)}

    def _noise_tokens(self, rng: Rng) -> Int[Tensor, "n T"]:
        return rng.below(len(self._noise), self.length).add_(self._noise.start)

    def _place_(self, inputs: Tensor, start: Int[Tensor, "n"], block: list[Tensor]) -> None:
        columns = start[:, None] + arange(len(block), inputs.device)
        inputs.scatter_(1, columns, torch.stack(block, 1))

    def _rows(self, rng: Rng, split: str) -> tuple[Tensor, Tensor]:
        inputs, answer = self._draw(rng)
        self._assign_(inputs, split, rng)
        targets = torch.full_like(inputs, IGNORE)
        targets[:, -1] = answer
        return inputs, targets

    def solve(self, inputs: Int[Tensor, "n T"]) -> Int[Tensor, "n T"]:
        """The Bayes rule: the answer with the largest posterior, the smallest id among equals."""
        ids = arange(self.vocab_size, inputs.device)
        weights = self.posterior(inputs) * self.vocab_size + (self.vocab_size - 1 - ids)
        targets = torch.full_like(inputs, IGNORE)
        targets[:, -1] = weights.argmax(1)
        return targets

    def certainty(self, inputs: Int[Tensor, "n T"]) -> Float[Tensor, "n"]:
        """Posterior probability of `solve`'s answer."""
        weights = self.posterior(inputs).double()
        return weights.amax(1) / weights.sum(1)

    @property
    def ceiling(self) -> float:
        """Mean certainty over 65,536 fixed rows; its standard error is `ceiling_error`."""
        return _ceiling(self)[0]

    @property
    def ceiling_error(self) -> float:
        """Standard error of `ceiling`; 0 where it is exact."""
        return _ceiling(self)[1]

    def _one_hot(self, answer: Int[Tensor, "n"]) -> Int[Tensor, "n V"]:
        return (answer[:, None] == arange(self.vocab_size, answer.device)).long()


@lru_cache(maxsize=64)
def _ceiling(task: Release) -> tuple[float, float]:
    certainty = task.certainty(task.batch(CEILING_ROWS, split="test").inputs)
    return float(certainty.mean()), float(certainty.std() / CEILING_ROWS**0.5)
