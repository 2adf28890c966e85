"""Arithmetic modulo n with brackets."""

from dataclasses import dataclass
from functools import lru_cache
from math import comb

import torch
from jaxtyping import Int
from torch import Tensor

from tasks._lengths import PAD, Words
from tasks._random import Rng, arange, sort_, table
from tasks._splits import CheckDigits, digits_needed
from tasks.base import IGNORE, register, require_int
from tasks.modular_arithmetic import apply, require_operators

OPEN, CLOSE = 1, 2


@lru_cache(maxsize=32)
def _results(operators: str, n: int) -> tuple[int, ...]:
    """Entry (operator * n + a) * n + b."""
    a, b = torch.meshgrid(torch.arange(n), torch.arange(n), indexing="ij")
    return tuple(int(x) for name in operators for x in apply(name, a, b, n).flatten())


@register
@dataclass(frozen=True)
class BracketArithmetic(Words):
    """A fully bracketed expression; the answer at every closing bracket is what the bracket is worth, mod n.

    A word with k operators has 4k + 1 tokens. Its tree is uniform among the binary trees with k + 1 leaves,
    its numbers and operators are independent and uniform. Final scoring asks for the whole expression.

    >>> import tasks, torch
    >>> task = tasks.get("bracket_arithmetic", modulus=5, length=61)   # PAD 0, ( 1, ) 2, + - * 3-5, 0-4: 6-10
    >>> task.solve(torch.tensor([[1, 8, 5, 1, 9, 4, 10, 2, 2]]))       # (2 * (3 - 4))
    tensor([[-100, -100, -100, -100, -100, -100, -100,   10,    9]])

    Products favour 0; with "+-" answers are balanced. The first numbers of a word are its check digits.

    Parameters
    ----------
    modulus: n, 2 to 64.
    operators: which of "+-*" occur.
    """

    length: int = 61
    modulus: int = 5
    operators: str = "+-*"

    name = "bracket_arithmetic"
    version = 1
    summary = "value modulo n of every bracket of an expression"
    unit = 4
    lead = 1

    def __post_init__(self) -> None:
        require_int("modulus", self.modulus, 2, 64)
        require_operators(self.operators)
        super().__post_init__()

    @property
    def vocab_size(self) -> int:  # type: ignore[override]
        return self._low + self.modulus

    @property
    def _low(self) -> int:
        return 3 + len(self.operators)

    @property
    def vocabulary(self) -> dict[str, range]:
        return {
            "control": range(3),
            "operator": range(3, self._low),
            "number": range(self._low, self.vocab_size),
        }

    @property
    def labels(self) -> dict[str, tuple[str, ...]]:
        return {
            "control": ("PAD", "(", ")"),
            "operator": tuple(self.operators),
            "number": tuple(map(str, range(self.modulus))),
        }

    @property
    def chance(self) -> float:
        return 1 / self.modulus

    @property
    def majority(self) -> float:
        """The most frequent answer's share of a test batch, exact."""
        return _majority(self)

    @property
    def _digits(self) -> CheckDigits:
        # Wherever the first numbers stand, they are no later than this in a word long enough to be divided.
        count = digits_needed(self.modulus)
        return CheckDigits(tuple(range(count)), self._low, self.modulus)

    def _digit_columns(self, inputs: Int[Tensor, "n T"]) -> Int[Tensor, "n c"]:
        number = inputs >= self._low
        rank = number.long().cumsum(1)
        count = len(self._digits.columns)
        return torch.stack([((rank == j + 1) & number).long().argmax(1) for j in range(count)], 1)

    def _words_of(self, tokens: int) -> int:
        k = (tokens - 1) // 4
        if k + 1 < digits_needed(self.modulus):
            return 0
        return int(comb(2 * k, k) // (k + 1) * self.modulus ** (k + 1) * len(self.operators) ** k)

    def _word(self, rng: Rng, width: int, tokens: Int[Tensor, "n 1"] | None) -> Int[Tensor, "n T"]:
        most = (width - 1) // 4
        nodes, i = 2 * most + 1, arange(2 * most + 1, rng.device)
        k = most if tokens is None else (tokens - 1) // 4
        size = 2 * k + 1
        live = (i < size).expand(rng.n, nodes)

        # Cycle lemma: k operators (+1) and k + 1 numbers (-1) in random order, rotated to begin after the
        # first minimum of their sums, are the nodes of a uniform binary tree in preorder.
        low = (1 << nodes.bit_length()) - 1
        order = sort_((rng.words(nodes) & ~low).masked_fill_(~live, (2**63 - 1) & ~low).bitwise_or_(i)) & low
        inner = torch.zeros_like(live).scatter_(1, order[:, :most], (i[:most] < k).expand(rng.n, most))
        height = (2 * inner.long() - 1).masked_fill_(~live, 0).cumsum(1)
        start = ((height + nodes) * nodes + i).amin(1, keepdim=True) % nodes + 1
        turned = i + start
        inner = inner.gather(1, torch.where(live, turned - (turned >= size) * size, i))
        leaf = live & ~inner

        # A number is followed by an operator, except the last. Sorted by level, "(" and operators alternate.
        height = (2 * inner.long() - 1).masked_fill_(~live, 0).cumsum(1)
        level = (height + leaf.long()).masked_fill_(~live, nodes)
        pairs = sort_((level << 32) | i)[:, 1:].view(rng.n, most, 2) & 0xFFFFFFFF
        root = nodes
        opener = torch.full((rng.n, nodes + 1), root, device=rng.device)
        opener.scatter_(1, pairs[:, :, 1], pairs[:, :, 0])
        parent = torch.full_like(opener, root)
        parent[:, 1:-1] = torch.where(inner[:, :-1], i[:-1], opener[:, :-2])

        depth = torch.nn.functional.pad(inner.long(), (0, 1))
        above = parent
        for _ in range(most.bit_length()):
            depth = depth + depth.gather(1, above)
            above = above.gather(1, above)
        inside, opener = depth.gather(1, parent[:, :-1]), opener[:, :-1].masked_fill(~leaf, root)
        closes = (inside - depth.gather(1, opener)).masked_fill_(~leaf, 0)

        joins = leaf & (opener != root)
        after = (1 + closes + joins).masked_fill_(~live, 0).cumsum(1)
        at = (after - 1 - closes - joins.long()).masked_fill_(~live, width)
        r = rng.below((self.modulus,) * nodes + (len(self.operators),) * nodes)
        out = torch.full((rng.n, width + 1), CLOSE, device=rng.device)
        out.scatter_(1, at, (r[:, :nodes] + self._low).masked_fill_(inner, OPEN))
        out.scatter_(1, (after - 1).masked_fill_(~joins, width), r[:, nodes:] + 3)
        return out[:, :width].contiguous()

    def _answers(self, inputs: Int[Tensor, "n T"]) -> Int[Tensor, "n T"]:
        """Match brackets by sorting, then one closing bracket of every row after the other."""
        n, width = self.modulus, inputs.shape[1]
        most, t = (width - 1) // 4, arange(width, inputs.device)
        opens, closes = inputs == OPEN, inputs == CLOSE
        structural = (inputs > PAD) & (inputs < self._low)
        depth = (opens.long() - closes.long()).cumsum(1) + closes.long()
        level = depth.masked_fill_(~structural, width)
        # On each level the structural tokens are ( . ) ( . ) ...; rows with fewer brackets end in others.
        triples = sort_((level << 32) | t)[:, : 3 * most].reshape(-1, most, 3) & 0xFFFFFFFF
        operator, close = triples[:, :, 1], triples[:, :, 2]
        close = close.masked_fill(~closes.gather(1, close), width)
        by_time = sort_((close << 32) | operator)
        close, operator = by_time >> 32, by_time & 0xFFFFFFFF
        verb = (inputs.gather(1, operator) - 3).clamp_(0, len(self.operators) - 1) * (n * n)
        operands = torch.stack((operator - 1, close - 1), 2).clamp_(0)
        value = torch.nn.functional.pad((inputs - self._low).clamp_(0), (0, 1))
        results = table(_results(self.operators, n), inputs.device)
        scale = table((n, 1), inputs.device)
        for j in range(most):
            operand = value.gather(1, operands[:, j]) * scale
            result = results.index_select(0, operand.sum(1).add_(verb[:, j]))
            value.scatter_(1, close[:, j : j + 1], result[:, None])
        return (value[:, :width] + self._low).masked_fill_(~closes, IGNORE)

    def slices(self, inputs: Int[Tensor, "n T"], targets: Int[Tensor, "n T"]) -> dict[str, Tensor]:
        """operators: how many the bracket holds; depth: how many brackets are open before it closes."""
        out = super().slices(inputs, targets)
        scored, opens, closes = targets != IGNORE, inputs == OPEN, inputs == CLOSE
        depth = opens.cumsum(1) - closes.cumsum(1) + closes.long()
        t = arange(inputs.shape[1], inputs.device)
        # Its opening bracket is the last one before it on the same level.
        same = (depth[:, :, None] == depth[:, None]) & opens[:, None] & (t < t[:, None])
        begin = t.where(same, -1).amax(2)
        out["operators"] = ((t - begin) // 4).where(scored, -1)
        out["depth"] = depth.where(scored, -1)
        return out

    def _oracle(self, inputs: Int[Tensor, "n T"]) -> Int[Tensor, "n T"]:
        """Rewrite ( a . b ) to its value wherever it stands, close the gap, until nothing changes."""
        n, width = self.modulus, inputs.shape[1]
        targets = torch.full_like(inputs, IGNORE)
        place = arange(width, inputs.device).expand_as(inputs)
        word = inputs
        for _ in range((width - 1) // 4):
            window = torch.nn.functional.pad(word, (0, 4), value=PAD).unfold(1, 5, 1)
            first, a, verb, b, last = window.unbind(2)
            found = (first == OPEN) & (last == CLOSE) & (a >= self._low) & (b >= self._low)
            value = torch.zeros_like(word)
            for j, name in enumerate(self.operators):
                value = apply(name, a - self._low, b - self._low, n).where(verb == 3 + j, value)
            value += self._low
            closing = torch.nn.functional.pad(place, (0, 4), value=0).unfold(1, 5, 1)[..., 4]
            rows, columns = found.nonzero(as_tuple=True)
            targets[rows, closing[rows, columns]] = value[rows, columns]
            keep = torch.ones_like(found)
            for j in range(1, 5):
                keep[:, j:] &= ~found[:, :-j]
            word = value.where(found, word)
            # Survivors move left in order; what is dropped becomes PAD at the end.
            order = (~keep).long().argsort(stable=True, dim=1)
            word = word.where(keep, PAD).gather(1, order)
            place = place.gather(1, order)
        return targets


def _apply_table(operators: str, p: Tensor, q: Tensor, n: int) -> Tensor:
    """Distribution of a . b for independent a ~ p, b ~ q and a uniform operator."""
    total, joint = torch.zeros(n, dtype=torch.double), torch.outer(p, q)
    a, b = torch.meshgrid(torch.arange(n), torch.arange(n), indexing="ij")
    for name in operators:
        total.index_add_(0, apply(name, a, b, n).flatten(), joint.flatten() / len(operators))
    return total


@lru_cache(maxsize=32)
def _majority(task: BracketArithmetic) -> float:
    n, most = task.modulus, (task.width("test") - 1) // 4 + 1
    trees = [0, *(comb(2 * k, k) // (k + 1) for k in range(most))]  # by leaves
    value = [torch.zeros(n, dtype=torch.double), torch.full((n,), 1 / n, dtype=torch.double)]
    for leaves in range(2, most + 1):
        parts = (
            trees[i]
            * trees[leaves - i]
            / trees[leaves]
            * _apply_table(task.operators, value[i], value[leaves - i], n)
            for i in range(1, leaves)
        )
        value.append(torch.stack(list(parts)).sum(0))
    total = torch.zeros(n, dtype=torch.double)
    low, high = task.lengths("test")
    for tokens in range(low, high + 1, task.unit):
        leaves = (tokens - 1) // 4 + 1
        if task.scoring == "final":
            total += value[leaves]
            continue
        for i in range(2, leaves + 1):
            # Subtrees of i leaves in all trees: a tree with one of its leaves marked, and what hangs there.
            rest = leaves - i + 1
            total += value[i] * (rest * trees[rest] * trees[i] / trees[leaves])
    return float(total.max() / total.sum())
