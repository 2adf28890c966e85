"""The release's logic tasks: xor, parity, modular_add, palindrome, silence_gate, mux."""

from dataclasses import dataclass
from functools import lru_cache
from math import comb, factorial, prod

import torch
from jaxtyping import Int
from torch import Tensor

from tasks._random import Rng
from tasks._release import Release
from tasks._splits import CheckDigits
from tasks.base import register


@dataclass(frozen=True)
class _Logic(Release):
    length: int = 128


def _at_mark(inputs: Int[Tensor, "n T"], mark: int, offset: int) -> Int[Tensor, "n"]:
    """The token `offset` places from the first mark."""
    column = (inputs == mark).long().argmax(1, keepdim=True) + offset
    return inputs.gather(1, column)[:, 0]


@register
@dataclass(frozen=True)
class XorRelease(_Logic):
    """xor as released: [a, b, MARK] anywhere in noise, the question at the end.

    Operands are 5 .. vocab_size-11, one more odd than even id, so FALSE is a little more frequent.

    >>> import tasks, torch
    >>> task = tasks.get("xor_release", length=24)         # QUERY 1, MARK 2, TRUE 3, FALSE 4, noise 5-31
    >>> task.solve(torch.tensor([[9, 8, 7, 2] + [14] * 19 + [1]]))[0, -1]
    tensor(3)
    """

    name = "xor_release"
    version = 1
    summary = "the public release's local xor"

    @property
    def _noise(self) -> range:
        return range(5, self.vocab_size)

    @property
    def _operands(self) -> range:
        return range(5, self.vocab_size - 10)

    @property
    def chance(self) -> float:
        return 0.5

    @property
    def majority(self) -> float:
        odd = len([x for x in self._operands if x % 2]) / len(self._operands)
        return max(odd**2 + (1 - odd) ** 2, 2 * odd * (1 - odd))

    def _draw(self, rng: Rng) -> tuple[Tensor, Tensor]:
        inputs, n = self._noise_tokens(rng), len(self._operands)
        a, b, start = rng.below((n, n, self.length - 8)).unbind(1)
        self._place_(inputs, start, [a + 5, b + 5, torch.full_like(a, 2)])
        inputs[:, -1] = 1
        return inputs, 4 - ((a ^ b) & 1)

    def posterior(self, inputs: Int[Tensor, "n T"]) -> Int[Tensor, "n V"]:
        differ = _at_mark(inputs, 2, -2) % 2 != _at_mark(inputs, 2, -1) % 2
        return self._one_hot(torch.where(differ, 3, 4))

    @property
    def ceiling(self) -> float:
        return 1.0


@register
@dataclass(frozen=True)
class ParityRelease(_Logic):
    """parity as released: three tokens of 4-7, then MARK, anywhere in noise; the question at the end.

    >>> import tasks, torch
    >>> task = tasks.get("parity_release", length=24)      # EVEN 0, ODD 1, QUERY 2, MARK 3, noise 4-31
    >>> task.solve(torch.tensor([[9, 5, 6, 4, 3] + [14] * 18 + [2]]))[0, -1]
    tensor(1)
    """

    name = "parity_release"
    version = 1
    summary = "the public release's 3-bit parity"

    @property
    def _noise(self) -> range:
        return range(4, self.vocab_size)

    @property
    def chance(self) -> float:
        return 0.5

    def _draw(self, rng: Rng) -> tuple[Tensor, Tensor]:
        inputs = self._noise_tokens(rng)
        a, b, c, start = rng.below((4, 4, 4, self.length - 8)).unbind(1)
        self._place_(inputs, start, [a + 4, b + 4, c + 4, torch.full_like(a, 3)])
        inputs[:, -1] = 2
        return inputs, (a ^ b ^ c) & 1

    def posterior(self, inputs: Int[Tensor, "n T"]) -> Int[Tensor, "n V"]:
        total = sum(_at_mark(inputs, 3, -j) for j in (1, 2, 3))
        return self._one_hot(torch.as_tensor(total) % 2)

    @property
    def ceiling(self) -> float:
        return 1.0


@register
@dataclass(frozen=True)
class ModularAddRelease(_Logic):
    """modular_add as released: [a, b, MARK] with a, b below 16, in noise that contains the numbers.

    >>> import tasks, torch
    >>> task = tasks.get("modular_add_release", length=24)     # numbers 0-15, noise 0-29, MARK 30, QUERY 31
    >>> task.solve(torch.tensor([[9, 15, 6, 30] + [14] * 19 + [31]]))[0, -1]
    tensor(5)
    """

    name = "modular_add_release"
    version = 1
    summary = "the public release's addition modulo 16"

    @property
    def _noise(self) -> range:
        return range(self.vocab_size - 2)

    @property
    def chance(self) -> float:
        return 1 / 16

    def _draw(self, rng: Rng) -> tuple[Tensor, Tensor]:
        inputs = self._noise_tokens(rng)
        a, b, start = rng.below((16, 16, self.length - 5)).unbind(1)
        self._place_(inputs, start, [a, b, torch.full_like(a, self.vocab_size - 2)])
        inputs[:, -1] = self.vocab_size - 1
        return inputs, (a + b) & 15

    def posterior(self, inputs: Int[Tensor, "n T"]) -> Int[Tensor, "n V"]:
        mark = self.vocab_size - 2
        total = _at_mark(inputs, mark, -2) + _at_mark(inputs, mark, -1)
        return self._one_hot(total.where(total < 16, total - 16))

    @property
    def ceiling(self) -> float:
        return 1.0


@register
@dataclass(frozen=True)
class PalindromeRelease(_Logic):
    """palindrome as released: [a, b, c, d, MARK]; the label is whether a is one of c and d.

    The check digit is b, which has no influence on the label.

    >>> import tasks, torch
    >>> task = tasks.get("palindrome_release", length=24)      # NO 0, YES 1, MARK 3, QUERY 4, noise 5-31
    >>> task.solve(torch.tensor([[9, 15, 6, 8, 15, 3] + [14] * 17 + [4]]))[0, -1]
    tensor(1)
    """

    name = "palindrome_release"
    version = 1
    summary = "the public release's palindrome, which is none: a in {c, d}"

    @property
    def _noise(self) -> range:
        return range(5, self.vocab_size)

    @property
    def _digits(self) -> CheckDigits:
        return CheckDigits((0,), 5, len(self._noise))

    def _digit_columns(self, inputs: Int[Tensor, "n T"]) -> Int[Tensor, "n 1"]:
        return (inputs == 3).long().argmax(1, keepdim=True) - 3

    @property
    def chance(self) -> float:
        return 0.5

    def _draw(self, rng: Rng) -> tuple[Tensor, Tensor]:
        inputs, A = self._noise_tokens(rng), len(self._noise)
        a, b, c, d, yes, fourth, start = rng.below((A, A, A - 1, A - 1, 2, 2, self.length - 5)).unbind(1)
        c, d = c + (c >= a), d + (d >= a)
        c = a.where((yes == 1) & (fourth == 0), c)
        d = a.where((yes == 1) & (fourth == 1), d)
        self._place_(inputs, start, [a + 5, b + 5, c + 5, d + 5, torch.full_like(a, 3)])
        inputs[:, -1] = 4
        return inputs, yes

    def posterior(self, inputs: Int[Tensor, "n T"]) -> Int[Tensor, "n V"]:
        a, c, d = (_at_mark(inputs, 3, -j) for j in (4, 2, 1))
        return self._one_hot(((a == c) | (a == d)).long())

    @property
    def ceiling(self) -> float:
        return 1.0


@lru_cache(maxsize=64)
def ambiguous_ceiling(places: int, width: int, p: float, shares: tuple[float, ...]) -> float:
    """Accuracy of the best answer when a block hides among chance look-alikes of itself.

    The block begins at one of `places` places; each other place begins a look-alike with probability p.
    Two blocks never overlap (their first tokens stand nowhere else in a block), so k places that keep a
    distance of `width` are all look-alikes with probability p**k, and their number J has the factorial
    moments E[C(J, k)] = p**k N_k with N_k the number of such k-subsets. True and false blocks then have
    independent answers of the same distribution `shares` and equal posteriors: the best answer is right
    with probability E[largest multiplicity of J + 1 draws] / (J + 1).
    """
    most = 12  # with places * p <= 1, P(J > 12) is below 1e-9

    def subsets(length: int, k: int) -> int:
        return comb(max(length - (k - 1) * (width - 1), 0), k) if k else 1

    moments = []
    for k in range(2 * most):
        ways = sum(
            subsets(max(left, 0), i) * subsets(max(right, 0), k - i)
            for start in range(places)
            for left, right in [(start - width + 1, places - start - width)]
            for i in range(k + 1)
        )
        moments.append(p**k * ways / places)
    total = 0.0
    for j in range(most):
        chance = sum((-1) ** (k - j) * comb(k, j) * moments[k] for k in range(j, 2 * most))
        total += chance * _largest(j + 1, shares) / (j + 1)
    return total


def _largest(draws: int, shares: tuple[float, ...]) -> float:
    """Expected largest multiplicity among independent draws: sum over m of P(largest > m)."""
    expected = 0.0
    for m in range(draws):
        # Coefficients of the product over answers of sum_{c <= m} (share z)^c / c!.
        series = [1.0] + [0.0] * draws
        for share in shares:
            factor = [share**c / factorial(c) for c in range(m + 1)]
            series = [sum(factor[c] * series[d - c] for c in range(min(m, d) + 1)) for d in range(draws + 1)]
        expected += 1 - factorial(draws) * series[draws]
    return expected


@dataclass(frozen=True)
class _Ambiguous(_Logic):
    """Noise spans every id, so that it may hold what looks like a block: all of them are equally likely."""

    @property
    def _noise(self) -> range:
        return range(self.vocab_size)

    @property
    def _block(self) -> list[range]:
        """Which ids a block may have at each of its places, as the answerer sees it."""
        raise NotImplementedError

    @property
    def _places(self) -> int:
        """How many places a block may begin at."""
        raise NotImplementedError

    @property
    def _answer_shares(self) -> list[float]:
        """Probability of each answer."""
        raise NotImplementedError

    @property
    def ceiling(self) -> float:
        """Exact (`ambiguous_ceiling`) where at most one look-alike is expected, else measured."""
        if not self._rare:
            return super().ceiling
        return ambiguous_ceiling(self._places, len(self._block), self._p, tuple(self._answer_shares))

    @property
    def ceiling_error(self) -> float:
        return 0.0 if self._rare else super().ceiling_error

    @property
    def _p(self) -> float:
        return prod(len(ids) / self.vocab_size for ids in self._block)

    @property
    def _rare(self) -> bool:
        return self._places * self._p <= 1

    def _candidates(self, inputs: Int[Tensor, "n T"], places: int, block: list[range]) -> Int[Tensor, "n P"]:
        """1 where a block may begin."""
        fits = torch.ones_like(inputs[:, :places], dtype=torch.bool)
        for j, ids in enumerate(block):
            token = inputs[:, j : j + places]
            fits &= (token >= ids.start) & (token < ids.stop)
        return fits.long()


@register
@dataclass(frozen=True)
class SilenceGateRelease(_Ambiguous):
    """silence_gate as released: [gate, key, value] in noise of every id, triggers included.

    Every [gate, key, value] with the queried key is equally likely to be the true one, so the Bayes rule
    takes the answer that most of them give.

    >>> import tasks, torch
    >>> task = tasks.get("silence_gate_release", length=24)    # NULL 0, ON 1, OFF 2, QUERY 3, data 4-26
    >>> task.solve(torch.tensor([[9, 2, 7, 15, 1, 7, 16, 1, 7, 16] + [14] * 12 + [3, 7]]))[0, -1]
    tensor(16)
    """

    name = "silence_gate_release"
    version = 1
    summary = "the public release's silence gate, with triggers in the noise"

    @property
    def _data(self) -> range:
        return range(4, self.vocab_size - 5)

    @property
    def _places(self) -> int:
        return self.length - 5

    @property
    def _block(self) -> list[range]:
        return [range(1, 3), range(1), self._data]  # one key: the queried one

    @property
    def _answer_shares(self) -> list[float]:
        return [0.5, *[0.5 / len(self._data)] * len(self._data)]

    @property
    def chance(self) -> float:
        return 1 / (len(self._data) + 1)

    @property
    def majority(self) -> float:
        """Always NULL."""
        return 0.5

    def _draw(self, rng: Rng) -> tuple[Tensor, Tensor]:
        inputs, n = self._noise_tokens(rng), len(self._data)
        key, value, off, start = rng.below((n, n, 2, self._places)).unbind(1)
        key, value = key + 4, value + 4
        self._place_(inputs, start, [off + 1, key, value])
        inputs[:, -2] = 3
        inputs[:, -1] = key
        return inputs, value.masked_fill(off == 1, 0)

    def posterior(self, inputs: Int[Tensor, "n T"]) -> Int[Tensor, "n V"]:
        P = self._places
        every = range(self.vocab_size)
        fits = self._candidates(inputs, P, [range(1, 3), every, self._data])
        fits *= inputs[:, 1 : P + 1] == inputs[:, -1:]
        answer = inputs[:, 2 : P + 2].where(inputs[:, :P] == 1, 0)
        return inputs.new_zeros(len(inputs), self.vocab_size).scatter_add_(1, answer, fits)


@register
@dataclass(frozen=True)
class MuxRelease(_Ambiguous):
    """mux as released: [selector, v0, v1, MARK] in noise of every id.

    >>> import tasks, torch
    >>> task = tasks.get("mux_release", length=24)     # QUERY 1, MARK 2, selectors 3, 4; v0 5-15, v1 16-31
    >>> task.solve(torch.tensor([[9, 4, 7, 20, 2] + [14] * 18 + [1]]))[0, -1]
    tensor(20)
    """

    name = "mux_release"
    version = 1
    summary = "the public release's multiplexer, with controls in the noise"

    @property
    def _middle(self) -> int:
        return self.vocab_size // 2

    @property
    def _places(self) -> int:
        return self.length - 10

    @property
    def _block(self) -> list[range]:
        return [range(3, 5), range(5, self._middle), range(self._middle, self.vocab_size), range(2, 3)]

    @property
    def _answer_shares(self) -> list[float]:
        first, second = self._middle - 5, self.vocab_size - self._middle
        return [0.5 / first] * first + [0.5 / second] * second

    @property
    def chance(self) -> float:
        return 1 / (self.vocab_size - 5)

    @property
    def majority(self) -> float:
        """One of the fewer values of channel 0."""
        return 0.5 / (self._middle - 5)

    def _draw(self, rng: Rng) -> tuple[Tensor, Tensor]:
        inputs, middle = self._noise_tokens(rng), self._middle
        bounds = (middle - 5, self.vocab_size - middle, 2, self._places)
        v0, v1, second, start = rng.below(bounds).unbind(1)
        v0, v1 = v0 + 5, v1 + middle
        self._place_(inputs, start, [second + 3, v0, v1, torch.full_like(v0, 2)])
        inputs[:, -1] = 1
        return inputs, v1.where(second == 1, v0)

    def posterior(self, inputs: Int[Tensor, "n T"]) -> Int[Tensor, "n V"]:
        P = self._places
        fits = self._candidates(inputs, P, self._block)
        answer = inputs[:, 1 : P + 1].where(inputs[:, :P] == 3, inputs[:, 2 : P + 2])
        return inputs.new_zeros(len(inputs), self.vocab_size).scatter_add_(1, answer, fits)
