"""`PrismConfig`: every choice of architecture in one frozen record, and the presets of the paper.

A field is one ingredient; two configurations that differ in one field differ in that ingredient alone. Fields
that a mixer does not have (refinement fields at `n_refine=0`) are kept and ignored by it. Sizes: B batch, T
tokens, H key heads, HV value heads, K key width, V value width, L refinement steps.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import numbers
import operator
import warnings
from dataclasses import dataclass
from typing import Any

CHOICES: dict[str, tuple[str, ...]] = {
    "activation": ("gelu", "silu", "tanh", "identity"),
    "anchor": ("shortconv", "token", "none", "state"),
    "gain": ("learned", "sigmoid", "one"),
    "refine_keys": ("own", "shared", "base"),
    "residual": ("subtract", "keep"),
    "residual_start": ("value-anchor", "value"),
    "step_gate": ("sigmoid", "two_sigmoid", "raw"),
    "erase": ("sigmoid", "two_sigmoid", "raw", "none", "step"),
    "decay": ("gdn", "sigmoid", "none"),
    "qkv_activation": ("silu", "identity"),
    "source": ("token", "anchor"),
    "scan_backend": ("auto", "recurrent", "chunked", "triton"),
}
_COUNTS = {"vocab_size": 1, "d_model": 1, "n_layers": 1, "n_heads": 1, "n_refine": 0, "anchor_width": 1}
_OPTIONAL_COUNTS = {"n_value_heads": 1, "head_dim": 1, "refine_rank": 1}
_FLAGS = ("base_write", "output_gate", "refine_key_norm", "qk_norm", "tie_embeddings")

PRESETS: dict[str, dict[str, Any]] = {
    "gdn": {"n_refine": 0},
    "prism": {},
    "paper": {
        "base_write": False,
        "erase": "step",
        "source": "anchor",
        "short_conv": 0,
        "qkv_activation": "identity",
        "qk_norm": False,
        "refine_key_norm": False,
        "step_gate": "raw",
        "decay": "sigmoid",
        "scale": 1.0,
    },
    "closed_form": {
        "activation": "identity",
        "gain": "sigmoid",
        "residual_start": "value",
        "refine_rank": 128,
        "step_gate_bias": 2.0,
    },
}


@dataclass(frozen=True)
class PrismConfig:
    """Architecture of a `PrismModel` (or of one `PrismMixer`, which ignores vocabulary, depth and MLP).

    Skeleton
        vocab_size, d_model, n_layers: sizes. A mixer on its own ignores `vocab_size` and `n_layers`.
        n_heads (H), n_value_heads (HV, a multiple of H; default H), head_dim (K; default d_model // n_heads),
        expand_v: V = head_dim * expand_v, a whole number.
        mlp_ratio: hidden width of the GELU MLP over d_model; 0: no MLP.
        output_gate: SiLU gate after the RMSNorm of each head's read.
        tie_embeddings: the read-out is the embedding. mixer: a name of `prism.mixer.MIXERS`.
        norm_eps: epsilon of every RMSNorm. scan_backend: handed to `prism_scan`.
    Base path (Gated DeltaNet)
        short_conv: width of the causal depthwise convolution on q, k, v; 0: none.
        qkv_activation: after it; "silu" as in Gated DeltaNet, with or without the convolution.
        qk_norm: L2-normalise q and k per head. Without it nothing bounds the keys, and where beta |k|^2 > 2
            the erase amplifies what it should remove. scale: of the read; None: K^-1/2.
        base_write: the write beta v k^T.
        erase: range of beta: "sigmoid" (0, 1), "two_sigmoid" (0, 2), "raw" (unbounded); "none": nothing is
            erased and beta v k^T (beta a sigmoid) is an additive write; "step": the erase uses kappa^1 and
            b^1 (Eq. 18).
        decay: "gdn": exp(-exp(A_log) softplus(a + dt_bias)); "sigmoid": sigmoid(a); "none": 1.
        source: what the base projections, output gate included, read: the "token" x_t, or the "anchor" u_t
            (Algorithm 1).
    Refinement (n_refine = L steps; L = 0 is Gated DeltaNet and has no refinement parameters)
        anchor: u_t = SiLU(ShortConv x) "shortconv" of anchor_width taps; SiLU(x_t) "token"; x_t "none", and
            nothing is subtracted in r^1; the true read Sbar_t k_t "state" (serial, slow: the yardstick).
        activation: phi. gain: p^l linear in u "learned", its "sigmoid", or constant "one".
        refine_keys: kappa^l a projection per step "own", one for all "shared", or k itself "base".
        refine_key_norm: L2-normalise kappa per head.
        refine_rank: width of a bottleneck in W_kappa and W_p; None: full matrices.
        residual: r^{l+1} = r^l - delta^l "subtract", or r^l "keep".
        residual_start: r^1 = v - u "value-anchor" (Eq. 14), or v "value".
        step_gate: range of b, as for erase. step_gate_bias: start of a learned bias of b; None: no bias.

    Raises:
        ValueError: an unknown field, or an impossible value or combination, named with what was expected
        and what came.
    Warns:
        UserWarning: combinations that are legal and degenerate.
    """

    vocab_size: int
    d_model: int = 64
    n_layers: int = 2
    n_heads: int = 1
    n_value_heads: int | None = None
    head_dim: int | None = None
    expand_v: float = 1.0
    n_refine: int = 2
    activation: str = "gelu"
    anchor: str = "shortconv"
    anchor_width: int = 4
    gain: str = "learned"
    refine_keys: str = "own"
    refine_key_norm: bool = True
    refine_rank: int | None = None
    residual: str = "subtract"
    residual_start: str = "value-anchor"
    step_gate: str = "sigmoid"
    step_gate_bias: float | None = None
    base_write: bool = True
    erase: str = "sigmoid"
    decay: str = "gdn"
    short_conv: int = 4
    qkv_activation: str = "silu"
    qk_norm: bool = True
    scale: float | None = None
    source: str = "token"
    mlp_ratio: float = 4.0
    output_gate: bool = True
    mixer: str = "prism"
    tie_embeddings: bool = False
    norm_eps: float = 1e-5
    scan_backend: str = "auto"

    def __new__(cls, *args: Any, **kwargs: Any) -> PrismConfig:
        # dataclasses raise TypeError here; a misspelt ingredient deserves its name and the near ones.
        names = [field.name for field in dataclasses.fields(cls)]
        for key in kwargs:
            if key not in names:
                close = difflib.get_close_matches(key, names, n=3)
                hint = f"; close names: {', '.join(close)}" if close else ""
                raise ValueError(f"PrismConfig: expected a known field, came {key!r}{hint}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, least in _COUNTS.items():
            self._set(name, _integer(name, getattr(self, name), least))
        for name, least in _OPTIONAL_COUNTS.items():
            if getattr(self, name) is not None:
                self._set(name, _integer(name, getattr(self, name), least))
        self._set("short_conv", _integer("short_conv", self.short_conv, 0))
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}: expected True or False, came {getattr(self, name)!r}")
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"{name}: expected one of {', '.join(choices)}, came {getattr(self, name)!r}"
                )
        self._set("expand_v", _real("expand_v", self.expand_v, above=0.0))
        self._set("norm_eps", _real("norm_eps", self.norm_eps, above=0.0))
        self._set("mlp_ratio", _real("mlp_ratio", self.mlp_ratio, least=0.0))
        for name in ("scale", "step_gate_bias"):
            if getattr(self, name) is not None:
                self._set(name, _real(name, getattr(self, name)))
        if not (isinstance(self.mixer, str) and self.mixer):
            raise ValueError(f"mixer: expected the name of a registered mixer, came {self.mixer!r}")
        self._check_sizes()
        self._check_combinations()

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check_sizes(self) -> None:
        if self.head_dim is None and self.d_model % self.n_heads:
            raise ValueError(
                f"n_heads: expected a divisor of d_model={self.d_model} or a head_dim, came {self.n_heads}"
            )
        if self.value_heads % self.n_heads:
            raise ValueError(
                f"n_value_heads: expected a multiple of n_heads={self.n_heads}, came {self.n_value_heads}"
            )
        width = self.key_dim * self.expand_v
        if width < 1 or not math.isclose(width, round(width), rel_tol=1e-9):
            raise ValueError(
                f"expand_v: expected head_dim={self.key_dim} times it to be whole, came {self.expand_v}"
            )
        if self.mlp_ratio and round(self.mlp_ratio * self.d_model) < 1:
            raise ValueError(
                f"mlp_ratio: expected 0 or enough for a hidden unit at d_model={self.d_model}, "
                f"came {self.mlp_ratio}"
            )

    def _check_combinations(self) -> None:
        if self.n_refine == 0 and (not self.base_write or self.erase == "step"):
            raise ValueError(
                "n_refine: expected at least 1 where base_write=False or erase='step', came 0 (no write)"
            )
        if self.erase == "step" and self.base_write:
            raise ValueError(
                "base_write: expected False where erase='step' (kappa^1 is the only key), came True"
            )
        if self.anchor == "state" and (self.source == "anchor" or self.erase == "step"):
            raise ValueError(
                "anchor: expected shortconv, token or none where source='anchor' or erase='step' "
                "(the true read needs a key that does not depend on it), came 'state'"
            )
        if (
            self.n_refine > 1
            and (self.gain, self.activation, self.residual) == ("one", "identity", "subtract")
            and self.mixer == "prism"
        ):
            warnings.warn(
                "gain='one' with activation='identity' and residual='subtract' makes delta^1 = r^1, so every "
                "later delta is 0: the model has one refinement step, whatever n_refine says",
                UserWarning,
                stacklevel=4,
            )

    @property
    def key_dim(self) -> int:
        """K, key width of a head."""
        return self.head_dim if self.head_dim is not None else self.d_model // self.n_heads

    @property
    def value_dim(self) -> int:
        """V, value width of a head."""
        return round(self.key_dim * self.expand_v)

    @property
    def value_heads(self) -> int:
        """HV, number of value heads."""
        return self.n_value_heads if self.n_value_heads is not None else self.n_heads

    @classmethod
    def preset(cls, name: str, **changes: Any) -> PrismConfig:
        """A preset ("gdn", "prism", "paper", "closed_form"; see `PRESETS`) with fields changed;
        `vocab_size` is needed.

        "paper" is Algorithm 1 and Eq. 18 to the letter: its gates and keys are unbounded, which is unstable
        by construction (eigenvalues of A_t far outside the unit circle). `step_gate="sigmoid",
        refine_key_norm=True` bounds them; otherwise non-finite values are allowed to show.
        """
        if name not in PRESETS:
            raise ValueError(f"preset: expected one of {', '.join(PRESETS)}, came {name!r}")
        if "vocab_size" not in changes:
            raise ValueError("vocab_size: expected an integer >= 1, came nothing")
        return cls(**{**PRESETS[name], **changes})

    def replace(self, **changes: Any) -> PrismConfig:
        """The same configuration with some fields changed."""
        return type(self)(**{**self.to_dict(), **changes})

    def to_dict(self) -> dict[str, Any]:
        """All fields in their order of declaration, JSON-able; `from_dict` inverts it."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> PrismConfig:
        """Inverse of `to_dict`; fields that are missing take their defaults, unknown ones raise
        ValueError.
        """
        if "vocab_size" not in fields:
            raise ValueError("vocab_size: expected an integer >= 1, came nothing")
        return cls(**fields)


def _integer(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or operator.index(value) < least:
        raise ValueError(f"{name}: expected an integer >= {least}, came {value!r}")
    return operator.index(value)


def _real(name: str, value: Any, least: float = -math.inf, above: float = -math.inf) -> float:
    real = not isinstance(value, bool) and isinstance(value, numbers.Real)
    if not real or not math.isfinite(value) or value < least or value <= above:
        bound = f" >= {least:g}" if least > -math.inf else f" > {above:g}" if above > -math.inf else ""
        raise ValueError(f"{name}: expected a finite number{bound}, came {value!r}")
    return float(value)
