"""State tracking: a word over an alphabet drives an automaton, and the state is asked after each symbol.

Vocabulary: PAD 0, then the alphabet, then the states (targets only).
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tasks._lengths import PAD, Words
from tasks._random import Rng
from tasks._splits import CheckDigits, digits_needed
from tasks.base import IGNORE


@dataclass(frozen=True)
class StateTracking(Words):
    """A family gives `symbols`, `states`, `_track` (all positions at once) and `_step` (one symbol).

    Symbols are independent and uniform. For the oracle the automaton starts in state 0; `_machine` is how
    many states it has and `_answer` what each of them answers (default: the state itself).
    """

    @property
    def symbols(self) -> int:
        """Size of the alphabet."""
        raise NotImplementedError

    @property
    def states(self) -> int:
        """Number of possible answers."""
        raise NotImplementedError

    def _track(self, word: Int[Tensor, "n T"]) -> Int[Tensor, "n T"]:
        """The answer after each symbol (symbols and answers from 0)."""
        raise NotImplementedError

    def _step(self, state: Int[Tensor, "n"], symbol: Int[Tensor, "n"]) -> Int[Tensor, "n"]:
        """The state after one more symbol."""
        raise NotImplementedError

    @property
    def _machine(self) -> int:
        return self.states

    def _answer(self, state: Int[Tensor, "*n"]) -> Int[Tensor, "*n"]:
        return state

    @property
    def vocab_size(self) -> int:  # type: ignore[override]
        return 1 + self.symbols + self.states

    @property
    def vocabulary(self) -> dict[str, range]:
        return {
            "pad": range(1),
            "symbol": range(1, 1 + self.symbols),
            "state": range(1 + self.symbols, self.vocab_size),
        }

    @property
    def chance(self) -> float:
        return 1 / self.states

    @property
    def majority(self) -> float:
        """The most frequent answer's share of a test batch, exact, from the automaton's Markov chain."""
        return _majority(self)

    @property
    def _digits(self) -> CheckDigits:
        return CheckDigits(tuple(range(digits_needed(self.symbols))), 1, self.symbols)

    def _words_of(self, tokens: int) -> int:
        return int(self.symbols**tokens)

    def _word(self, rng: Rng, width: int, tokens: Int[Tensor, "n 1"] | None) -> Int[Tensor, "n T"]:
        return rng.below(self.symbols, width).add_(1)

    def _answers(self, inputs: Int[Tensor, "n T"]) -> Int[Tensor, "n T"]:
        # A PAD is tracked as symbol 0: it comes after the word, where nothing is scored.
        return self._track((inputs - 1).clamp_(0)).add_(1 + self.symbols)

    def _oracle(self, inputs: Int[Tensor, "n T"]) -> Int[Tensor, "n T"]:
        """Run the automaton symbol by symbol."""
        state = torch.zeros_like(inputs[:, 0])
        targets = torch.full_like(inputs, IGNORE)
        for t in range(inputs.shape[1]):
            live = inputs[:, t] != PAD
            state = self._step(state, (inputs[:, t] - 1).clamp(0)).where(live, state)
            targets[:, t] = (self._answer(state) + 1 + self.symbols).where(live, IGNORE)
        return targets


def length_weights(task: Words) -> Float[Tensor, "T"]:
    """Expected number of test rows per row of a batch that are scored at each position."""
    low, high = task.lengths("test")
    weights = torch.zeros(task.width("test"), dtype=torch.double)
    for n in range(low, high + 1, task.unit):
        if task.scoring == "final":
            weights[n - 1] += 1
        else:
            weights[:n] += 1
    return weights


@lru_cache(maxsize=256)
def _majority(task: StateTracking) -> float:
    machine = torch.arange(task._machine)
    step = torch.zeros(task._machine, task._machine, dtype=torch.double)
    for symbol in range(task.symbols):
        step[machine, task._step(machine, torch.full_like(machine, symbol))] += 1 / task.symbols
    p = torch.zeros(task._machine, dtype=torch.double)
    p[0] = 1
    weights, total = length_weights(task), torch.zeros(task.states, dtype=torch.double)
    for weight in weights:
        p = p @ step
        total.index_add_(0, task._answer(machine).clamp(0), p * weight)
    return float(total.max() / weights.sum())
