"""The recurrence of PRISM: one function, three backends that compute the same thing.

`recurrent` is the definition, token by token; `chunked` is plain PyTorch and the default on a CPU; `triton`
is the default on a GPU. Whoever has read `recurrent.py` knows what the other two compute.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from prism.scan._inputs import ScanInputs, canonical
from prism.scan.recurrent import recurrent

__all__ = ["BACKENDS", "prism_scan", "resolve_backend"]

BACKENDS = ("auto", "recurrent", "chunked", "triton")


def prism_scan(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T HV V"],
    log_decay: Float[Tensor, "B T HV"],
    beta: Float[Tensor, "B T HV"],
    write_k: Float[Tensor, "B T HV L K"] | None = None,
    write_v: Float[Tensor, "B T HV L V"] | None = None,
    *,
    scale: float | None = None,
    initial_state: Float[Tensor, "N HV K V"] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Int[Tensor, " N1"] | None = None,
    backend: str = "auto",
    validate: bool = True,
) -> tuple[Float[Tensor, "B T HV V"], Float[Tensor, "N HV K V"] | None]:
    r"""Gated delta rule with a rank-L write per token.

    Per value head, with alpha_t = exp(log_decay_t) and the state S [V, K] on paper, [K, V] in memory:

        Sbar_t = alpha_t S_{t-1}
        S_t    = Sbar_t + beta_t (v_t - Sbar_t k_t) k_t^T + sum_l write_v_t^l (write_k_t^l)^T
        o_t    = scale * S_t q_t
    """
    inputs = canonical(q, k, v, log_decay, beta, write_k, write_v, scale, initial_state, cu_seqlens, validate)
    run = _load(resolve_backend(inputs.q, inputs.v, inputs.write_k, backend=backend), inputs)
    # Sums stay in the state dtype: autocast would turn the products inside into half precision.
    with torch.autocast(q.device.type, enabled=False):
        return run(*inputs, output_final_state=output_final_state)


def resolve_backend(
    q: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T HV V"],
    write_k: Float[Tensor, "B T HV L K"] | None = None,
    *,
    backend: str = "auto",
) -> str:
    """The backend that `prism_scan` runs for these inputs: the one place where `auto` is decided.

    | device    | inputs                                                | `auto` is |
    |-----------|-------------------------------------------------------|-----------|
    | CUDA      | float64, or K or V above `prism.scan.triton.MAX_WIDTH`  | chunked   |
    | CUDA      | all others                                            | triton    |
    | any other |                                                       | chunked   |

    A name other than `auto` is returned as it is.

    Raises:
        ValueError: `backend` is not one of `BACKENDS`.
    """
    if backend not in BACKENDS:
        raise ValueError(f"prism_scan: backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend != "auto":
        return backend
    if not q.is_cuda or q.dtype == torch.float64:
        return "chunked"
    return "chunked" if max(q.shape[-1], v.shape[-1]) > _triton().MAX_WIDTH else "triton"


def _load(name: str, inputs: ScanInputs) -> Callable[..., tuple[Tensor, Tensor | None]]:
    if name == "recurrent":
        return recurrent
    if name == "chunked":
        from prism.scan.chunked import chunked

        return chunked
    kernels = _triton()
    reason = kernels.why_not(*inputs)
    if reason is not None:
        raise ValueError(f"prism_scan: backend 'triton' cannot run here: {reason}")
    return kernels.triton


def _triton():
    """The module `prism.scan.triton`, imported when it is first needed.

    It offers
        MAX_WIDTH: int                                the largest K and V that its kernels take
        why_not(*ScanInputs) -> str | None            why it cannot run on these inputs, or None
        triton(*ScanInputs, output_final_state=True)  -> (o, state or None), as `recurrent`
    """
    try:
        import prism.scan.triton as kernels
    except ImportError as error:
        raise ValueError(f"prism_scan: backend 'triton' cannot run here: {error}") from error
    return kernels
