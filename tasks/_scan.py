"""All prefixes of a product in a finite monoid, by table look-ups."""

import torch
from jaxtyping import Int
from torch import Tensor


def prefix(x: Int[Tensor, "n T"], table: Int[Tensor, "size size"]) -> Int[Tensor, "n T"]:
    """Element t of the result is x_0 then x_1 ... then x_t, where table[a, b] is "first a, then b".

    Works on pairs and recurses on half the length: about two look-ups per element and 2 log2(T) steps.
    """
    size, flat = table.shape[1], table.flatten()

    def then(a: Tensor, b: Tensor) -> Tensor:
        return flat.index_select(0, (a * size + b).flatten()).view(a.shape)

    def scan(x: Tensor) -> Tensor:
        length = x.shape[1]
        if length == 1:
            return x
        odd = scan(then(x[:, : length - 1 : 2], x[:, 1::2]))
        out = torch.empty_like(x)
        out[:, 0] = x[:, 0]
        out[:, 1::2] = odd
        if length > 2:
            even = x[:, 2::2]
            out[:, 2::2] = then(odd[:, : even.shape[1]], even)
        return out

    return scan(x)
