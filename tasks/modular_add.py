"""Sum of a few numbers modulo n."""

from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor

from tasks._blocks import MarkedBlocks
from tasks.base import register, require_int


@register
@dataclass(frozen=True)
class ModularAdd(MarkedBlocks):
    """Modular addition (the paper's): [a, b, MARK] in noise; the answer is the number (a + b) mod n.

    >>> import tasks, torch
    >>> task = tasks.get("modular_add", length=12, modulus=8, blocks=1)   # MARK 0, numbers 2-9, noise 10-31
    >>> task.solve(torch.tensor([[20, 19, 7, 6, 0, 31, 18, 11, 30, 12, 29, 25]]))     # 5 + 4 = 1 mod 8
    tensor([[-100, -100, -100, -100,    3, -100, -100, -100, -100, -100, -100, -100]])

    Operands are independent and uniform, so answers are balanced.

    Parameters
    ----------
    modulus: n; operands are 0 .. n-1.
    terms: numbers to add.
    """

    modulus: int = 8
    terms: int = 2

    name = "modular_add"
    version = 1
    summary = "numbers and a marker in noise: their sum modulo n"
    own_answers = False

    def __post_init__(self) -> None:
        require_int("modulus", self.modulus, 2)
        require_int("terms", self.terms, 1)
        super().__post_init__()

    @property
    def labels(self) -> dict[str, tuple[str, ...]]:
        return {"control": ("MARK", "QUERY"), "operand": tuple(map(str, range(self.modulus)))}

    @property
    def answers(self) -> int:
        return self.modulus

    @property
    def block_width(self) -> int:
        return self.terms

    @property
    def operand_ids(self) -> int:
        return self.modulus

    def _draw_bounds(self) -> tuple[int, ...]:
        return (self.modulus,) * self.terms

    def _draw(self, r: tuple[Tensor, ...]) -> tuple[list[Tensor], Tensor]:
        total = r[0].clone()
        for term in r[1:]:
            total += term
        return list(r), total.remainder_(self.modulus)

    def judge(self, operands: Int[Tensor, "n B w"]) -> Int[Tensor, "n B"]:
        """Count up, back to 0 at n."""
        total = operands[..., 0]
        for j in range(1, self.terms):
            total = total + operands[..., j]
            total = total.where(total < self.modulus, total - self.modulus)
        return total
