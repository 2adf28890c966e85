"""What `run_with_cache` returns, and states computed again from a scan's inputs."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from prism.mixer import ScanFactors

MAX_BYTES = 4 * 2**30
"""Size above which caches and replayed states are refused unless the caller raises it."""


class ActivationCache(Mapping[str, Tensor]):
    """Name -> tensor: detached copies that neither later runs nor in-place edits elsewhere change.

    `state(layer, at)` computes states again; `factors(layer)` are the scan's own inputs, interventions
    included.
    """

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._scans: dict[int, tuple[ScanFactors, dict[int, Tensor], str]] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise KeyError(f"not in this cache: {name!r}{near(name, self._tensors)}")
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def stack(self, name: str) -> Float[Tensor, "layers ..."]:
        """The tensors of one short name ("mixer.delta") of all layers that have it, stacked in order."""
        found = [tensor for full, tensor in self.items() if full.split(".", 2)[-1] == name]
        if not found:
            shorts = {full.split(".", 2)[-1] for full in self if full.startswith("blocks.")}
            raise KeyError(f"not in this cache: {name!r}{near(name, shorts)}")
        return torch.stack(found)

    def factors(self, layer: int) -> ScanFactors:
        """k, v, log_decay, beta, write_k, write_v, initial_state as the scan of that layer took them.

        Hence A_t = exp(log_decay_t) (I - beta_t k_t k_t^T) and B_t = beta_t v_t k_t^T + sum write_v
        write_k^T for every kind of erase and base write.
        """
        return self._scan(layer)[0]

    def state(
        self,
        layer: int,
        at: int | Sequence[int],
        *,
        dtype: torch.dtype | None = None,
        max_bytes: int = MAX_BYTES,
    ) -> Float[Tensor, "B P HV K V"]:
        """The states after the tokens `at` (negative: from the end), by the recurrence on the kept factors.

        State patches are in it. `dtype`: torch.float64 computes in it.

        Raises:
            KeyError: the cache was made without that layer's state.
            ValueError: a position outside the sequence, or more than `max_bytes`.
        """
        factors, patches, backend = self._scan(layer)
        return replay_state(factors, at, patches, backend=backend, dtype=dtype, max_bytes=max_bytes)

    def _scan(self, layer: int) -> tuple[ScanFactors, dict[int, Tensor], str]:
        if layer not in self._scans:
            have = ", ".join(map(str, self._scans)) or "no layer"
            name = f"blocks.{layer}.mixer.state"
            raise KeyError(f"this cache can replay {have}; expected run_with_cache(names=[{name!r}])")
        return self._scans[layer]

    @property
    def nbytes(self) -> int:
        """Bytes held, those of the factors included."""
        held = list(self._tensors.values())
        for factors, patches, _ in self._scans.values():
            held += [t for t in (*factors, *patches.values()) if t is not None]
        return sum(t.nbytes for t in held)


def replay_state(
    factors: ScanFactors,
    at: int | Sequence[int],
    patches: Mapping[int, Tensor] | None = None,
    *,
    backend: str = "auto",
    dtype: torch.dtype | None = None,
    max_bytes: int = MAX_BYTES,
) -> Float[Tensor, "B P HV K V"]:
    """States after the tokens `at`, from a scan's inputs. `patches`: position -> state that was put in
    there.
    """
    B, T, HV, V = factors.v.shape
    K = factors.k.shape[-1]
    wanted = [_position(p, T) for p in ([at] if isinstance(at, int) else at)]
    dtype = dtype or factors.v.dtype
    wide = torch.promote_types(dtype, torch.float32)
    size = B * len(wanted) * HV * K * V * wide.itemsize
    if size > max_bytes:
        raise ValueError(
            f"at: expected states of at most max_bytes={max_bytes}, came {len(wanted)} that need {size}"
        )
    tensors = [None if f is None else f.to(dtype) for f in factors[:-1]]
    state = None if factors.initial_state is None else factors.initial_state.to(wide)
    factors = ScanFactors._make([*tensors, state])
    patches = patches or {}
    found: dict[int, Tensor] = {}
    start = 0
    for stop in sorted({p + 1 for p in (*wanted, *patches)}):
        part = factors.part(start, stop, state)
        _, state = part.scan(part.k, output_final_state=True, backend=backend)
        assert state is not None
        if stop - 1 in patches:
            state = patches[stop - 1].to(wide)
        found[stop - 1] = state
        start = stop
    if not wanted:
        return factors.v.new_zeros(B, 0, HV, K, V, dtype=wide)
    return torch.stack([found[p] for p in wanted], 1)


def _position(position: int, T: int) -> int:
    if not -T <= position < T:
        raise ValueError(f"at: expected positions in [{-T}, {T}), came {position}")
    return position % T


def near(name: str, names: Iterable[str]) -> str:
    """The end of an error message: names close to one that is unknown, or all of them."""
    names = list(names)
    close = difflib.get_close_matches(name, names, n=5, cutoff=0.5)
    return f"; close names: {', '.join(close)}" if close else f"; names: {', '.join(sorted(names))}"
