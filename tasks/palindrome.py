"""Is a block its own mirror image?"""

from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor

from tasks._blocks import MarkedBlocks
from tasks.base import register, require_int


@register
@dataclass(frozen=True)
class Palindrome(MarkedBlocks):
    """Palindrome (the paper's): [a, b, c, MARK] in noise; the answer is YES when a == c.

    Wider blocks mirror around their middle; a block that is no palindrome differs in one pair, drawn at
    random.

    >>> import tasks, torch
    >>> task = tasks.get("palindrome", length=12, blocks=1)
    >>> # MARK 0, NO 2, YES 3, operands 4-11, noise 12-31
    >>> task.solve(torch.tensor([[20, 19, 4, 7, 4, 0, 18, 15, 30, 12, 29, 25]]))
    tensor([[-100, -100, -100, -100, -100,    3, -100, -100, -100, -100, -100, -100]])

    NO and YES are equally likely.

    Parameters
    ----------
    symbols: operands per block.
    operands: token ids that operands use.
    """

    symbols: int = 3
    operands: int = 8

    name = "palindrome"
    version = 1
    summary = "operands and a marker in noise: do they mirror?"

    def __post_init__(self) -> None:
        require_int("symbols", self.symbols, 2)
        require_int("operands", self.operands, 2)
        super().__post_init__()

    @property
    def block_width(self) -> int:
        return self.symbols

    @property
    def operand_ids(self) -> int:
        return self.operands

    @property
    def _block_forms(self) -> int:
        """A lower bound: palindromes only."""
        return int(self.operands ** ((self.symbols + 1) // 2))

    def _draw_bounds(self) -> tuple[int, ...]:
        return (2, self.symbols // 2, self.operands - 1, *(self.operands,) * ((self.symbols + 1) // 2))

    def _draw(self, r: tuple[Tensor, ...]) -> tuple[list[Tensor], Tensor]:
        answer, pair, shift, *half = r
        mirror = []
        for j in reversed(range(self.symbols // 2)):
            other = (half[j] + shift + 1).remainder_(self.operands)
            mirror.append(other.where((answer == 0) & (pair == j), half[j]))
        return [*half, *mirror], answer

    def judge(self, operands: Int[Tensor, "n B w"]) -> Int[Tensor, "n B"]:
        return (operands == operands.flip(-1)).all(-1).long()
