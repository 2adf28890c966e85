"""Arithmetic modulo n without brackets."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Int
from torch import Tensor

from tasks._lengths import PAD, Words
from tasks._random import Rng, table
from tasks._scan import prefix
from tasks._splits import CheckDigits, digits_needed
from tasks._tracking import length_weights
from tasks.base import IGNORE, register, require_int

OPERATORS = "+-*"


def require_operators(value: str) -> None:
    """Raise ValueError unless value is one or more different operators of "+-*"."""
    if not isinstance(value, str) or not value or len(set(value)) < len(value) or set(value) - set(OPERATORS):
        raise ValueError(f"operators: expected different characters of '+-*', got {value!r}")


@lru_cache(maxsize=32)
def _products(n: int) -> tuple[int, ...]:
    """Elements r * n + v: "multiply by v" (r = 0) or "forget, then v" (r = 1). Entry: first a, then b."""
    return tuple(
        b if b >= n else a // n * n + (a % n) * (b % n) % n for a in range(2 * n) for b in range(2 * n)
    )


@register
@dataclass(frozen=True)
class ModularArithmetic(Words):
    """Numbers and operators in turn; the answer at every number is the expression's value so far, modulo n.

    A product binds before sums and differences, as in Delétang et al. 2023. See `bracket_arithmetic` for the
    one that needs a stack.

    >>> import tasks, torch
    >>> task = tasks.get("modular_arithmetic", modulus=5, length=63)   # PAD 0, + - * 1-3, numbers 4-8
    >>> task.solve(torch.tensor([[6, 1, 7, 3, 8, 2, 5]]))              # 2 + 3 * 4 - 1
    tensor([[   6, -100,    4, -100,    8, -100,    7]])

    Numbers and operators are independent and uniform. Products favour 0; with "+-" answers are balanced.

    Parameters
    ----------
    modulus: n, 2 to 64.
    operators: which of "+-*" occur.
    """

    length: int = 63
    modulus: int = 5
    operators: str = "+-*"

    name = "modular_arithmetic"
    version = 1
    summary = "value modulo n of an expression without brackets, asked at every number"
    unit = 2
    lead = -1

    def __post_init__(self) -> None:
        require_int("modulus", self.modulus, 2, 64)
        require_operators(self.operators)
        super().__post_init__()

    @property
    def vocab_size(self) -> int:  # type: ignore[override]
        return 1 + len(self.operators) + self.modulus

    @property
    def _low(self) -> int:
        return 1 + len(self.operators)

    @property
    def vocabulary(self) -> dict[str, range]:
        return {"pad": range(1), "operator": range(1, self._low), "number": range(self._low, self.vocab_size)}

    @property
    def labels(self) -> dict[str, tuple[str, ...]]:
        return {"operator": tuple(self.operators), "number": tuple(map(str, range(self.modulus)))}

    @property
    def chance(self) -> float:
        return 1 / self.modulus

    @property
    def majority(self) -> float:
        """The most frequent answer's share of a test batch, exact."""
        return _majority(self)

    @property
    def _digits(self) -> CheckDigits:
        return CheckDigits(tuple(range(0, 2 * digits_needed(self.modulus), 2)), self._low, self.modulus)

    def _words_of(self, tokens: int) -> int:
        numbers = (tokens + 1) // 2
        return int(self.modulus**numbers * len(self.operators) ** (numbers - 1))

    def _code(self, operator: str) -> int:
        """Token of an operator, -1 if it does not occur."""
        return 1 + self.operators.index(operator) if operator in self.operators else -1

    def _word(self, rng: Rng, width: int, tokens: Int[Tensor, "n 1"] | None) -> Int[Tensor, "n T"]:
        inputs = rng.below((self.modulus, len(self.operators)) * (width // 2) + (self.modulus,))
        inputs[:, ::2] += self._low
        inputs[:, 1::2] += 1
        return inputs

    def _answers(self, inputs: Int[Tensor, "n T"]) -> Int[Tensor, "n T"]:
        n, number, operator = self.modulus, inputs[:, ::2] - self._low, inputs[:, 1::2]
        # A term's running product: an operator other than * begins a new term, which carries its sign.
        times = operator == self._code("*")
        element, later = number.clamp(0), number[:, 1:].clamp(0)
        negative = (n - later).masked_fill_(later == 0, 0)
        signed = negative.where(operator == self._code("-"), later)
        element[:, 1:] = later.where(times, signed + n)
        term = prefix(element, table(_products(n), inputs.device).view(2 * n, 2 * n))
        term -= (term >= n) * n
        value = term.clone()
        value[:, 1:] += term[:, :-1].masked_fill(times, 0).cumsum(1)
        targets = torch.full_like(inputs, IGNORE)
        targets[:, ::2] = value % n + self._low
        return targets

    def _oracle(self, inputs: Int[Tensor, "n T"]) -> Int[Tensor, "n T"]:
        """Read from left to right, with the sum of finished terms and the term in hand."""
        n, zero = self.modulus, torch.zeros_like(inputs[:, 0])
        done, term = zero, zero
        targets = torch.full_like(inputs, IGNORE)
        for t in range(0, inputs.shape[1], 2):
            number = inputs[:, t] - self._low
            operator = inputs[:, t - 1] if t else zero + self._code("+") if "+" in self.operators else zero
            times = operator == self._code("*")
            done = done.where(times, (done + term) % n)
            signed = (-number).where(operator == self._code("-"), number) % n
            term = ((term * number) % n).where(times, signed)
            targets[:, t] = ((done + term) % n + self._low).where(inputs[:, t] != PAD, IGNORE)
        return targets


def apply(operator: str, a: Tensor, b: Tensor, n: int) -> Tensor:
    """a (operator) b modulo n."""
    return (a + b if operator == "+" else a - b if operator == "-" else a * b) % n


@lru_cache(maxsize=64)
def _majority(task: ModularArithmetic) -> float:
    n = task.modulus
    done, term = (x.flatten() for x in torch.meshgrid(torch.arange(n), torch.arange(n), indexing="ij"))
    step = torch.zeros(n * n, n * n, dtype=torch.double)
    for operator in task.operators:
        for number in range(n):
            if operator == "*":
                after = done * n + term * number % n
            else:
                after = (done + term) % n * n + (number if operator == "+" else -number) % n
            step[torch.arange(n * n), after] += 1 / (n * len(task.operators))
    p = torch.zeros(n * n, dtype=torch.double)
    p[:n] = 1 / n
    weights, total = length_weights(task)[::2], torch.zeros(n, dtype=torch.double)
    for weight in weights:
        total.index_add_(0, (done + term) % n, p * weight)
        p = p @ step
    return float(total.max() / weights.sum())
