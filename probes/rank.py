"""Rank of a matrix that is known by its factors: singular values and what is read off them.

A token of PRISM adds X = sum_r left_r right_r^T to the state (math: B_t has R = L + 1 terms), with R far
below the widths V and K. Writing left = Q_a R_a and right = Q_b R_b, X = Q_a (R_a R_b^T) Q_b^T, so the
singular values of X are those of an R x R core; no V x K matrix is formed. All of it is float64, whatever the
factors were stored in: in float32 a smallest singular value of 4e-6 sigma_max keeps two or three digits by QR
and none by a Gram matrix.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

FACTOR_TOLERANCE = "(eps(dtype) + max(K, V) * eps(float64)) * sum_r |left_r| |right_r|"
MATRIX_TOLERANCE = "max(max(K, V) * eps(state dtype), 2 * eps(dtype)) * sigma_max"
MEASURES = ("numerical", "effective", "stable", "participation")

DEFINITIONS = {
    "numerical": "number of singular values above the threshold",
    "effective": "exp of the Shannon entropy of sigma_i / sum(sigma) (Roy & Vetterli, EUSIPCO 2007)",
    "stable": "sum(sigma^2) / max(sigma)^2 (Rudelson & Vershynin, J. ACM 2007)",
    "participation": "sum(sigma^2)^2 / sum(sigma^4), the participation ratio of the squared singular values",
}


# Work in pieces that stay in a core's cache; on a GPU pieces only bound the extra memory.
_PIECE_BYTES = {False: 2 << 20, True: 256 << 20}


def factor_singular_values(
    left: Float[Tensor, "*batch R V"], right: Float[Tensor, "*batch R K"]
) -> Float[Tensor, "*batch M"]:
    """Singular values, descending, of sum_r left_r right_r^T, M = min(R, V, K) of them, in float64.

    Householder QR of both factors and the SVD of the small core, batched, on a CPU and on a GPU
    (benchmarks/bench_probes.py times it against the SVD of the formed matrices).

    Raises ValueError for shapes that do not belong together and for non-finite factors.
    """
    _check_factors(left, right)
    batch, (terms, v_width), k_width = left.shape[:-2], left.shape[-2:], right.shape[-1]
    piece = max(1, _PIECE_BYTES[left.is_cuda] // (8 * terms * max(v_width, k_width)))
    flat_left, flat_right = left.reshape(-1, terms, v_width), right.reshape(-1, terms, k_width)
    pieces = zip(flat_left.split(piece), flat_right.split(piece), strict=True)
    count = min(terms, v_width, k_width)
    sigma = (
        torch.cat([_core_singular_values(a, b) for a, b in pieces])
        if batch.numel()
        else flat_left.new_zeros(0, count).double()
    )
    if not torch.isfinite(sigma).all():
        _check_finite("left", left)
        _check_finite("right", right)
    return sigma[:, :count].reshape(*batch, count)


def factor_threshold(
    left: Float[Tensor, "*batch R V"],
    right: Float[Tensor, "*batch R K"],
    dtype: torch.dtype,
    *,
    left_norm: Float[Tensor, "*batch R"] | None = None,
) -> Float[Tensor, "*batch"]:
    """Singular values at or below this may be rounding: FACTOR_TOLERANCE.

    A factor stored in `dtype` is known to eps/2 of its norm, so X is known to eps times that sum in spectral
    norm, and by Weyl's inequality so is every singular value; the second term is the arithmetic's own share
    and matters for float64 factors only. Unlike a multiple of sigma_max it stays right when the terms cancel.
    left_norm replaces |left_r| where left_r is itself a difference of stored vectors, whose rounding it
    inherits.
    """
    norm = _row_norms(left) if left_norm is None else left_norm
    own = max(left.shape[-1], right.shape[-1]) * torch.finfo(torch.float64).eps
    return (torch.finfo(dtype).eps + own) * (norm * _row_norms(right)).double().sum(-1)


def matrix_singular_values(matrices: Float[Tensor, "*batch K V"]) -> Float[Tensor, "*batch M"]:
    """Singular values, descending, of matrices that exist as such (states), in float64; M = min(K, V).

    On a GPU they come from the eigenvalues of the float64 Gram matrix, which resolves 1e-8 of sigma_max:
    below what a float32 matrix knows, and a batched SVD there runs matrix by matrix. float64 matrices always
    take the SVD.
    """
    _check_finite("matrices", matrices)
    if matrices.is_cuda and matrices.dtype != torch.float64:
        wide = matrices.double()
        gram = wide @ wide.mT if wide.shape[-2] <= wide.shape[-1] else wide.mT @ wide
        return torch.linalg.eigvalsh(gram).flip(-1).clamp_min(0).sqrt()
    return torch.linalg.svdvals(matrices.float() if matrices.itemsize < 4 else matrices).double()


def matrix_threshold(
    singular_values: Float[Tensor, "*batch M"],
    shape: tuple[int, int],
    dtype: torch.dtype,
    stored: torch.dtype,
) -> Float[Tensor, "*batch"]:
    """MATRIX_TOLERANCE, where dtype is the state's and stored that of the factors it was summed from.

    The first is the usual rule for a matrix held in `dtype` (numpy.linalg.matrix_rank). A state summed in
    float32 from bf16 factors carries their rounding: independent errors of relative size eps/sqrt(12) per
    entry have a spectral norm of about (sqrt K + sqrt V) / sqrt(max(K, V)) * eps/sqrt(12) of sigma_max or
    less, which the second covers.
    """
    rtol = max(max(shape) * torch.finfo(dtype).eps, 2 * torch.finfo(stored).eps)
    return rtol * singular_values[..., 0]


def rank_measures(
    singular_values: Float[Tensor, "*batch M"], threshold: Float[Tensor, "*batch"] | float
) -> dict[str, Float[Tensor, "*batch"]]:
    """The four measures of DEFINITIONS, each [*batch] in float64, from descending singular values.

    A matrix whose largest singular value does not exceed the threshold is zero as far as anyone can know:
    every measure of it is 0, never NaN. Otherwise the three smooth measures use all singular values; noise
    below the threshold hardly moves them.
    """
    sigma = singular_values.double()
    top = sigma[..., :1]
    threshold = torch.as_tensor(threshold, dtype=sigma.dtype, device=sigma.device)[..., None]
    present = (top > threshold).squeeze(-1)
    p = sigma / torch.where(top > 0, top, 1.0)  # scale out first: squares of tiny values must not underflow
    share = p / p.sum(-1, keepdim=True).clamp_min(1.0)
    square = p.square()
    energy = square.sum(-1)
    measures = {
        "numerical": (sigma > threshold).sum(-1).double(),
        "effective": torch.special.entr(share).sum(-1).exp(),
        "stable": energy,
        "participation": energy.square() / square.square().sum(-1).clamp_min(1.0),
    }
    return {name: torch.where(present, value, 0.0) for name, value in measures.items()}


def _row_norms(rows: Tensor) -> Tensor:
    return torch.linalg.vector_norm(rows, dim=-1, dtype=torch.promote_types(rows.dtype, torch.float32))


def _core_singular_values(left: Tensor, right: Tensor) -> Tensor:
    core = _triangle(left) @ _triangle(right).mT
    if not torch.isfinite(core).all():  # LAPACK would raise its own, less clear error
        return torch.full_like(core[..., 0], torch.nan)
    return torch.linalg.svdvals(core)


def _triangle(rows: Tensor) -> Tensor:
    return torch.linalg.qr(rows.double().mT, mode="r").R


def _check_factors(left: Tensor, right: Tensor) -> None:
    if left.ndim < 2 or left.shape[:-1] != right.shape[:-1]:
        raise ValueError(
            "right: expected left's shape [..., R, V] up to the last dimension, "
            f"got left {tuple(left.shape)} and right {tuple(right.shape)}"
        )


def _check_finite(name: str, tensor: Tensor) -> None:
    bad = int((~torch.isfinite(tensor)).sum())
    if bad:
        raise ValueError(f"{name}: expected finite values, got {bad} of {tensor.numel()} that are not")
