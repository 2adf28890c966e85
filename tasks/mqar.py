"""Multi-query associative recall."""

from dataclasses import dataclass
from math import perm

import torch
from jaxtyping import Int
from torch import Tensor

from tasks._random import Rng, arange
from tasks._splits import CheckDigits, digits_needed
from tasks.base import IGNORE, Task, register, require_int


@register
@dataclass(frozen=True)
class Mqar(Task):
    """`pairs` key-value pairs, then `queries` keys in noise; the answer at each queried key is its value.

    After Arora et al. 2023 (zoology), with noise, and with keys, values and noise in ranges of their own.

    >>> import tasks, torch
    >>> task = tasks.get("mqar", length=12, pairs=3, queries=2, vocab_size=40)
    >>> # noise 0-7, keys 8-23, values 24-39
    >>> task.solve(torch.tensor([[8, 30, 11, 24, 9, 39, 2, 11, 5, 0, 8, 7]]))
    tensor([[-100, -100, -100, -100, -100, -100, -100,   24, -100, -100,   30, -100]])

    The keys of a row are distinct, in random order; values are independent and uniform; each query asks
    for a pair drawn uniformly and independently. The values of the first pairs are the check digits of
    the split.

    Parameters
    ----------
    length: tokens per sequence.
    vocab_size: all ids: noise first, the rest divided equally into keys and values (an odd one is a value).
    pairs: pairs to remember.
    queries: questions per sequence (default: as many as pairs, or as fit); one in each of as many equal
        stretches.
    noise: token ids that fill the places between queries.
    """

    length: int = 64
    vocab_size: int = 64
    pairs: int = 8
    queries: int | None = None
    noise: int = 8

    name = "mqar"
    version = 1
    summary = "associative recall: many key-value pairs, many queries"

    def __post_init__(self) -> None:
        require_int("length", self.length, 3)
        require_int("noise", self.noise, 1)
        require_int("vocab_size", self.vocab_size, self.noise + 4)
        require_int("pairs", self.pairs, 1, min((self.length - 1) // 2, self._keys))
        require_int("queries", self._queries, 1, self.length - 2 * self.pairs)
        if len(self._digits.columns) > self.pairs:
            raise ValueError(
                f"vocab_size: expected more values (or more pairs) so that the values of all pairs take at "
                f"least 16 forms, got {len(self._values)} values and {self.pairs} pairs"
            )
        self._require_sequences()

    @property
    def _keys(self) -> int:
        return (self.vocab_size - self.noise) // 2

    @property
    def _values(self) -> range:
        return range(self.noise + self._keys, self.vocab_size)

    @property
    def _queries(self) -> int:
        return min(self.pairs, self.length - 2 * self.pairs) if self.queries is None else self.queries

    @property
    def vocabulary(self) -> dict[str, range]:
        return {
            "noise": range(self.noise),
            "key": range(self.noise, self.noise + self._keys),
            "value": self._values,
        }

    @property
    def _digits(self) -> CheckDigits:
        count = digits_needed(len(self._values))
        return CheckDigits(tuple(range(1, 2 * count, 2)), self._values.start, len(self._values))

    @property
    def chance(self) -> float:
        return 1 / len(self._values)

    @property
    def sequences(self) -> int:
        """A lower bound: the pairs alone."""
        return int(perm(self._keys, self.pairs) * len(self._values) ** self.pairs)

    def _rows(self, rng: Rng, split: str) -> tuple[Tensor, Tensor]:
        K, Q, rest = self.pairs, self._queries, self.length - 2 * self.pairs
        stretch = rest // Q
        keys = rng.distinct(self._keys, K).add_(self.noise)
        r = rng.below((len(self._values),) * K + (self.noise,) * rest + (K,) * Q + (stretch,) * Q)
        values, noise, asked, offset = r.split((K, rest, Q, Q), 1)
        pairs = torch.stack((keys, values + self._values.start), 2).flatten(1)
        inputs = torch.cat((pairs, noise), 1)
        at = offset + (arange(Q, rng.device) * stretch + 2 * K)
        inputs.scatter_(1, at, keys.gather(1, asked))
        self._assign_(inputs, split, rng)
        targets = torch.full_like(inputs, IGNORE)
        targets.scatter_(1, at, inputs.gather(1, 2 * asked + 1))
        return inputs, targets

    def solve(self, inputs: Int[Tensor, "n T"]) -> Int[Tensor, "n T"]:
        """A dictionary from key to value, filled from the pairs and read at every later key."""
        K = self.pairs
        # One entry more than there are keys: a read at a token that is no key lands there.
        known = inputs.new_full((len(inputs), self._keys + 1), IGNORE)
        known.scatter_(1, inputs[:, 0 : 2 * K : 2] - self.noise, inputs[:, 1 : 2 * K : 2])
        late = inputs[:, 2 * K :] - self.noise
        answers = known.gather(1, late.where((late >= 0) & (late < self._keys), self._keys))
        return torch.cat((torch.full_like(inputs[:, : 2 * K], IGNORE), answers), 1)

    def slices(self, inputs: Int[Tensor, "n T"], targets: Int[Tensor, "n T"]) -> dict[str, Tensor]:
        """pair: which pair is asked for. distance: tokens from that value to the query."""
        out = super().slices(inputs, targets)
        scored = targets != IGNORE
        same = inputs[:, :, None] == inputs[:, None, 0 : 2 * self.pairs : 2]
        pair = same.long().argmax(2)
        out["pair"] = pair.where(scored, -1)
        out["distance"] = (arange(inputs.shape[1], inputs.device) - 2 * pair - 1).where(scored, -1)
        return out
