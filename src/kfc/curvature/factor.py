"""Algebra of a symmetric positive semi-definite factor, (groups, n, n), or its diagonal."""

from __future__ import annotations

import torch
from torch import Tensor

from kfc._helpers import at_least_float32
from kfc.moments.folding import diagonal_of_folded, is_folded, width


def is_diagonal(factor: Tensor) -> bool:
    return factor.dim() == 2


def diagonal(factor: Tensor) -> Tensor:
    """Return a view of the diagonal of each group's factor, (groups, size)."""
    return factor if is_diagonal(factor) else factor.diagonal(dim1=-2, dim2=-1)


def trace(factor: Tensor) -> Tensor:
    """Return the trace of each group's factor, (groups,), in float32 at least.

    The factor may be folded.
    """
    values = diagonal_of_folded(factor) if is_folded(factor) else diagonal(factor)
    return at_least_float32(values).sum(-1)


def mean_eigenvalue(factor: Tensor) -> Tensor:
    """Return the mean eigenvalue of each group's factor, (groups,); the factor may be folded."""
    return trace(factor) / width(factor)


def add_to_diagonal(factor: Tensor, amount: Tensor) -> Tensor:
    """Return a new factor with amount (groups,) added to each group's diagonal."""
    result = factor.clone()
    diagonal(result).add_(amount.unsqueeze(-1))
    return result


def scale_first(factor: Tensor, scale: float) -> Tensor:
    """Return diag(scale, 1, ..., 1) · factor · diag(scale, 1, ..., 1), for each group."""
    result = factor.clone()
    result[:, 0] *= scale
    result[..., 0].mul_(scale)
    return result


def scale_first_row(matrix: Tensor, scale: float) -> Tensor:
    """Return diag(scale, 1, ..., 1) · matrix, for each group."""
    result = matrix.clone()
    result[:, 0] *= scale
    return result


def cholesky(damped: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lower Cholesky factor, and whether it is accurate."""
    lower, info = torch.linalg.cholesky_ex(damped)
    # The square of this ratio bounds the reciprocal condition number from above.
    spread = diagonal(lower).amin(-1) / diagonal(lower).amax(-1)
    lowest = torch.finfo(damped.dtype).eps ** 0.4
    return lower, ((info == 0) & (spread > lowest)).all()


def eigendecompose(factor: Tensor, precision: float | None = None) -> tuple[Tensor, Tensor | None]:
    """Return eigenvalues (groups, n) and basis (groups, n, n); a diagonal has no basis.

    Eigenvalues that are rounding errors at the given precision are returned as zero.
    """
    if is_diagonal(factor):
        return factor, None
    # Shifted by its mean eigenvalue: eigh of a rank-deficient float32 matrix can be tens of times
    # slower, or fail to converge.
    lift = mean_eigenvalue(factor)
    lifted = add_to_diagonal(factor, lift)
    try:
        values, basis = torch.linalg.eigh(lifted)
    except RuntimeError:  # torch.linalg.LinAlgError
        wide = torch.linalg.eigh(lifted.to("cpu", torch.float64))
        values, basis = (part.to(factor) for part in wide)
    values = values - lift.unsqueeze(-1)
    rounding = factor.shape[-1] * (precision or torch.finfo(factor.dtype).eps)
    noise = values.amax(-1, keepdim=True) * rounding
    return torch.where(values > noise, values, 0), basis


def reciprocal_or_zero(values: Tensor) -> Tensor:
    """Return 1/x, and 0 where x is (nearly) 0: the pseudo-inverse of a diagonal."""
    counts = values > 4 * torch.finfo(torch.float32).tiny
    return torch.where(counts, 1 / torch.where(counts, values, 1), 0)
