"""Say it again, forwards or backwards."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from tasks._lengths import PAD, Words
from tasks._random import Rng, arange
from tasks._splits import CheckDigits, digits_needed
from tasks.base import IGNORE, Labels, register, require_choice, require_int

GO, BLANK = 1, 2


@register
@dataclass(frozen=True)
class Copy(Words):
    """n symbols, GO, then n BLANKs, at which the symbols are asked again in order or in reverse.

    A word with n symbols has 2n + 1 tokens. Final scoring asks for the last one only.

    >>> import tasks, torch
    >>> task = tasks.get("copy", length=63, order="reverse")      # PAD 0, GO 1, BLANK 2, symbols 3-10
    >>> task.solve(torch.tensor([[4, 7, 9, 1, 2, 2, 2]]))
    tensor([[-100, -100, -100, -100,    9,    7,    4]])

    Symbols are independent and uniform; the first ones are the check digits.

    Parameters
    ----------
    order: "same" or "reverse".
    symbols: how many symbol ids there are.
    """

    length: int = 63
    order: str = "same"
    symbols: int = 8

    name = "copy"
    version = 1
    summary = "repeat a word after it has ended, in order or in reverse"
    labels: ClassVar[Labels] = {"control": ("PAD", "GO", "BLANK")}
    unit = 2
    lead = 1

    def __post_init__(self) -> None:
        require_choice("order", self.order, ("same", "reverse"))
        require_int("symbols", self.symbols, 2)
        super().__post_init__()

    @property
    def vocab_size(self) -> int:  # type: ignore[override]
        return 3 + self.symbols

    @property
    def vocabulary(self) -> dict[str, range]:
        return {"control": range(3), "symbol": range(3, self.vocab_size)}

    @property
    def chance(self) -> float:
        return 1 / self.symbols

    @property
    def _digits(self) -> CheckDigits:
        return CheckDigits(tuple(range(digits_needed(self.symbols))), 3, self.symbols)

    def _words_of(self, tokens: int) -> int:
        n = (tokens - 1) // 2
        return int(self.symbols**n) if n >= digits_needed(self.symbols) else 0

    def _word(self, rng: Rng, width: int, tokens: Int[Tensor, "n 1"] | None) -> Int[Tensor, "n T"]:
        n = (width - 1) // 2 if tokens is None else (tokens - 1) // 2
        t = arange(width, rng.device)
        symbol = rng.below(self.symbols, (width - 1) // 2).add_(3)
        word = torch.nn.functional.pad(symbol, (0, width - symbol.shape[1]), value=BLANK)
        return word.masked_fill_(t > n, BLANK).masked_fill_(t == n, GO)

    def _answers(self, inputs: Int[Tensor, "n T"]) -> Int[Tensor, "n T"]:
        t = arange(inputs.shape[1], inputs.device)
        n = t.where(inputs == GO, 0).amax(1, keepdim=True)
        source = t - n - 1 if self.order == "same" else 2 * n - t
        answer = inputs.gather(1, source.clamp_(0, inputs.shape[1] - 1))
        return answer.masked_fill_(t <= n, IGNORE)

    def _oracle(self, inputs: Int[Tensor, "n T"]) -> Int[Tensor, "n T"]:
        """Write to a tape up to GO, then move the head over it."""
        tape, head = torch.zeros_like(inputs), torch.zeros_like(inputs[:, :1])
        targets = torch.full_like(inputs, IGNORE)
        for t in range(inputs.shape[1]):
            token = inputs[:, t : t + 1]
            is_symbol, blank = token > BLANK, token == BLANK
            if self.order == "reverse":
                head = head - blank.long()
            tape.scatter_(1, head, token.where(is_symbol, tape.gather(1, head)))
            targets[:, t : t + 1] = tape.gather(1, head).where(blank, IGNORE)
            head = head + is_symbol.long()
            if self.order == "same":
                head = (head + blank.long()).masked_fill_(token == GO, 0)
        return targets.where(inputs != PAD, IGNORE)
