"""Do two neighbouring operands differ in parity?"""

from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor

from tasks._blocks import MarkedBlocks
from tasks.base import register, require_int


@register
@dataclass(frozen=True)
class Xor(MarkedBlocks):
    """Local XOR (the paper's): [a, b, MARK] in noise; the answer is YES when parity(a) != parity(b).

    >>> import tasks, torch
    >>> task = tasks.get("xor", length=12, blocks=1)   # MARK 0, NO 2, YES 3, operands 4-7, noise 8-31
    >>> task.solve(torch.tensor([[20, 9, 4, 7, 0, 31, 8, 11, 30, 12, 9, 25]]))     # 4 is even, 7 is odd: YES
    tensor([[-100, -100, -100, -100,    3, -100, -100, -100, -100, -100, -100, -100]])

    NO and YES are equally likely; each answer has all its operand pairs equally likely.

    Parameters
    ----------
    operands: token ids that operands use, an even number; the parity of an operand is its id's lowest bit.
    """

    operands: int = 4

    name = "xor"
    version = 1
    summary = "two operands and a marker in noise: do their parities differ?"
    block_width = 2

    def __post_init__(self) -> None:
        require_int("operands", self.operands, 2)
        if self.operands % 2:
            raise ValueError(f"operands: expected an even number, got {self.operands}")
        super().__post_init__()

    @property
    def operand_ids(self) -> int:
        return self.operands

    def _draw_bounds(self) -> tuple[int, ...]:
        return self.operands, self.operands

    def _draw(self, r: tuple[Tensor, ...]) -> tuple[list[Tensor], Tensor]:
        a, b = r
        return [a, b], (a ^ b) & 1

    def judge(self, operands: Int[Tensor, "n B 2"]) -> Int[Tensor, "n B"]:
        return (operands[..., 0] % 2 != operands[..., 1] % 2).long()
