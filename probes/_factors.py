"""What the probes read of a layer: the factors that its scan receives, and exact replays from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from prism import prism_scan

MAX_BYTES = 4 << 30
SCAN_INPUTS = ("k", "v", "log_decay", "beta", "write_k", "write_v")


@dataclass(frozen=True)
class Factors:
    """The inputs of one layer's scan, in float32 (float64 where the model is), L = 0 where nothing is
    refined.

    stored is the dtype that the layer held k, v and the writes in: what tolerances follow.
    """

    layer: int
    stored: torch.dtype
    k: Float[Tensor, "B T H K"]
    v: Float[Tensor, "B T HV V"]
    log_decay: Float[Tensor, "B T HV"]
    beta: Float[Tensor, "B T HV"]
    write_k: Float[Tensor, "B T HV L K"]
    write_v: Float[Tensor, "B T HV L V"]
    extra: dict[str, Tensor]

    @property
    def key(self) -> Float[Tensor, "B T HV K"]:
        """k with one copy per value head."""
        return self.k.repeat_interleave(self.v.shape[2] // self.k.shape[2], dim=2)

    @property
    def shape(self) -> tuple[int, int]:
        """(V, K) of the state."""
        return self.v.shape[-1], self.k.shape[-1]

    def double(self) -> Factors:
        """The same in float64."""
        wide: dict[str, Any] = {name: getattr(self, name).double() for name in SCAN_INPUTS}
        return replace(self, **wide)

    def slice(self, start: int, stop: int) -> Factors:
        """Tokens start to stop."""
        return replace(self, **{name: getattr(self, name)[:, start:stop] for name in SCAN_INPUTS}, extra={})

    def scan(
        self, q: Float[Tensor, "B T H K"], initial_state: Tensor | None = None, **changes: Tensor | None
    ) -> tuple[Float[Tensor, "B T HV V"], Float[Tensor, "B HV K V"]]:
        """S_t q_t at scale 1 for every token, and the last state; changes replace scan inputs by name."""
        given: dict[str, Any] = {name: getattr(self, name) for name in SCAN_INPUTS} | changes
        if initial_state is not None:
            initial_state = initial_state.to(self.k.dtype)
        out, state = prism_scan(
            q, **given, scale=1.0, initial_state=initial_state, output_final_state=True, validate=False
        )
        assert state is not None
        return out, state

    def read_before(
        self,
        key: Float[Tensor, "B T HV K"] | None = None,
        initial_state: Float[Tensor, "B HV K V"] | None = None,
    ) -> Float[Tensor, "B T HV V"]:
        """S_{t-1} k_t for every token, exactly; alpha_t times it is Sbar_t k_t. key stands for k where given.

        One scan whose query at t is k_{t+1}: what it reads after token t is the read before token t + 1.
        """
        grouped, key = (self.k, self.key) if key is None else (key, key)
        factors = self if grouped.shape[2] == self.k.shape[2] else replace(self, k=self.key)
        query = torch.cat([grouped[:, 1:], torch.zeros_like(grouped[:, :1])], 1)
        after, _ = factors.scan(query, initial_state)
        if initial_state is None:
            first = torch.zeros_like(after[:, :1])
        else:
            first = torch.einsum("bhkv,bhk->bhv", initial_state.to(after), key[:, 0])[:, None]
        return torch.cat([first, after[:, :-1]], 1)

    def states(
        self, at: Sequence[int] | Int[Tensor, " P"], initial_state: Tensor | None = None
    ) -> Float[Tensor, "B P HV K V"]:
        """The state after each of the ascending positions `at`, replayed segment by segment."""
        return torch.stack(list(self.replay(at, initial_state)), 1)

    def replay(
        self, at: Sequence[int] | Int[Tensor, " P"], initial_state: Tensor | None = None
    ) -> Iterator[Float[Tensor, "B HV K V"]]:
        """The states of `states`, one after the other: only one is held at a time."""
        state, start = initial_state, 0
        for position in at:
            part = self.slice(start, int(position) + 1)
            state = part.scan(torch.zeros_like(part.k), state)[1]
            start = int(position) + 1
            yield state


def layers(model: Any, inputs: Int[Tensor, "B T"], extra: Sequence[str] = ()) -> Iterator[Factors]:
    """What the scan of every layer receives for `inputs`, with further tensors by short hook name in
    `.extra`.

    The mixer's own k, v and beta are in `.extra` wherever it has them. Layers whose mixer feeds no scan
    (attention, say) are passed over. As many layers are read in one forward pass as fit 4 GiB. Interventions
    that the user has active on the model count: what is measured is the run with them.

    Raises ValueError where no layer feeds the scan, where such a layer lacks a tensor of `extra`, and where a
    hook replaces a state: a replay from factors would not show what the model then did.
    """
    if inputs.ndim != 2 or inputs.is_floating_point():
        raise ValueError(f"inputs: expected integer tokens [B, T], got {inputs.dtype} {list(inputs.shape)}")
    inputs = inputs.to(next(model.parameters()).device)
    B, T = inputs.shape
    have = model.hook_shapes(B, T)
    groups: list[dict[int, list[str]]] = []
    size = 0
    for i, block in enumerate(model.blocks):
        here = f"blocks.{i}.mixer."
        if here + "state" not in have or here + "log_decay" not in have:
            continue
        missing = [name for name in extra if here + name not in have]
        if missing:
            known = ", ".join(n.removeprefix(here) for n in have if n.startswith(here))
            raise ValueError(f"model: expected {', '.join(missing)} in blocks.{i}.mixer, which has {known}")
        if any(True for _ in block.mixer.points.of("state", "edit")):
            raise ValueError(
                f"model: expected no hook that replaces the state of blocks.{i}.mixer while it is probed"
            )
        names = [here + name for name in dict.fromkeys((*extra, "k", "v", "beta")) if here + name in have]
        bytes_here = model.estimate_cache_bytes((B, T), [*names, here + "state"])
        if not groups or size + bytes_here > MAX_BYTES:
            groups.append({})
            size = 0
        groups[-1][i] = names
        size += bytes_here
    if not groups:
        raise ValueError("model: expected at least one layer whose mixer feeds the scan, got none")
    for group in groups:
        wanted = [name for i, names in group.items() for name in [*names, f"blocks.{i}.mixer.state"]]
        _, cache = model.run_with_cache(inputs, names=wanted, max_bytes=max(MAX_BYTES, size))
        for i, names in group.items():
            yield _of_layer(i, cache.factors(i), {name.rsplit(".", 1)[1]: cache[name] for name in names})


def _of_layer(layer: int, scanned: Any, extra: dict[str, Tensor]) -> Factors:
    stored = scanned.k.dtype
    wide = torch.promote_types(stored, torch.float32)
    k, v, log_decay, beta = (t.to(wide) for t in (scanned.k, scanned.v, scanned.log_decay, scanned.beta))
    write_k, write_v = (
        v.new_zeros(*v.shape[:3], 0, like.shape[-1]) if write is None else write.to(wide)
        for write, like in ((scanned.write_k, k), (scanned.write_v, v))
    )
    extra = {name: tensor.to(wide) for name, tensor in extra.items()}
    return Factors(layer, stored, k, v, log_decay, beta, write_k, write_v, extra)


def positions(at: Sequence[int] | Tensor | None, tokens: int, default: int = 64) -> list[int]:
    """Ascending token positions: those given (negative ones count from the end), or `default` evenly spread
    ones.
    """
    if at is None:
        return sorted(
            {round(i * (tokens - 1) / max(1, min(default, tokens) - 1)) for i in range(min(default, tokens))}
        )
    given = [int(p) for p in at]
    outside = [p for p in given if not -tokens <= p < tokens]
    if outside or not given:
        raise ValueError(f"at: expected positions in -{tokens}..{tokens - 1}, got {outside or 'none'}")
    return sorted({p % tokens for p in given})
