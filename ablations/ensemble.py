"""Many independent models of one configuration as one batched model.

All parameters of all members live in one buffer [M, P] (member, parameter): the forward is a vmap of
`functional_call` over views of it, the gradient of the summed losses comes back as one [M, P] tensor, and the
optimiser, the clipping and the weight decay are a handful of operations whatever the depth of the model. A
member never sees another member's numbers, so it equals the same model trained alone.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.func import functional_call, stack_module_state, vmap

from prism import PrismConfig, PrismModel
from prism.scan import resolve_backend

IGNORED = -100


class Ensemble:
    """M models `PrismModel(config, seed=s)`, one per seed, stacked.

    flat: [M, P] the parameters of all members, a leaf that requires a gradient.
    decays: [P] 0 or 1: whether weight decay applies (parameters marked `_no_weight_decay` are exempt).
    """

    def __init__(
        self,
        config: PrismConfig,
        seeds: Sequence[int],
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if not seeds:
            raise ValueError("seeds: expected at least one seed, got none")
        self.config, self.seeds, self.device = config, tuple(seeds), torch.device(device)
        models = [PrismModel(config, seed=seed).to(dtype) for seed in self.seeds]
        stacked, buffers = stack_module_state(models)
        self._names = list(stacked)
        self._shapes = [stacked[name].shape[1:] for name in self._names]
        self._sizes = [shape.numel() for shape in self._shapes]
        self._buffers = {name: buffer.to(self.device) for name, buffer in buffers.items()}
        members = len(self.seeds)
        flat = torch.cat([stacked[name].detach().reshape(members, -1) for name in self._names], dim=1)
        self.flat: Float[Tensor, "M P"] = flat.to(self.device).requires_grad_()
        own = dict(models[0].named_parameters())
        exempt = [getattr(own[name], "_no_weight_decay", False) for name in self._names]
        self.decays: Float[Tensor, " P"] = torch.cat(
            [
                torch.full((size,), 0.0 if skip else 1.0, dtype=dtype)
                for size, skip in zip(self._sizes, exempt, strict=True)
            ]
        ).to(self.device)
        self._skeleton = copy.deepcopy(models[0]).to("meta")
        # In place of buffers that every member shares, so that an exported member is complete.
        self._prototype = models[0]

    def __len__(self) -> int:
        return len(self.seeds)

    @property
    def n_parameters(self) -> int:
        """Trainable scalars of one member."""
        return self.flat.shape[1]

    @property
    def scan_backend(self) -> str:
        """The scan backend that runs here ("serial": the state anchor, which no scan can run)."""
        return scan_backend(self.config, self.device, self.flat.dtype)

    def __call__(
        self,
        tokens: Int[Tensor, "M B T"],
        flat: Float[Tensor, "M P"] | None = None,
        groups: int | None = None,
    ) -> Float[Tensor, "M B T vocabulary"]:
        """Logits of every member on its own tokens, with the parameters `flat` (default: the ensemble's).

        groups: a divisor S of B. Each member runs as S copies of itself, [M S, P], on B / S rows each, so
        that a gradient is S sums side by side, added up at the end, instead of one long sum. Default:
        `row_groups` where a gradient is wanted, else 1. It changes no result but by the order of sums.
        """
        flat = self.flat if flat is None else flat
        M, B, T = tokens.shape
        if groups is None:
            wanted = flat.requires_grad and torch.is_grad_enabled()
            groups = row_groups(M, B, T, self.config.d_model, self.device) if wanted else 1
        if B % groups:
            raise ValueError(f"groups: expected a divisor of the batch size {B}, got {groups}")
        if groups == 1:
            return vmap(self._forward_one)(self.parameters(flat), self._buffers, tokens)
        # One copy of everything: its backward is a single sum over the copies.
        copies = flat[:, None].expand(-1, groups, -1).flatten(0, 1)
        buffers = {name: buffer.repeat_interleave(groups, 0) for name, buffer in self._buffers.items()}
        rows = tokens.reshape(M * groups, B // groups, T)
        return vmap(self._forward_one)(self.parameters(copies), buffers, rows).view(M, B, T, -1)

    def parameters(self, flat: Float[Tensor, "M P"] | None = None) -> dict[str, Tensor]:
        """Name -> stacked parameter [M, ...], views of `flat`."""
        # One split for all: its backward is a single concatenation.
        pieces = (self.flat if flat is None else flat).split(self._sizes, dim=1)
        named = zip(self._names, pieces, self._shapes, strict=True)
        return {name: piece.reshape(-1, *shape) for name, piece, shape in named}

    def member(self, index: int) -> PrismModel:
        """A copy of one member as a PrismModel on the CPU."""
        model = copy.deepcopy(self._prototype)
        state = {name: stacked[index].detach().cpu().clone() for name, stacked in self.parameters().items()}
        missing, unexpected = model.load_state_dict(state, strict=False)
        buffers = {name for name, _ in model.named_buffers()}
        if unexpected or set(missing) - buffers:
            raise RuntimeError(f"member {index}: state does not fit the model: {missing}, {unexpected}")
        return model

    def _forward_one(
        self, parameters: dict[str, Tensor], buffers: dict[str, Tensor], tokens: Tensor
    ) -> Tensor:
        return functional_call(self._skeleton, (parameters, buffers), (tokens,))


def row_groups(members: int, rows: int, tokens: int, width: int, device: torch.device) -> int:
    """Into how many groups of rows each member's batch [rows, tokens] is cut where gradients are wanted.

    On a GPU the gradient of a weight matrix is one program per tile of it, a tile or two at these widths,
    that adds up rows * tokens products one after another: 16 members leave 9 of 10 multiprocessors without
    work (an H200 took 130 us for each such product, of 16 members x 4096 tokens, half of a training step).
    So groups are as many as give 2 programs to a multiprocessor, while a group keeps 4 * width tokens: its
    copy of a matrix [N, width] is then small beside the [tokens, N] that are read to make its gradient, and
    all copies together stay below the activations, whatever the size of the model. On a CPU one sum is best.
    """
    if device.type != "cuda":
        return 1
    programs = 2 * torch.cuda.get_device_properties(device).multi_processor_count
    most = min(programs // members, rows * tokens // max(64, 4 * width), rows)
    return next(count for count in range(max(1, most), 0, -1) if rows % count == 0)


def member_losses(
    logits: Float[Tensor, "M B T vocabulary"], targets: Int[Tensor, "M B T"]
) -> Float[Tensor, " M"]:
    """Mean cross-entropy of each member over its scored positions (targets other than -100); 0 where it has
    none: a small batch may hold no question, and 0 / 0 would pass for divergence.
    """
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 2), targets.flatten(), ignore_index=IGNORED, reduction="none"
    ).view(targets.shape)
    return losses.sum((1, 2)) / (targets != IGNORED).sum((1, 2)).clamp_min(1)


def member_hits(
    logits: Float[Tensor, "M B T vocabulary"], targets: Int[Tensor, "M B T"]
) -> tuple[Int[Tensor, " M"], Int[Tensor, " M"]]:
    """Right answers and scored positions of each member."""
    scored = targets != IGNORED
    return ((logits.argmax(-1) == targets) & scored).sum((1, 2)), scored.sum((1, 2))


class FlatAdamW:
    """AdamW on an ensemble's [M, P] buffer, with a gradient norm, a clip and a health check per member.

    The arithmetic is torch.optim.AdamW's and torch.nn.utils.clip_grad_norm_'s (tested against both). It is
    written out because a member that diverged must stand still while the others go on, which a scalar step
    size cannot express. Everything is a tensor operation without synchronisation, so a step can be captured
    in a CUDA graph.

    schedule: [steps, 3] learning rate, 1 / (1 - beta1^t), 1 / sqrt(1 - beta2^t) of step t - 1. alive: [M]
    False from the step on whose loss or gradient was not finite; diverged_at: [M] that step, or -1.
    """

    def __init__(
        self,
        ensemble: Ensemble,
        learning_rates: Sequence[float],
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        clip: float = 0.0,
    ) -> None:
        flat = ensemble.flat
        self.flat, self.betas, self.eps, self.clip = flat, betas, eps, clip
        self.decay = weight_decay * ensemble.decays
        rows = [
            (rate, 1 / (1 - betas[0] ** t), (1 - betas[1] ** t) ** -0.5)
            for t, rate in zip(itertools.count(1), learning_rates, strict=False)
        ]
        self.schedule = torch.tensor(rows, dtype=flat.dtype, device=flat.device)
        self.mean, self.square = torch.zeros_like(flat.detach()), torch.zeros_like(flat.detach())
        self.alive: Bool[Tensor, " M"] = torch.ones(len(flat), dtype=torch.bool, device=flat.device)
        self.diverged_at = torch.full((len(flat),), -1, device=flat.device)

    def state(self) -> list[Tensor]:
        """Every tensor that a step changes."""
        return [self.flat.detach(), self.mean, self.square, self.alive, self.diverged_at]

    @torch.no_grad()
    def step(
        self, gradient: Float[Tensor, "M P"], losses: Float[Tensor, " M"], index: Int[Tensor, " one"]
    ) -> None:
        """Update all living members with their gradients; `index` is the step's number from 0, a tensor."""
        rate, unbias_mean, unbias_root = self.schedule.index_select(0, index)[0].unbind()
        norm = torch.linalg.vector_norm(gradient, dim=1)
        alive = self.alive & norm.isfinite() & losses.isfinite()
        self.diverged_at.copy_(torch.where(self.alive & ~alive, index, self.diverged_at))
        self.alive.copy_(alive)
        if self.clip > 0:
            gradient = gradient * (self.clip / (norm + 1e-6)).clamp(max=1.0)[:, None]
        # Filled, not multiplied by 0: 0 * NaN is NaN.
        gradient = gradient.masked_fill(~alive[:, None], 0.0)
        self.mean.lerp_(gradient, 1 - self.betas[0])
        self.square.mul_(self.betas[1]).addcmul_(gradient, gradient, value=1 - self.betas[1])
        update = (self.mean * unbias_mean).div_((self.square.sqrt() * unbias_root).add_(self.eps))
        rates = (alive * rate)[:, None]
        self.flat.mul_(1 - rates * self.decay).sub_(update.mul_(rates))


def scan_backend(config: PrismConfig, device: torch.device | str, dtype: torch.dtype) -> str:
    """Name of the scan backend that a model of `config` runs on a device and dtype."""
    if config.anchor == "state":
        return "serial"
    q = torch.empty(1, 1, config.n_heads, config.key_dim, device=device, dtype=dtype)
    v = torch.empty(1, 1, config.value_heads, config.value_dim, device=device, dtype=dtype)
    return resolve_backend(q, v, backend=config.scan_backend)
