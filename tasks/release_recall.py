"""The release's recall tasks: mqar, poly_recall, variable_tracking."""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from tasks._random import Rng, arange, sort_
from tasks._release import Release
from tasks._splits import CheckDigits
from tasks.base import register

QUERY, MARK = 1, 2
LOW = 10


@dataclass(frozen=True)
class _Recall(Release):
    @property
    def _noise(self) -> range:
        return range(LOW, self.vocab_size)

    @property
    def chance(self) -> float:
        return 1 / len(self._noise)

    def _ask_(self, inputs: Tensor, key: Int[Tensor, "n"]) -> None:
        inputs[:, -2] = QUERY
        inputs[:, -1] = key


@register
@dataclass(frozen=True)
class MqarRelease(_Recall):
    """mqar as released: 2 pairs at even places of the first half, 1 query; values may equal keys.

    The ceiling is 1 because a key stands at an even place and noise never equals a key; looking for the
    first occurrence of the queried key errs where a value equals it.

    >>> import tasks, torch
    >>> task = tasks.get("mqar_release", length=24)        # QUERY 1, tokens 10-31
    >>> task.solve(torch.tensor([[10, 20, 11, 12, 13, 11] + [14] * 16 + [1, 11]]))[0, -1]
    tensor(12)
    """

    name = "mqar_release"
    version = 1
    summary = "the public release's mqar: two pairs, one query, values may equal keys"

    @property
    def _half(self) -> int:
        return self.length // 2

    @property
    def _digits(self) -> CheckDigits:
        return CheckDigits((0,), LOW, len(self._noise))

    def _digit_columns(self, inputs: Int[Tensor, "n T"]) -> Int[Tensor, "n 1"]:
        key = inputs[:, : self._half : 2] == inputs[:, -1:]
        return 2 * key.long().argmax(1, keepdim=True) + 1

    def _draw(self, rng: Rng) -> tuple[Tensor, Tensor]:
        A = len(self._noise)
        keys = rng.distinct(A, 2)
        at = 2 * rng.distinct((self._half + 1) // 2, 2)
        r = rng.below((A - 2,) * self.length + (A, A, 2))
        inputs = r[:, : self.length].contiguous()
        # Noise is uniform over the ids that are no key of the row: step over both, the smaller first.
        for key in sort_(keys.clone()).unbind(1):
            inputs += inputs >= key[:, None]
        inputs += LOW
        for j in range(2):
            self._place_(inputs, at[:, j], [keys[:, j] + LOW, r[:, self.length + j] + LOW])
        self._ask_(inputs, keys.gather(1, r[:, -1:])[:, 0] + LOW)
        return inputs, inputs[:, -1]

    def _rows(self, rng: Rng, split: str) -> tuple[Tensor, Tensor]:
        inputs, targets = super()._rows(rng, split)
        targets[:, -1] = inputs.gather(1, self._digit_columns(inputs))[:, 0]
        return inputs, targets

    def posterior(self, inputs: Int[Tensor, "n T"]) -> Int[Tensor, "n V"]:
        """All on the token after the one even place of the first half that holds the queried key."""
        here = inputs[:, : self._half : 2] == inputs[:, -1:]
        after = inputs[:, 1 : self._half + 1 : 2][:, : here.shape[1]]
        return self._one_hot((after * here).sum(1))

    @property
    def ceiling(self) -> float:
        return 1.0


@register
@dataclass(frozen=True)
class PolyRecallRelease(_Recall):
    """poly_recall as released: no context, two pairs after a marker, one query.

    >>> import tasks, torch
    >>> task = tasks.get("poly_recall_release", length=24)     # QUERY 1, MARK 2, tokens 10-31
    >>> task.solve(torch.tensor([[10, 2, 11, 12, 13, 11] + [14] * 16 + [1, 13]]))[0, -1]
    tensor(11)
    """

    name = "poly_recall_release"
    version = 1
    summary = "the public release's poly-recall: two pairs after a marker, no context"

    def _draw(self, rng: Rng) -> tuple[Tensor, Tensor]:
        A = len(self._noise)
        inputs = self._noise_tokens(rng)
        keys = rng.distinct(A, 2) + LOW
        r = rng.below((A, A, self.length - 9, 2))
        values, which = r[:, :2] + LOW, r[:, 3:]
        mark = torch.full_like(r[:, 0], MARK)
        self._place_(inputs, r[:, 2], [mark, keys[:, 0], values[:, 0], keys[:, 1], values[:, 1]])
        self._ask_(inputs, keys.gather(1, which)[:, 0])
        return inputs, values.gather(1, which)[:, 0]

    def posterior(self, inputs: Int[Tensor, "n T"]) -> Int[Tensor, "n V"]:
        mark = (inputs == MARK).long().argmax(1, keepdim=True)
        first = inputs.gather(1, mark + 1) == inputs[:, -1:]
        return self._one_hot(inputs.gather(1, mark + torch.where(first, 2, 4))[:, 0])

    @property
    def ceiling(self) -> float:
        return 1.0


@register
@dataclass(frozen=True)
class VariableTrackingRelease(_Recall):
    """variable_tracking as released: three unmarked (variable, value) writes in noise that contains the
    names.

    No chain, no mark: any occurrence of the queried name may be a write of it, and a write that begins at
    the next place hides its value. `posterior` sums over all triples of write places.

    >>> import tasks, torch
    >>> task = tasks.get("variable_tracking_release", length=24)     # QUERY 1, tokens 10-31
    >>> task.solve(torch.tensor([[15, 20, 15, 21] + [14] * 18 + [1, 15]]))[0, -1]
    tensor(21)
    """

    name = "variable_tracking_release"
    version = 1
    summary = "the public release's variable tracking: three unmarked writes in noise, no chain"

    @property
    def _places(self) -> int:
        return self.length - 10

    def _draw(self, rng: Rng) -> tuple[Tensor, Tensor]:
        A = len(self._noise)
        inputs = self._noise_tokens(rng)
        names = rng.distinct(A, 3) + LOW
        at = sort_(rng.distinct(self._places, 3))
        r = rng.below((3, 3, 3, A, A, A, 6))
        which, values = r[:, :3], r[:, 3:6] + LOW
        keys = names.gather(1, which)
        for j in range(3):
            self._place_(inputs, at[:, j], [keys[:, j], values[:, j]])
        # One of the names that were written, each with equal probability: 6 is a multiple of 1, 2 and 3.
        new = torch.ones_like(which, dtype=torch.bool)
        new[:, 1] = which[:, 1] != which[:, 0]
        new[:, 2] = (which[:, 2] != which[:, 0]) & (which[:, 2] != which[:, 1])
        rank = new.cumsum(1) - 1
        chosen = (rank == r[:, 6:] % (rank[:, 2:] + 1)) & new
        key = (keys * chosen).sum(1)
        last = arange(3, rng.device).where(keys == key[:, None], -1).amax(1, keepdim=True)
        self._ask_(inputs, key)
        return inputs, values.gather(1, last)[:, 0]

    def posterior(self, inputs: Int[Tensor, "n T"]) -> Int[Tensor, "n V"]:
        """A triple of places weighs 3(A-1)(A-2), 3(A-2) or 2 when its tokens are 1, 2 or 3 different names.

        That is, up to a factor, P(which names) * P(the tokens | names) * P(this name asked | names), with
        A ids; the rest of the row is uniform whatever the triple is. The answer is the token after the
        triple's last place p that holds the queried name, unless the triple contains p + 1 as well: then
        it is hidden, uniform over the A ids.
        """
        A, P = len(self._noise), self._places
        one, two, three = 3 * (A - 1) * (A - 2), 3 * (A - 2), 2
        body, after = inputs[:, :P], inputs[:, 1 : P + 1]
        ours = body == inputs[:, -1:]
        before = ours.long().cumsum(1) - ours.long()
        count = inputs.new_zeros(len(inputs), self.vocab_size).scatter_add_(1, body, torch.ones_like(body))
        mine = count.gather(1, inputs[:, -1:])
        others = P - mine
        # Pairs of other places with equal names, and the same without the place p + 1.
        equal = (count * (count - 1) // 2).sum(1, keepdim=True) - mine * (mine - 1) // 2
        next_ = (arange(P, inputs.device) + 1 < P) & (after != inputs[:, -1:])
        like = (count.gather(1, after) - 1) * next_
        left = others - next_.long()
        equal_left = equal - like
        differ_left = left * (left - 1) // 2 - equal_left
        shown = one * (before * (before - 1) // 2) + two * before * left
        shown += two * equal_left + three * differ_left
        hidden = next_ * (two * before + two * like + three * (others - 1 - like))
        weights = inputs.new_zeros(len(inputs), self.vocab_size)
        weights.scatter_add_(1, after, A * shown * ours)
        weights[:, LOW:] += (hidden * ours).sum(1, keepdim=True)
        return weights
