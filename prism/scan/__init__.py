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
    r"""The gated delta rule with a rank-L write per token: the recurrence of a PRISM layer.

    Per value head, with alpha_t = exp(log_decay_t) and S the state, [V, K] on paper and [K, V] in memory:

        Sbar_t = alpha_t S_{t-1}
        S_t    = Sbar_t + beta_t (v_t - Sbar_t k_t) k_t^T + sum_{l=1..L} write_v_t^l (write_k_t^l)^T
        o_t    = scale * S_t q_t

    L = 0 is Gated DeltaNet (arXiv 2412.06464). L >= 1 is the update dS = dS_gdn + dS_refine of PRISM
    (arXiv 2602.10796 v3), whose step gates b are part of write_v already.

    Args:
        q, k: queries and keys. Value head j reads key head j // (HV / H).
        v: values. HV is a multiple of H.
        log_decay: g <= 0 in nats.
        beta: erase and write strength.
        write_k, write_v: keys and values of the L further writes; both or neither. L = 0 is allowed.
        scale: of the output; None is K ** -0.5.
        initial_state: the state before the first token, zero if None.
        output_final_state: return the state after the last token too.
        cu_seqlens: int32 or int64 offsets [N + 1] of N sequences packed into B = 1, each with its own state:
            0 first, never decreasing (an empty sequence hands its initial state on), T last.
        backend: "recurrent" (the definition, token by token), "chunked" (plain PyTorch), "triton" (CUDA), or
            "auto": chunked on a CPU; on CUDA triton, but chunked for float64 and for widths that the kernels
            do not take (table: `resolve_backend`). A backend asked for by name never falls back to another.
        validate: False skips the reading of `cu_seqlens` on a GPU, which costs one synchronisation. It is
            skipped too under torch.compile and CUDA graph capture, and otherwise always done on a CPU.

    Dtypes: q, k, v, write_k and write_v share one of float32, float64, bfloat16, float16; log_decay and beta
    have that or float32. States and sums are float32, float64 for float64 inputs; o has the dtype of q.

    Returns:
        o and the final state, None unless `output_final_state`, differentiable in every floating input:
        "recurrent" any number of times and in forward mode too, "chunked" and "triton" once and in reverse.

    Raises:
        ValueError: a shape, head count, dtype, device, offset or backend is wrong; the message names the
            argument, what was expected and what came.

    Nothing is clamped or normalised. The eigenvalues of the transition are alpha_t and
    alpha_t (1 - beta_t |k_t|^2): whoever wants a stable memory sees to |k_t| <= 1, 0 <= beta_t <= 2 and
    log_decay_t <= 0. Keys far longer than 1 make the state, and rounding errors with it, grow exponentially
    within a few tokens. log_decay = -inf is NaN in chunks: a reset is a new sequence in `cu_seqlens`.

    Example:
        >>> import torch
        >>> from prism import prism_scan
        >>> q = k = torch.tensor([[[[1.0, 0.0]], [[1.0, 0.0]]]])  # [B, T, H, K] = [1, 2, 1, 2]
        >>> v = torch.tensor([[[[3.0]], [[5.0]]]])
        >>> log_decay, beta = torch.zeros(1, 2, 1), torch.ones(1, 2, 1)
        >>> o, state = prism_scan(q, k, v, log_decay, beta, scale=1.0, output_final_state=True)
        >>> o.flatten().tolist(), state.flatten().tolist()  # beta = 1 erases 3 before it writes 5
        ([3.0, 5.0], [5.0, 0.0])
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
