"""Counter-based random integers: word j of row i is a hash of (the batch's key, i, j), in int64 tensor
operations only.

Nothing here has a state that outlives a call: no generator is seeded, none is advanced, so the same call
gives the same integers on any device, in any process, in any order and for any batch size. The hash is
SplitMix64's output function (Steele, Lea, Flood 2014) on an odd-increment counter, with a key per row
that went through the same function.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from jaxtyping import Int
from torch import Tensor

_GOLDEN, _M1, _M2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_U64, _U32 = 2**64 - 1, 2**32 - 1


def signed(x: int) -> int:
    """The int64 with the same 64 bits as x."""
    x &= _U64
    return x - 2**64 if x >> 63 else x


def mix(x: int) -> int:
    """SplitMix64's finaliser, a bijection of 64-bit integers."""
    x &= _U64
    x = (x ^ x >> 30) * _M1 & _U64
    x = (x ^ x >> 27) * _M2 & _U64
    return x ^ x >> 31


def mix_(x: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
    """The same, in place on int64. torch's right shift is arithmetic, hence the masks."""
    x.bitwise_xor_((x >> 30).bitwise_and_(2**34 - 1)).mul_(signed(_M1))
    x.bitwise_xor_((x >> 27).bitwise_and_(2**37 - 1)).mul_(signed(_M2))
    return x.bitwise_xor_((x >> 31).bitwise_and_(2**33 - 1))


def key(*parts: int | str) -> int:
    """One 64-bit key from integers and strings, order and boundaries included."""
    h = 0
    for part in parts:
        data = part.encode() if isinstance(part, str) else int(part).to_bytes(16, "little", signed=True)
        for word in (len(data), *(int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8))):
            h = mix(h + _GOLDEN ^ mix(word))
    return h


@lru_cache(maxsize=1024)
def table(values: tuple[int, ...], device: torch.device) -> Int[Tensor, "N"]:
    """A constant row of integers, copied to the device once. Read only: it is shared."""
    return torch.tensor(values, dtype=torch.int64, device=device)


@lru_cache(maxsize=1024)
def _offsets(first: int, count: int, device: torch.device) -> Int[Tensor, "count"]:
    return torch.arange(first + 1, first + 1 + count, device=device).mul_(signed(_GOLDEN))


def scale_(words: Int[Tensor, "*shape"], bound: int | Tensor) -> Int[Tensor, "*shape"]:
    """The low 32 bits of each word as a number in [0, bound), in place; bound at most 2**31.

    Multiply and shift (Lemire 2019) without rejection: a value's probability is off by at most bound /
    2**32 of itself, and exact where bound is a power of two.
    """
    return words.bitwise_and_(_U32).mul_(bound).bitwise_right_shift_(32)


def sort_(words: Int[Tensor, "n count"]) -> Int[Tensor, "n count"]:
    """Rows in ascending order, in place where it can be. numpy sorts short rows faster than torch."""
    if words.device.type != "cpu":
        return words.sort(dim=-1).values
    words.numpy().sort(axis=-1)
    return words


def _to_device(keys: Sequence[int], device: torch.device) -> Int[Tensor, "keys"]:
    keys_here = torch.tensor([signed(key) for key in keys], device="cpu")
    # From pinned memory the copy is queued; otherwise the host would wait for all work before it.
    return (keys_here.pin_memory() if device.type == "cuda" else keys_here).to(device, non_blocking=True)


class Rng:
    """Random integers for rows start .. start+n-1 of a batch; each call draws words that no other call
    has drawn.

    `key` stands for everything but the row number; several keys give these rows of each in turn. Two methods
    called in the same order give the same integers.
    """

    def __init__(self, key: int | Sequence[int], n: int, start: int = 0, device: torch.device | str = "cpu"):
        keys = [key] if isinstance(key, int) else key
        self.n, self.device, self._used = n * len(keys), torch.device(device), 0
        rows = torch.arange(start, start + n, device=self.device).mul_(signed(_GOLDEN))
        if len(keys) == 1:
            rows.add_(signed(keys[0]))
        else:
            rows = (rows + _to_device(keys, self.device)[:, None]).flatten()
        self._rows: Int[Tensor, "n 1"] = mix_(rows)[:, None]

    def words(self, count: int) -> Int[Tensor, "n count"]:
        """Uniform 64-bit words."""
        offsets = _offsets(self._used, count, self.device)
        self._used += count
        return mix_(self._rows + offsets)

    def below(self, bound: int | tuple[int, ...], count: int | None = None) -> Int[Tensor, "n count"]:
        """Independent uniform integers in [0, bound); a tuple gives each column a bound of its own."""
        columns = len(bound) if isinstance(bound, tuple) else 1 if count is None else count
        halves = self.words((columns + 1) // 2).view(torch.int32)[:, :columns].to(torch.int64)
        return scale_(halves, table(bound, self.device) if isinstance(bound, tuple) else bound)

    def distinct(self, bound: int, count: int) -> Int[Tensor, "n count"]:
        """`count` different integers of [0, bound) in random order: the start of a random permutation."""
        if count > bound:
            raise ValueError(f"count: expected at most bound = {bound}, got {count}")
        if bound <= max(128, 4 * count):
            low = (1 << (bound - 1).bit_length()) - 1
            words = self.words(bound).bitwise_and_(~low).bitwise_or_(_offsets_plain(bound, self.device))
            return sort_(words)[:, :count] & low
        # Many more values than picks: the first `count` different ones of a longer draw. A run of `count`
        # neighbours at its end makes sure that there are enough, whatever was drawn.
        drawn = self.below(bound, 2 * count + 17)
        run = (drawn[:, -1:] + _offsets_plain(count, self.device)).remainder_(bound)
        values = torch.cat((drawn[:, :-1], run), 1)
        length = values.shape[1]
        packed = sort_((values << 32).bitwise_or_(_offsets_plain(length, self.device)))
        values, place = packed >> 32, packed & _U32
        place[:, 1:] += (values[:, 1:] == values[:, :-1]) * length
        return sort_((place << 32).bitwise_or_(values))[:, :count] & _U32

    def permutation(self, size: int) -> Int[Tensor, "n size"]:
        """A uniform random order of 0 .. size-1."""
        return self.distinct(size, size)


@lru_cache(maxsize=1024)
def _offsets_plain(count: int, device: torch.device) -> Int[Tensor, "count"]:
    return torch.arange(count, device=device)


def arange(count: int, device: torch.device) -> Int[Tensor, "count"]:
    """0 .. count-1, made once per device. Read only: it is shared."""
    return _offsets_plain(count, torch.device(device))
