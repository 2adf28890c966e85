"""A selector picks a channel."""

from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor

from tasks._blocks import MarkedBlocks
from tasks.base import register, require_int


@register
@dataclass(frozen=True)
class Mux(MarkedBlocks):
    """Multiplexer (the paper's): [selector, v0, v1, MARK] in noise; the answer is the value of the
    selected channel.

    >>> import tasks, torch
    >>> task = tasks.get("mux", length=12, blocks=1)      # MARK 0, selectors 2-3, values 4-11, noise 12-31
    >>> task.solve(torch.tensor([[20, 19, 3, 7, 5, 0, 18, 15, 30, 12, 29, 25]]))     # channel 1
    tensor([[-100, -100, -100, -100, -100,    5, -100, -100, -100, -100, -100, -100]])

    Selectors and values are independent and uniform, so answers are balanced.

    Parameters
    ----------
    channels: how many values a block has; there are as many selectors.
    value_ids: how many token ids values have.
    """

    channels: int = 2
    value_ids: int = 8

    name = "mux"
    version = 1
    summary = "a selector, values and a marker in noise: the selected value"
    own_answers = False

    def __post_init__(self) -> None:
        require_int("channels", self.channels, 2)
        require_int("value_ids", self.value_ids, 2)
        super().__post_init__()

    @property
    def labels(self) -> dict[str, tuple[str, ...]]:
        return {"control": ("MARK", "QUERY"), "selector": tuple(f"CH{i}" for i in range(self.channels))}

    @property
    def vocabulary(self) -> dict[str, range]:
        low = 2 + self.channels
        return {
            "control": range(2),
            "selector": range(2, low),
            "value": range(low, low + self.value_ids),
            "noise": self._noise,
        }

    @property
    def answers(self) -> int:
        return self.value_ids

    @property
    def block_width(self) -> int:
        return 1 + self.channels

    @property
    def operand_ids(self) -> int:
        return self.channels + self.value_ids

    @property
    def answer_low(self) -> int:
        return 2 + self.channels

    def _draw_bounds(self) -> tuple[int, ...]:
        return (self.channels, *(self.value_ids,) * self.channels)

    def _draw(self, r: tuple[Tensor, ...]) -> tuple[list[Tensor], Tensor]:
        selector, *values = r
        answer = values[0]
        for j in range(1, self.channels):
            answer = values[j].where(selector == j, answer)
        return [selector, *(v + self.channels for v in values)], answer

    def judge(self, operands: Int[Tensor, "n B w"]) -> Int[Tensor, "n B"]:
        channel = operands[..., :1].clamp(0, self.channels - 1)
        return operands[..., 1:].gather(-1, channel)[..., 0] - self.channels
