"""`PrismModel`: a plain pre-norm language-model skeleton around any registered mixer.

    x   = embedding[tokens]
    x  += mixer(RMSNorm(x));  x += MLP(RMSNorm(x))      n_layers times; MLP = W_down GELU(W_up x), no biases;
                                                        mlp_ratio=0: no MLP and no norm before it
    logits = head(RMSNorm(x))                           head is a matrix of its own unless tie_embeddings

Initial values: embedding normal(0, 1), or normal(0, 1 / sqrt(d)) where tied; all matrices uniform within
1 / sqrt(fan in), as nn.Linear. Every parameter is drawn by (seed, name): see `prism._init`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from prism._hookpoints import HookPoints
from prism._init import Initializer
from prism.config import PrismConfig
from prism.hooks import Hooked
from prism.mixer import build_mixer


class Block(nn.Module):
    """x [B, T, d] -> x + mixer + MLP."""

    def __init__(self, config: PrismConfig) -> None:
        super().__init__()
        d, hidden = config.d_model, round(config.mlp_ratio * config.d_model)
        self.eps = config.norm_eps
        self.norm = nn.Parameter(torch.empty(d))
        self.mixer = build_mixer(config)
        self.mlp_norm = nn.Parameter(torch.empty(d)) if hidden else None
        self.up = nn.Parameter(torch.empty(hidden, d)) if hidden else None
        self.down = nn.Parameter(torch.empty(d, hidden)) if hidden else None
        self.points = HookPoints("resid_pre", "mixer_out", *(("mlp_out",) if hidden else ()), "resid_post")

    @torch.no_grad()
    def initialize(self, init: Initializer) -> None:
        self.mixer.initialize(init.child("mixer"))  # type: ignore[operator]
        self.norm.fill_(1.0)
        if self.mlp_norm is not None and self.up is not None and self.down is not None:
            self.mlp_norm.fill_(1.0)
            self.up.copy_(init.linear("up", tuple(self.up.shape)))
            self.down.copy_(init.linear("down", tuple(self.down.shape)))

    def forward(
        self, x: Float[Tensor, "B T d"], cache: Any = None, use_cache: bool = False
    ) -> tuple[Tensor, Any]:
        points = self.points
        if points.active:
            x = points.fire("resid_pre", x)
        y = self.mixer(F.rms_norm(x, x.shape[-1:], self.norm, self.eps), cache, use_cache)
        y, cache = y if use_cache else (y, None)
        if points.active:
            y = points.fire("mixer_out", y)
        x = x + y
        if self.up is not None and self.down is not None:
            y = F.linear(
                F.gelu(F.linear(F.rms_norm(x, x.shape[-1:], self.mlp_norm, self.eps), self.up)), self.down
            )
            if points.active:
                y = points.fire("mlp_out", y)
            x = x + y
        if points.active:
            x = points.fire("resid_post", x)
        return x, cache

    def point_shapes(self, B: int, T: int) -> dict[str, tuple[int, ...]]:
        return dict.fromkeys(self.points.names, (B, T, self.norm.shape[0]))


class PrismModel(Hooked):
    """tokens [B, T] int64 -> logits [B, T, vocab_size].

        model = PrismModel(PrismConfig(vocab_size=32, n_refine=2), seed=0)
        logits = model(tokens)
        logits, cache = model(tokens[:, :10], use_cache=True)
        logits, cache = model(tokens[:, 10:11], cache, use_cache=True)

    `seed`: initial values are a pure function of (config, seed), the same on every device, and take nothing
    from the global generator; None draws a seed from the global generator. Safe under torch.func.vmap of
    functional_call.
    """

    def __init__(
        self, config: PrismConfig, seed: int | None = None, *, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__()
        self.config = config
        with torch.device(device or torch.get_default_device()):
            self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.d_model))
            self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
            self.norm = nn.Parameter(torch.empty(config.d_model))
            tied = config.tie_embeddings
            self.head = None if tied else nn.Parameter(torch.empty(config.vocab_size, config.d_model))
        self.points = HookPoints("embed", "logits")
        for i, block in enumerate(self.blocks):
            for module, prefix in ((block, f"blocks.{i}."), (block.mixer, f"blocks.{i}.mixer.")):
                module.points.prefix, module.points.layer = prefix, i  # type: ignore[union-attr]
        self.initialize(Initializer(seed))
        self.to(dtype=dtype)

    @torch.no_grad()
    def initialize(self, init: Initializer) -> None:
        d = self.config.d_model
        std = d**-0.5 if self.config.tie_embeddings else 1.0
        self.embedding.copy_(init.normal("embedding", tuple(self.embedding.shape), std))
        for i, block in enumerate(self.blocks):
            block.initialize(init.child(f"blocks.{i}"))  # type: ignore[operator]
        self.norm.fill_(1.0)
        if self.head is not None:
            self.head.copy_(init.linear("head", tuple(self.head.shape)))

    def forward(
        self, tokens: Int[Tensor, "B T"], cache: tuple[Any, ...] | None = None, use_cache: bool = False
    ) -> Any:
        """logits; with `use_cache` also the cache (one entry per layer), to be passed with the tokens that
        follow.

        Raises:
            ValueError: tokens that are no integers [B, T] with B, T >= 1, or a cache of another model or
                batch. Ids outside the vocabulary are the embedding's error (on a GPU an assertion).
        """
        if not isinstance(tokens, Tensor):
            raise ValueError(f"tokens: expected integers of shape [B, T], came {type(tokens).__name__}")
        if tokens.ndim != 2 or tokens.dtype not in (torch.int64, torch.int32) or not tokens.numel():
            came = f"{tokens.dtype} of shape {list(tokens.shape)}"
            raise ValueError(f"tokens: expected integers of shape [B, T] with B, T >= 1, came {came}")
        if cache is not None and len(cache) != len(self.blocks):
            raise ValueError(f"cache: expected one entry per layer, {len(self.blocks)}, came {len(cache)}")
        x = F.embedding(tokens, self.embedding)
        if self.points.active:
            x = self.points.fire("embed", x)
        caches = []
        for i, block in enumerate(self.blocks):
            x, after = block(x, None if cache is None else cache[i], use_cache)
            caches.append(after)
        x = F.rms_norm(x, x.shape[-1:], self.norm, self.config.norm_eps)
        logits = F.linear(x, self.embedding if self.head is None else self.head)
        if self.points.active:
            logits = self.points.fire("logits", logits)
        return (logits, tuple(caches)) if use_cache else logits

    def point_shapes(self, B: int, T: int) -> dict[str, tuple[int, ...]]:
        return {"embed": (B, T, self.config.d_model), "logits": (B, T, self.config.vocab_size)}

    def variant(self, **changes: Any) -> PrismModel:
        """A copy with other configuration fields and the same weights: an ingredient changed after training.

        Weights that the new configuration has no use for are dropped, e.g. those of an anchor's convolution
        at anchor="state".

        Raises:
            ValueError: the new configuration needs a parameter that this model does not have in that shape.
        """
        parameters = dict(self.named_parameters())
        some = next(iter(parameters.values()))
        made = PrismModel(self.config.replace(**changes), seed=0, device=some.device)
        for name, parameter in made.named_parameters():
            if name not in parameters or parameters[name].shape != parameter.shape:
                came = list(parameters[name].shape) if name in parameters else "none"
                raise ValueError(f"variant: expected {name} of shape {list(parameter.shape)}, came {came}")
            parameter.data = parameters[name].detach().clone()
        return made

    def num_parameters(self) -> int:
        """Number of trained values, the embedding included (once where it is tied)."""
        return sum(parameter.numel() for parameter in self.parameters())

    def state_size(self) -> tuple[int, int]:
        """Floats per sequence that step-by-step decoding keeps: (recurrent states, convolution tails), over
        all layers.

        A mixer whose cache grows with T (attention) counts as (0, 0).
        """
        sizes = [block.mixer.state_size() for block in self.blocks]  # type: ignore[operator, union-attr]
        return sum(state for state, _ in sizes), sum(tails for _, tails in sizes)

    def save_pretrained(self, directory: str | Path) -> None:
        """Writes config.json and model.safetensors, in the dtype that the model has."""
        from safetensors.torch import save_file

        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(self.config.to_dict(), indent=2) + "\n")
        save_file(
            {k: t.detach().cpu().contiguous() for k, t in self.state_dict().items()},
            directory / "model.safetensors",
        )

    @classmethod
    def from_pretrained(cls, directory: str | Path, *, device: Any = None) -> PrismModel:
        """A model that `save_pretrained` wrote, bit for bit and in its dtype.

        Raises:
            ValueError: a file is missing, or the weights do not fit the configuration.
        """
        from safetensors.torch import load_file

        directory = Path(directory)
        for name in ("config.json", "model.safetensors"):
            if not (directory / name).is_file():
                raise ValueError(f"directory: expected {name} in {directory}, came a directory without it")
        config = PrismConfig.from_dict(json.loads((directory / "config.json").read_text()))
        weights = load_file(directory / "model.safetensors")
        model = cls(config, seed=0)
        wanted = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
        came = {name: list(tensor.shape) for name, tensor in weights.items()}
        if wanted != came:
            wrong = sorted(name for name in wanted.keys() | came.keys() if wanted.get(name) != came.get(name))
            raise ValueError(
                f"directory: expected weights that fit its config.json, came {wrong[0]} of shape "
                f"{came.get(wrong[0])} where {wanted.get(wrong[0])} is expected ({len(wrong)} differ)"
            )
        # The state dict, not the parameters alone: a registered mixer may have buffers.
        for name, tensor in model.state_dict(keep_vars=True).items():
            tensor.data = weights[name].to(device or tensor.device)
        return model
