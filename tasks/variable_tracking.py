"""Chains of pointers."""

from dataclasses import dataclass
from math import perm

import torch
from jaxtyping import Int
from torch import Tensor

from tasks._random import Rng, arange
from tasks._records import Records
from tasks.base import IGNORE, Labels, register, require_int

IS, QUERY = 0, 1


@register
@dataclass(frozen=True)
class VariableTracking(Records):
    """[variable IS source] statements in noise, then [QUERY variable]; the answer is the value at the
    chain's root.

    A chain's first variable is given a value, each later one the variable before it: c -> b -> a -> value
    (the paper's pointer chain). Chains are interleaved at random; a source is always stated before it is
    used.

    >>> import tasks, torch
    >>> task = tasks.get("variable_tracking", length=14, chains=1, depth=2, queries=2)
    >>> # IS 0, QUERY 1, noise 2-9, variables 10-25, values 26-41
    >>> task.solve(torch.tensor([[5, 6, 12, 0, 30, 7, 20, 0, 12, 8, 1, 20, 1, 12]]))
    tensor([[-100, -100, -100, -100, -100, -100, -100, -100, -100, -100, -100,   30,
             -100,   30]])

    Variables of a row are distinct, values uniform; a question asks for any variable, so that the numbers
    of hops 1 .. depth are equally likely.

    Parameters
    ----------
    chains: chains in a row, each with a value of its own draw.
    depth: statements per chain.
    variable_ids, value_ids: how many token ids variables and values have.
    """

    chains: int = 2
    depth: int = 4
    variable_ids: int = 16
    value_ids: int = 16

    name = "variable_tracking"
    version = 1
    summary = "the value at the root of a chain of pointers"
    record_width = 3
    question_width = 2

    def __post_init__(self) -> None:
        require_int("value_ids", self.value_ids, 2)
        require_int("chains", self.chains, 1)
        require_int("depth", self.depth, 1)
        require_int("variable_ids", self.variable_ids, self.chains * self.depth)
        super().__post_init__()

    @property
    def labels(self) -> Labels:
        return {
            "control": ("IS", "QUERY"),
            "variable": tuple(f"x{i}" for i in range(self.variable_ids)),
        }

    @property
    def _records(self) -> int:
        return self.chains * self.depth

    @property
    def roles(self) -> dict[str, int]:
        return {"control": 2, "noise": self.noise, "variable": self.variable_ids, "value": self.value_ids}

    @property
    def _facts(self) -> int:
        return int(perm(self.variable_ids, self._records) * self.value_ids**self.chains)

    @property
    def chance(self) -> float:
        return 1 / self.value_ids

    def _fill(self, rng: Rng) -> tuple[Tensor, Tensor, Tensor]:
        M, D, R, Q = self.chains, self.depth, self._records, self.queries
        variables = rng.distinct(self.variable_ids, R) + self._low("variable")
        # Statement s continues chain[s]; its level is how often that chain stood before.
        chain = rng.permutation(R).div(D, rounding_mode="floor")
        level = torch.zeros_like(chain)
        for c in range(M):
            here = chain == c
            level = (here.long().cumsum(1) - 1).where(here, level)
        values, asked = rng.below((self.value_ids,) * M + (R,) * Q).split((M, Q), 1)
        values = values + self._low("value")
        slot = chain * D + level
        name = variables.gather(1, slot)
        source = variables.gather(1, (slot - 1).clamp_(0)).where(level > 0, values.gather(1, chain))
        records = torch.stack((name, torch.full_like(name, IS), source), 2)
        questions = torch.stack((torch.full_like(asked, QUERY), variables.gather(1, asked)), 2)
        answers = torch.full_like(questions, IGNORE)
        answers[:, :, 1] = values.gather(1, asked.div(D, rounding_mode="floor"))
        return records, questions, answers

    def _follow(self, inputs: Int[Tensor, "n T"]) -> tuple[Tensor, Tensor]:
        """Value and number of hops of every token id, by running the statements from left to right."""
        value = inputs.new_full((len(inputs), self.vocab_size), IGNORE)
        low = self._low("value")
        value[:, low:] = torch.arange(low, self.vocab_size, device=inputs.device)
        hops = torch.zeros_like(value)
        for t in range(1, self._tail - 1):
            states = inputs[:, t : t + 1] == IS
            name, source = inputs[:, t - 1 : t], inputs[:, t + 1 : t + 2]
            value.scatter_(1, name, value.gather(1, source).where(states, value.gather(1, name)))
            hops.scatter_(1, name, (hops.gather(1, source) + 1).where(states, hops.gather(1, name)))
        return value, hops

    def solve(self, inputs: Int[Tensor, "n T"]) -> Int[Tensor, "n T"]:
        targets = torch.full_like(inputs, IGNORE)
        targets[:, self._tail + 1 :: 2] = self._follow(inputs)[0].gather(1, inputs[:, self._tail + 1 :: 2])
        return targets

    def slices(self, inputs: Int[Tensor, "n T"], targets: Int[Tensor, "n T"]) -> dict[str, Tensor]:
        """hops: statements between the variable and its value. distance from the variable's statement."""
        asked = inputs[:, self._tail + 1 :: 2]
        at = (inputs[:, None, : self._tail - 1] == asked[:, :, None]) & (
            inputs[:, None, 1 : self._tail] == IS
        )
        source, hops = torch.zeros_like(inputs), torch.zeros_like(inputs)
        source[:, self._tail + 1 :: 2] = arange(self._tail - 1, inputs.device).where(at, 0).amax(2)
        hops[:, self._tail + 1 :: 2] = self._follow(inputs)[1].gather(1, asked)
        out = self._question_slices(inputs, targets, source)
        out["hops"] = hops.where(targets != IGNORE, -1)
        return out
