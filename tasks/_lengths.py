"""Words of one length or of many: padding, scoring and splits that the word tasks share.

A word of n tokens is padded on the right with PAD (0) up to the batch's width; a PAD is never scored.
Scoring "dense" asks at every position where the family has an answer, "final" at the last token only.

Splits. With a fixed length, or lengths from `min_length` to `length`, the check digits of a word decide
its split. Lengths with fewer than 1,024 words are too short to be divided: they are training only. With
`test_length`, test words are longer than any training word, and so disjoint by length.
"""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Int
from torch import Tensor

from tasks._random import Rng, arange
from tasks._splits import CheckDigits
from tasks.base import IGNORE, MIN_SEQUENCES, Task, require_choice, require_int

PAD = 0


@dataclass(frozen=True)
class Words(Task):
    """A family gives `_word`, `_answers`, `_oracle`, `_digits`, `_words_of` and its vocabulary.

    Parameters
    ----------
    length: tokens of the longest training word, and the width of training and validation batches.
    min_length: tokens of the shortest training word (default: all words have `length` tokens).
    test_length: (shortest, longest) test word, both above `length`; default: as in training.
    scoring: "dense" or "final".
    """

    length: int = 64
    min_length: int | None = None
    test_length: tuple[int, int] | None = None
    scoring: str = "dense"

    # A word has `lead` tokens and `unit` more for each of its steps, of which there is at least one.
    unit: ClassVar[int] = 1
    lead: ClassVar[int] = 0

    def __post_init__(self) -> None:
        self._require_length("length", self.length, self.lead + self.unit, None)
        if self.min_length is not None:
            self._require_length("min_length", self.min_length, self.lead + self.unit, self.length)
        if self.test_length is not None:
            pair = self.test_length
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise ValueError(f"test_length: expected (shortest, longest), got {pair!r}")
            self._require_length("test_length[0]", pair[0], self.length + 1, None)
            self._require_length("test_length[1]", pair[1], pair[0], None)
        require_choice("scoring", self.scoring, ("dense", "final"))
        if self.length <= max(self._digits.columns):
            raise ValueError(
                f"length: expected at least {max(self._digits.columns) + 1}, so that the word has room "
                f"for the check digits of its split, got {self.length}"
            )
        self._require_sequences()

    def _require_length(self, argument: str, value: int, low: int, high: int | None) -> None:
        require_int(argument, value, low, high)
        if (value - self.lead) % self.unit:
            near = value - (value - self.lead) % self.unit
            raise ValueError(
                f"{argument}: expected {self.lead} plus a multiple of {self.unit}, such as {near} or "
                f"{near + self.unit}, got {value}"
            )

    # --- what a family implements ---

    def _word(self, rng: Rng, width: int, tokens: Int[Tensor, "n 1"] | None) -> Int[Tensor, "n T"]:
        """Words of the given numbers of tokens (None: all `width`); what comes after a word is ignored."""
        raise NotImplementedError

    def _answers(self, inputs: Int[Tensor, "n T"]) -> Int[Tensor, "n T"]:
        """Targets of padded words at every position, in parallel over time; ignored after the word."""
        raise NotImplementedError

    def _oracle(self, inputs: Int[Tensor, "n T"]) -> Int[Tensor, "n T"]:
        """The same by another algorithm, -100 after the word."""
        raise NotImplementedError

    @property
    def _digits(self) -> CheckDigits:
        raise NotImplementedError

    def _words_of(self, tokens: int) -> int:
        """How many words of this length there are (or a lower bound)."""
        raise NotImplementedError

    # --- what they share ---

    @property
    def sequences(self) -> int:
        """Words of the longest training length (a lower bound where lengths are mixed)."""
        return self._words_of(self.length)

    def width(self, split: str = "train") -> int:
        return self.test_length[1] if split == "test" and self.test_length else self.length

    def lengths(self, split: str) -> tuple[int, int]:
        """Tokens of the shortest and the longest word of a split."""
        if split == "test" and self.test_length:
            return self.test_length
        low = self.min_length or self.length
        return (low if split == "train" else max(low, self._divisible)), self.length

    @property
    def _divisible(self) -> int:
        """The shortest length that is divided among splits."""
        tokens = self.lead + self.unit
        while self._words_of(tokens) < MIN_SEQUENCES or tokens <= max(self._digits.columns):
            tokens += self.unit
        return tokens

    def _rows(self, rng: Rng, split: str) -> tuple[Tensor, Tensor]:
        low, high = self.lengths(split)
        width, tokens, divided = self.width(split), None, None
        if low < high:
            tokens = rng.below((high - low) // self.unit + 1).mul_(self.unit).add_(low)
        inputs = self._word(rng, width, tokens)
        if tokens is not None:
            pad = arange(width, rng.device) >= tokens
            inputs.masked_fill_(pad, PAD)
            divided = tokens[:, 0] >= self._divisible if low < self._divisible else None
        if not (split == "test" and self.test_length):
            self._assign_(inputs, split, rng, divided)
        targets = self._answers(inputs)
        if tokens is not None:
            targets.masked_fill_(pad, IGNORE)
        if self.scoring == "final":
            last = arange(width, rng.device) == (width if tokens is None else tokens) - 1
            targets = targets.where(last, IGNORE)
        return inputs, targets

    def solve(self, inputs: Int[Tensor, "n T"]) -> Int[Tensor, "n T"]:
        targets = self._oracle(inputs)
        if self.scoring == "dense":
            return targets
        n = (inputs != PAD).sum(1, keepdim=True)
        return targets.where(arange(inputs.shape[1], inputs.device) == n - 1, IGNORE)

    def split_of(self, inputs: Int[Tensor, "n T"]) -> Int[Tensor, "n"]:
        n = (inputs != PAD).sum(1)
        if self.test_length and inputs.shape[1] > self.length:
            return super().split_of(inputs).where(n <= self.length, 2)
        return super().split_of(inputs).where(n >= self._divisible, 0)

    def slices(self, inputs: Int[Tensor, "n T"], targets: Int[Tensor, "n T"]) -> dict[str, Tensor]:
        """position, and length: the number of tokens in the row."""
        out = super().slices(inputs, targets)
        n = (inputs != PAD).sum(1, keepdim=True).expand_as(inputs)
        out["length"] = n.where(targets != IGNORE, -1)
        return out
