"""Inverses of single damped factors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor

from kfc._helpers import at_least_float32
from kfc.curvature.factor import (
    add_to_diagonal,
    cholesky,
    diagonal,
    eigendecompose,
    is_diagonal,
    reciprocal_or_zero,
    scale_first,
    scale_first_row,
)
from kfc.curvature.low_rank import LowRank, after, low_rank_inverse, times_, tolerates_rounding
from kfc.moments.folding import whole


class Form(IntEnum):
    """What the matrix of a ``DampedInverse`` is."""

    CHOLESKY = 0
    EXPLICIT = 1
    LOW_RANK = 2
    # The same, and the factor may be rounded to bfloat16.
    LOW_RANK_OF_ROUNDED = 3


class DampedInverse(NamedTuple):
    """(factor + shift I)⁻¹, ready to be applied.

    Attributes:
        matrix: the lower Cholesky factor of factor + shift I, (groups, n, n); or the inverse
            itself, or its diagonal (groups, n); or what ``low_rank_inverse`` returns.
        cheap: the same inverse, if it has a low rank and is ready for fast products.
    """

    matrix: Tensor
    form: Form
    cheap: LowRank | None = None

    @property
    def has_low_rank(self) -> bool:
        return self.form in (Form.LOW_RANK, Form.LOW_RANK_OF_ROUNDED)

    @property
    def tolerates_rounding(self) -> bool:
        """Whether the factor may be rounded to bfloat16 for the next inverse."""
        return self.form is Form.LOW_RANK_OF_ROUNDED

    def times_(self, right: Tensor) -> Tensor:
        """Return the inverse times (groups, n, k), whose memory may be used."""
        if self.form is Form.CHOLESKY:
            return torch.cholesky_solve(right, self.matrix)
        if self.has_low_rank:
            return times_(self.matrix, right) if self.cheap is None else self.cheap.times(right)
        if is_diagonal(self.matrix):
            return right.mul_(self.matrix.unsqueeze(-1))
        return self.matrix @ right

    def after(self, left: Tensor) -> Tensor:
        """Return (groups, k, n) times the inverse, in new memory."""
        if self.form is Form.CHOLESKY:
            return torch.cholesky_solve(left.mT, self.matrix).mT
        if self.has_low_rank:
            return after(left, self.matrix) if self.cheap is None else self.cheap.after(left)
        if is_diagonal(self.matrix):
            return left * self.matrix.unsqueeze(-2)
        return left @ self.matrix

    def unscaled(self, scale: float) -> DampedInverse:
        """Return the inverse of S (factor + shift I) S with S = diag(scale, 1, ..., 1)."""
        if self.form is Form.CHOLESKY:
            return self._replace(matrix=scale_first_row(self.matrix, scale))  # S L (S L)ᵀ
        if self.has_low_rank:
            matrix = scale_first_row(self.matrix, 1 / scale)
            matrix[:, 0, 0] /= scale  # S⁻¹ (f I - P Pᵀ) S⁻¹
            return self._replace(matrix=matrix)
        return self._replace(matrix=scale_first(self.matrix, 1 / scale))

    def explicit(self) -> DampedInverse:
        """Return the inverse with an explicit matrix in place of a Cholesky factor."""
        if self.form is not Form.CHOLESKY:
            return self
        return DampedInverse(torch.cholesky_inverse(self.matrix), Form.EXPLICIT)

    def prepared(self) -> DampedInverse:
        """Return the inverse, ready to be applied many times."""
        if not self.has_low_rank:
            return self
        return self._replace(cheap=LowRank.of(self.matrix))

    def reordered(self, order: Tensor) -> DampedInverse | None:
        """Return the inverse with its coordinates in another order, if that is cheap."""
        if self.form is Form.CHOLESKY:
            return None
        matrix = self.matrix.index_select(1, order)
        if self.form is Form.EXPLICIT and not is_diagonal(matrix):
            matrix = matrix.index_select(2, order)
        return DampedInverse(matrix, self.form)

    def problem(self) -> str:
        """Return why a saved matrix does not have this form; empty if it may have it."""
        is_square = self.matrix.dim() == 3 and self.matrix.shape[-1] == self.matrix.shape[-2]
        if self.form is Form.CHOLESKY and not (is_square and (diagonal(self.matrix) > 0).all()):
            return "must be a Cholesky factor, square and with a positive diagonal"
        if self.form is Form.EXPLICIT and not (is_square or is_diagonal(self.matrix)):
            return "must be square or a diagonal"
        if self.has_low_rank and (is_square or is_diagonal(self.matrix)):
            return "must have fewer columns than rows"
        return ""

    def columns(self) -> Tensor | None:
        """Return the matrix if it is one of low rank, to begin the next one with."""
        return self.matrix if self.has_low_rank else None


def invert_shifted(
    factors: Sequence[Tensor],
    shifts: Sequence[Tensor],
    tolerance: float | None = None,
    columns: Iterable[int] = repeat(0),
    starts: Iterable[DampedInverse | None] = repeat(None),
) -> list[DampedInverse]:
    """Return (factor + shift I)⁻¹ for positive semi-definite factors; always finite.

    Uses Cholesky decompositions in the factors' own precision where they are accurate, and a slower
    method elsewhere. All decompositions start before the host waits for any of them.

    Args:
        factors: (groups, n, n), which may be folded or rounded, or diagonals.
        tolerance: the allowed error of inverses of low rank; ``None``: exact inverses.
        columns: the largest ranks of inverses of low rank; 0 for an exact inverse.
        starts: earlier inverses of the factors.
    """
    found: dict[int, DampedInverse] = {}
    roots: dict[int, tuple[Tensor, Tensor]] = {}
    arguments = zip(factors, shifts, columns, starts, strict=False)
    for index, (factor, shift, most, start) in enumerate(arguments):
        if is_diagonal(factor):
            found[index] = DampedInverse(
                reciprocal_or_zero(add_to_diagonal(factor, shift)), Form.EXPLICIT
            )
            continue
        cheap = None
        if tolerance is not None and most:
            cheap = low_rank_inverse(factor, shift, tolerance, most, start and start.columns())
        if cheap is not None:
            assert tolerance is not None
            is_rounded = tolerates_rounding(factor, shift, tolerance)
            form = Form.LOW_RANK_OF_ROUNDED if is_rounded else Form.LOW_RANK
            found[index] = DampedInverse(cheap, form)
        else:
            roots[index] = cholesky(add_to_diagonal(at_least_float32(whole(factor)), shift))
    flags = [trusted for _, trusted in roots.values()]
    are_trusted = torch.stack(flags).tolist() if flags else []
    for (index, (lower, _)), trusted in zip(roots.items(), are_trusted, strict=True):
        if trusted:
            found[index] = DampedInverse(lower, Form.CHOLESKY)
        else:
            factor = at_least_float32(whole(factors[index]))
            careful = _invert_carefully(factor, shifts[index])
            found[index] = DampedInverse(careful, Form.EXPLICIT)
    return [found[index] for index in range(len(factors))]


def _invert_carefully(factor: Tensor, shift: Tensor) -> Tensor:
    """Return the explicit inverse, which survives rounding better than a Cholesky factor."""
    # On the CPU: this case is rare, and not every device has float64.
    wide, wide_shift = (part.to("cpu", torch.float64) for part in (factor, shift))
    lower, trusted = cholesky(add_to_diagonal(wide, wide_shift))
    if trusted:
        return torch.cholesky_inverse(lower).to(factor)
    # Eigenvalues that are rounding errors in the factor's own precision become zero, so that
    # only the shift remains; without a shift, this is the pseudo-inverse.
    values, basis = eigendecompose(wide, precision=torch.finfo(factor.dtype).eps)
    assert basis is not None
    reciprocals = reciprocal_or_zero(values + wide_shift.unsqueeze(-1))
    return ((basis * reciprocals.unsqueeze(-2)) @ basis.mT).to(factor)
