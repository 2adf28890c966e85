"""Learn an automaton from its run."""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from tasks._random import Rng, arange
from tasks._splits import CheckDigits, digits_needed
from tasks.base import IGNORE, Task, register, require_int


@register
@dataclass(frozen=True)
class InContextAutomata(Task):
    """The run of a random finite automaton, drawn anew for every row: state, input, state, input, state ...

    The answer at an input is the next state, asked only where the same input was seen in the same state
    before: then, and only then, the row itself determines it. After Akyürek et al. 2024 (in-context
    language learning).

    >>> import tasks, torch
    >>> task = tasks.get("in_context_automata", states=3, inputs=2)
    >>> # noise 0-15, inputs 16-17, states 18-20
    >>> task.solve(torch.tensor([[7, 18, 16, 19, 17, 18, 16, 19, 16, 20, 17, 18]]))
    tensor([[-100, -100, -100, -100, -100, -100,   19, -100, -100, -100, -100, -100]])

    The automaton's transitions, its first state and its inputs are independent and uniform, so answers are
    balanced. The noise before the first state holds the check digits.

    Parameters
    ----------
    length: tokens per sequence.
    states, inputs: size of the automata.
    """

    length: int = 64
    states: int = 4
    inputs: int = 3

    name = "in_context_automata"
    version = 1
    summary = "next state of an unknown automaton, from its run so far"

    def __post_init__(self) -> None:
        require_int("states", self.states, 2)
        require_int("inputs", self.inputs, 1)
        require_int("length", self.length, 2 + 2 * (self.states * self.inputs + 1))
        self._require_sequences()

    @property
    def vocab_size(self) -> int:  # type: ignore[override]
        return 16 + self.inputs + self.states

    @property
    def vocabulary(self) -> dict[str, range]:
        low = 16 + self.inputs
        return {"noise": range(16), "input": range(16, low), "state": range(low, self.vocab_size)}

    @property
    def chance(self) -> float:
        return 1 / self.states

    @property
    def _moves(self) -> int:
        return (self.length - 2) // 2

    @property
    def _first(self) -> int:
        """Column of the first state; noise comes before it."""
        return self.length - 1 - 2 * self._moves

    @property
    def _digits(self) -> CheckDigits:
        return CheckDigits(tuple(range(digits_needed(16))), 0, 16)

    @property
    def sequences(self) -> int:
        """A lower bound: noise, first state and inputs."""
        return int(16**self._first * self.states * self.inputs**self._moves)

    def _rows(self, rng: Rng, split: str) -> tuple[Tensor, Tensor]:
        S, A, M = self.states, self.inputs, self._moves
        bounds = (16,) * self._first + (S,) * (S * A + 1) + (A,) * M
        noise, transition, state, symbol = rng.below(bounds).split((self._first, S * A, 1, M), 1)
        here, states, new = symbol * S, [state], []
        seen = torch.zeros_like(transition)
        # Column by column over the moves: a state depends on the one before it.
        for m in range(M):
            at = here[:, m : m + 1] + state
            state = transition.gather(1, at)
            states.append(state)
            new.append(seen.gather(1, at))
            seen.scatter_(1, at, 1)
        run = torch.cat(states, 1)
        low = 16 + A
        moves = torch.stack((symbol + 16, run[:, 1:] + low), 2).flatten(1)
        inputs = torch.cat((noise, run[:, :1] + low, moves), 1)
        targets = torch.full_like(inputs, IGNORE)
        targets[:, self._first + 1 :: 2] = (run[:, 1:] + low).where(torch.cat(new, 1) > 0, IGNORE)
        return self._assign_(inputs, split, rng), targets

    def _earlier(self, inputs: Int[Tensor, "n T"]) -> Int[Tensor, "n M"]:
        """For each move the last earlier move with the same state and input, or -1: all pairs of moves."""
        width = inputs.shape[1]
        first = width - 1 - 2 * ((width - 2) // 2)
        move = inputs[:, first:-1:2] * self.vocab_size + inputs[:, first + 1 :: 2]
        m = torch.arange(move.shape[1], device=inputs.device)
        same = (move[:, :, None] == move[:, None]) & (m < m[:, None])
        return (m + 1).where(same, 0).amax(2) - 1

    def solve(self, inputs: Int[Tensor, "n T"]) -> Int[Tensor, "n T"]:
        """What came after the last earlier move like this one."""
        width = inputs.shape[1]
        first = width - 1 - 2 * ((width - 2) // 2)
        earlier = self._earlier(inputs)
        after = inputs[:, first + 2 :: 2].gather(1, earlier.clamp(0))
        targets = torch.full_like(inputs, IGNORE)
        targets[:, first + 1 :: 2] = after.where(earlier >= 0, IGNORE)
        return targets

    def slices(self, inputs: Int[Tensor, "n T"], targets: Int[Tensor, "n T"]) -> dict[str, Tensor]:
        """distance: tokens since the state that answers was shown."""
        out = super().slices(inputs, targets)
        m = arange(self._moves, inputs.device)
        gap = torch.zeros_like(inputs)
        gap[:, self._first + 1 :: 2] = 2 * (m - self._earlier(inputs)) - 1
        out["distance"] = gap.where(targets != IGNORE, -1)
        return out
