"""Parity of a block of n bits."""

from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor

from tasks._blocks import MarkedBlocks
from tasks.base import register, require_int


@register
@dataclass(frozen=True)
class Parity(MarkedBlocks):
    """N-bit parity (the paper's): [b1, ..., bn, MARK] in noise; the answer is YES when the bits sum to an
    odd number.

    With few bits this fits into a short convolution and is a look-up, not state tracking: see
    `running_parity`.

    >>> import tasks, torch
    >>> task = tasks.get("parity", length=12, bits=3, blocks=1)    # NO 2, YES 3, operands 4-7, noise 8-31
    >>> task.solve(torch.tensor([[20, 9, 4, 7, 5, 0, 8, 11, 30, 12, 9, 25]]))     # bits 0, 1, 1: even, NO
    tensor([[-100, -100, -100, -100, -100,    2, -100, -100, -100, -100, -100, -100]])

    NO and YES are equally likely, all blocks are equally likely.

    Parameters
    ----------
    bits: operands per block.
    operands: token ids that operands use, an even number; the bit of an operand is its id's lowest bit.
    """

    bits: int = 3
    operands: int = 4

    name = "parity"
    version = 1
    summary = "n bits and a marker in noise: is their sum odd?"

    def __post_init__(self) -> None:
        require_int("bits", self.bits, 1)
        require_int("operands", self.operands, 2)
        if self.operands % 2:
            raise ValueError(f"operands: expected an even number, got {self.operands}")
        super().__post_init__()

    @property
    def block_width(self) -> int:
        return self.bits

    @property
    def operand_ids(self) -> int:
        return self.operands

    def _draw_bounds(self) -> tuple[int, ...]:
        return (self.operands,) * self.bits

    def _draw(self, r: tuple[Tensor, ...]) -> tuple[list[Tensor], Tensor]:
        answer = r[0]
        for bit in r[1:]:
            answer = answer ^ bit
        return list(r), answer & 1

    def judge(self, operands: Int[Tensor, "n B w"]) -> Int[Tensor, "n B"]:
        return (operands % 2).sum(-1) % 2
