"""State tracking: a word over an alphabet drives an automaton, and the state is asked at every position.

Vocabulary: PAD 0, then the alphabet, then the states (targets only). A row of n symbols is padded on the
    right with PAD up to the batch's width and scored at its n symbols.

Splits. With a fixed length, or lengths from `min_length` to `length`, the first symbols of a word are the
check digits of its split. Lengths with fewer than 1,024 words are too short to be divided: they are
training only. With `test_length`, the test words are longer than any training word instead, and so
disjoint by length.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from tasks._random import Rng, arange
from tasks._splits import CheckDigits, digits_needed
from tasks.base import IGNORE, MIN_SEQUENCES, Task, require_int

PAD = 0


@dataclass(frozen=True)
class StateTracking(Task):
    """A family gives `symbols`, `states`, `_track` (all positions at once) and `_step` (one symbol, for
    the oracle).

    Parameters
    ----------
    length: the longest training word, and the width of training and validation batches.
    min_length: the shortest training word (default: all words have `length` symbols).
    test_length: (shortest, longest) test word, both above `length`; default: as in training.
    """

    length: int = 64
    min_length: int | None = None
    test_length: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        require_int("length", self.length, 1)
        if self.min_length is not None:
            require_int("min_length", self.min_length, 1, self.length)
        if self.test_length is not None:
            pair = self.test_length
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise ValueError(f"test_length: expected (shortest, longest), got {pair!r}")
            require_int("test_length[0]", pair[0], self.length + 1)
            require_int("test_length[1]", pair[1], pair[0])
        self._require_sequences()

    @property
    def symbols(self) -> int:
        """Size of the alphabet."""
        raise NotImplementedError

    @property
    def states(self) -> int:
        """Number of possible answers."""
        raise NotImplementedError

    def _track(self, word: Int[Tensor, "n T"]) -> Int[Tensor, "n T"]:
        """The answer after each symbol (symbols and answers from 0), in parallel over time."""
        raise NotImplementedError

    def _step(self, state: Int[Tensor, "n"], symbol: Int[Tensor, "n"]) -> Int[Tensor, "n"]:
        """The state after one more symbol; the first state is 0 and is its own answer."""
        raise NotImplementedError

    @property
    def vocab_size(self) -> int:  # type: ignore[override]
        return 1 + self.symbols + self.states

    @property
    def vocabulary(self) -> dict[str, range]:
        return {
            "control": range(1),
            "operand": range(1, 1 + self.symbols),
            "answer": range(1 + self.symbols, self.vocab_size),
        }

    @property
    def chance(self) -> float:
        return 1 / self.states

    @property
    def sequences(self) -> int:
        """Words of the longest training length."""
        return int(self.symbols**self.length)

    def width(self, split: str = "train") -> int:
        return self.test_length[1] if split == "test" and self.test_length else self.length

    def lengths(self, split: str) -> tuple[int, int]:
        """Shortest and longest word of a split."""
        if split == "test" and self.test_length:
            return self.test_length
        low = self.min_length or self.length
        return (low if split == "train" else max(low, self._divisible)), self.length

    @property
    def _divisible(self) -> int:
        length = 1
        while self.symbols**length < MIN_SEQUENCES:
            length += 1
        return length

    @property
    def _digits(self) -> CheckDigits:
        return CheckDigits(tuple(range(digits_needed(self.symbols))), 1, self.symbols)

    def _rows(self, rng: Rng, split: str) -> tuple[Tensor, Tensor]:
        low, high = self.lengths(split)
        width = self.width(split)
        inputs = rng.below(self.symbols, width).add_(1)
        pad, divided = None, None
        if low < high:
            n = rng.below(high - low + 1) + low
            pad = arange(width, rng.device) >= n
            inputs.masked_fill_(pad, PAD)
            divided = n[:, 0] >= self._divisible if low < self._divisible else None
        if not (split == "test" and self.test_length):
            self._digits.assign_(inputs, split, rng, divided)
        # A PAD is tracked as symbol 0; what comes after the word is masked.
        targets = self._track((inputs - 1).clamp_(0) if low < high else inputs - 1).add_(1 + self.symbols)
        return inputs, targets if pad is None else targets.masked_fill_(pad, IGNORE)

    def solve(self, inputs: Int[Tensor, "n T"]) -> Int[Tensor, "n T"]:
        """Run the automaton symbol by symbol."""
        state = torch.zeros_like(inputs[:, 0])
        targets = torch.full_like(inputs, IGNORE)
        for t in range(inputs.shape[1]):
            live = inputs[:, t] != PAD
            state = self._step(state, (inputs[:, t] - 1).clamp(0)).where(live, state)
            targets[:, t] = (self._answer(state) + 1 + self.symbols).where(live, IGNORE)
        return targets

    def _answer(self, state: Int[Tensor, "n"]) -> Int[Tensor, "n"]:
        return state

    def split_of(self, inputs: Int[Tensor, "n T"]) -> Int[Tensor, "n"]:
        n = (inputs != PAD).sum(1)
        if self.test_length and inputs.shape[1] > self.length:
            longer = n > self.length
            return self._digits.split_of(inputs).where(~longer, 2)
        return self._digits.split_of(inputs).where(n >= self._divisible, 0)

    def slices(self, inputs: Int[Tensor, "n T"], targets: Int[Tensor, "n T"]) -> dict[str, Tensor]:
        """position, and length: the number of symbols in the row."""
        out = super().slices(inputs, targets)
        out["length"] = (inputs != PAD).sum(1, keepdim=True).expand_as(inputs).where(targets != IGNORE, -1)
        return out
