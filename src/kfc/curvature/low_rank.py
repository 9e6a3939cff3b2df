"""Inverses of wide factors from their largest eigenpairs.

Let U (n, r) be the eigenvectors of the r largest eigenvalues Λ of a factor A (n, n). A is replaced
by A_r = U Λ Uᵀ + c (I - U Uᵀ), with a number c in place of the other eigenvalues. With
f = 1 / (c + s),

    (A_r + s I)⁻¹ = f I - P Pᵀ,    P = U (f - (Λ + s)⁻¹)^½.

A product takes 2 n r multiply-adds per vector instead of n², and finding U takes about 2 n² r
instead of the n³ / 3 of a Cholesky decomposition. U comes from subspace iteration that starts from
the P of the last refresh, because a factor changes slowly.

r is the smallest for which the error of the inverse is within a tolerance, up to a limit. Gradients
are sums of patches (or derivatives), so their second moments resemble A. For a vector w with the
second moments A, the exact solution is x = (A + s I)⁻¹ w, and the other one is
x + (A_r + s I)⁻¹ (A - A_r) x. The error is the root mean square of the difference, relative to that
of x, and c makes it smallest: 1 / (c + s) is the mean of 1 / (λ + s) over the other eigenvalues,
with weights λ.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kfc._helpers import at_least_float32, multiplies_bfloat16
from kfc.curvature.factor import eigendecompose, mean_eigenvalue, trace
from kfc.moments.folding import times, whole, width

# Narrower factors have an exact inverse.
NARROWEST = 256
# Without a limit on costs, factors narrower than this have one too.
NARROWEST_BY_DEFAULT = 1100
# The largest r is n / 8 up to 128, and n / 32 for wider factors.
LARGEST_SHARE, LARGEST_OF_WIDE, FIRST_LIMIT = 8, 32, 128
# If the error is larger with the largest r, an exact inverse is used, unless costs limit r.
LARGEST_ERROR = 0.5
# The error is known only if the damping is at least this part of the mean of the eigenvalues that
# were not found; otherwise their distribution would matter too.
LEAST_DAMPING = 0.1
# Random columns that are added to those of the last refresh, to find new directions.
FEWEST_NEW, NEW_SHARE = 16, 1 / 8
PROBES = 8
# Products are faster if r is a multiple of this.
MULTIPLE = 8
# r is chosen for this part of the tolerance, so that the next refresh can begin with its columns.
MARGIN = 0.8


def most_columns(size: int) -> int:
    """Return the largest r of a factor of this width."""
    return max(min(FIRST_LIMIT, size // LARGEST_SHARE), size // LARGEST_OF_WIDE)


def default_columns(size: int) -> int:
    """Return the largest r if costs are not limited; 0: the inverse is exact."""
    return most_columns(size) if size >= NARROWEST_BY_DEFAULT else 0


class Spectrum(NamedTuple):
    """The largest eigenpairs of a factor A in a subspace, and what is known of the others.

    Attributes:
        values: (groups, q), in decreasing order.
        vectors: U, (groups, n, q).
        residuals: ‖A u - λ u‖² of each pair, (groups, q).
        outside: traces of B, B² and B³, (groups, 3), where B is A restricted to the complement of
            the subspace. The first is exact, the others are estimates.
    """

    values: Tensor
    vectors: Tensor
    residuals: Tensor
    outside: Tensor

    def levels_and_errors(self, shift: Tensor) -> tuple[Tensor, Tensor]:
        """Return c and the error of the inverse with the first r pairs, for r = 1, ..., q.

        Both are (groups, q). The mean square of x is λ / (λ + s)² in the direction of a pair.
        Outside of the subspace, the mean of B's eigenvalues is taken for the λ of the denominator.
        """
        damping, (size, count) = shift.unsqueeze(-1), self.vectors.shape[-2:]
        squares = self.values / (self.values + damping).square()
        mean = self.outside[:, :1] / max(1, size - count)
        # Sums of x², x² λ and x² λ² over all directions but the first r
        powers = (squares, squares * self.values, squares * self.values.square())
        beyond = (self.outside / (mean + damping).square()).unsqueeze(-1).unbind(1)
        zeroth, first, second = (
            sums_after(each) + rest for each, rest in zip(powers, beyond, strict=True)
        )
        # The minimum of the mean square of (λ - c) x / (c + s)
        below = first + damping * zeroth
        c = torch.where(below > 0, (second + damping * first) / below, 0)
        dropped = second - 2 * c * first + c.square() * zeroth
        coupling = (squares * self.residuals).sum(-1, keepdim=True)
        whole = squares.sum(-1, keepdim=True) + beyond[0]
        errors = (dropped + coupling).clamp_min(0) / (c + damping).square() / whole
        return c, torch.where(whole == 0, 0, errors).sqrt()


def sums_after(values: Tensor) -> Tensor:
    """Return the sum of the entries after each one, along the last dimension."""
    sums = values.flip(-1).cumsum(-1).flip(-1)
    return torch.cat([sums[..., 1:], torch.zeros_like(sums[..., :1])], dim=-1)


def low_rank_inverse(
    factor: Tensor, shift: Tensor, tolerance: float, most: int, start: Tensor | None = None
) -> Tensor | None:
    """Return (A_r + s I)⁻¹ as (f, P), with the smallest r whose error is within the tolerance.

    Args:
        factor: A, (groups, n, n), which may be folded.
        shift: s, (groups,).
        most: the largest r, for which the error may exceed the tolerance.
        start: (f, P) of an earlier refresh.

    Returns:
        f and P as columns, (groups, n, 1 + r); ``None`` if the error exceeds LARGEST_ERROR and r is
        not limited further than by ``most_columns()``.
    """
    size = width(factor)
    is_rounded = tolerates_rounding(factor, shift, tolerance)
    matrix = for_products(factor, is_rounded=is_rounded)
    generator = torch.Generator().manual_seed(size)
    like = at_least_float32(factor.new_empty(len(factor), size, 0))
    columns = None if start is None else start[..., 1 : 1 + most].to(like)
    count = most
    if columns is not None:
        known = columns.shape[-1]
        count = min(most, known + max(FEWEST_NEW, round(known * NEW_SHARE)))
    while True:
        # Random columns alone need a second product to come close to the leading eigenvectors.
        passes = 2 if columns is None else 1
        columns = _widened(columns, like, count, generator)
        for _ in range(passes):
            columns = torch.linalg.qr(times(matrix, columns)).Q
        found = _spectrum(matrix, trace(factor), columns, generator)
        levels, errors = found.levels_and_errors(shift)
        errors = errors.amax(0)
        if errors[-1] <= tolerance or count == most:
            break
        count, columns = most, found.vectors
    others = found.outside[:, 0] / (size - columns.shape[-1])
    is_accurate = errors[-1] <= LARGEST_ERROR and (shift >= LEAST_DAMPING * others).all()
    if most >= most_columns(size) and not is_accurate:
        return None
    needed = 1 + int((errors > MARGIN * tolerance).sum())
    rank = min(len(errors), -(-needed // MULTIPLE) * MULTIPLE)
    return _inverse(found, shift, levels[:, rank - 1 : rank], rank)


def tolerates_rounding(factor: Tensor, shift: Tensor, tolerance: float) -> bool:
    """Return whether A may be rounded to bfloat16 for an inverse with this tolerance.

    Rounding changes the entries independently, by about 2⁻⁹ of their size, which is usually a third
    of the diagonal's. So it changes the eigenvalues by at most about 2⁻¹⁰ √n times the mean of A's
    diagonal. Relative to the damping, this must be within the tolerance. Only float32 is rounded.
    """
    error = width(factor) ** 0.5 * 2**-10 * mean_eigenvalue(factor)
    return factor.dtype != torch.float64 and bool((error <= tolerance * shift).all())


def for_products(factor: Tensor, *, is_rounded: bool) -> Tensor:
    """Return A as products with it are fastest: as a whole in bfloat16, or in float32 at least.

    Args:
        is_rounded: whether A may be rounded.
    """
    if is_rounded and multiplies_bfloat16(factor.device):
        return whole(factor.bfloat16())
    return at_least_float32(factor)


class LowRank(NamedTuple):
    """f I - P Pᵀ with a number f, ready to be applied.

    Products are not rounded to bfloat16: gradients lie mostly in the directions of P, where f V and
    P Pᵀ V nearly cancel.

    Attributes:
        floor: f.
        columns: P, (groups, n, r).
    """

    floor: float
    columns: Tensor

    @classmethod
    def of(cls, inverse: Tensor) -> LowRank | None:
        """Return the inverse that is kept as (f, P); ``None`` if f is not the same everywhere.

        This waits for the device.
        """
        low, high = inverse[..., 0].aminmax()
        return cls(low.item(), inverse[..., 1:]) if low == high else None

    def times(self, right: Tensor) -> Tensor:
        """Return (f I - P Pᵀ) V of V (groups, n, k)."""
        product = self.columns.mT @ right
        return torch.baddbmm(right, self.columns, product, beta=self.floor, alpha=-1)

    def after(self, left: Tensor) -> Tensor:
        """Return V (f I - P Pᵀ) of V (groups, k, n)."""
        product = left @ self.columns
        return torch.baddbmm(left, product, self.columns.mT, beta=self.floor, alpha=-1)


def times_between(left: LowRank, matrix: Tensor, right: LowRank) -> Tensor:
    """Return (f I - P Pᵀ) V (g I - R Rᵀ) of V (groups, m, n), with one pass over V for the result.

    It is f g V + (P Pᵀ V R - f V R) Rᵀ - g P Pᵀ V, and both products have a low rank.
    """
    coefficients = matrix @ right.columns  # V R
    inner = left.columns @ (left.columns.mT @ coefficients) - left.floor * coefficients
    columns = torch.cat([inner, -right.floor * left.columns], dim=-1)
    rows = torch.cat([right.columns.mT, left.columns.mT @ matrix], dim=-2)
    return torch.baddbmm(matrix, columns, rows, beta=left.floor * right.floor)


def times_(inverse: Tensor, right: Tensor) -> Tensor:
    """Return (f I - P Pᵀ) V from (f, P), for V (groups, n, k), in the memory of V."""
    columns = inverse[..., 1:]
    product = columns.mT @ right
    return right.mul_(inverse[..., :1]).baddbmm_(columns, product, alpha=-1)


def after(left: Tensor, inverse: Tensor) -> Tensor:
    """Return V (f I - P Pᵀ) from (f, P), for V (groups, k, n)."""
    columns = inverse[..., 1:]
    return (left * inverse[..., :1].mT).baddbmm_(left @ columns, columns.mT, alpha=-1)


def _widened(
    columns: Tensor | None, like: Tensor, count: int, generator: torch.Generator
) -> Tensor:
    """Return the columns with random ones added to them, (groups, n, count).

    Args:
        like: (groups, n, ...), of which groups, n, dtype and device are used.
    """
    known = 0 if columns is None else columns.shape[-1]
    shape = (*like.shape[:2], max(0, count - known))
    new = torch.randn(shape, generator=generator, dtype=torch.float32).to(like)
    return new if columns is None else torch.cat([columns, new], dim=-1)


def _spectrum(
    matrix: Tensor, total: Tensor, columns: Tensor, generator: torch.Generator
) -> Spectrum:
    """Return the eigenpairs of A restricted to the span of orthonormal columns (groups, n, q).

    Args:
        matrix: what ``for_products()`` returns.
        total: the trace of A, (groups,).
    """
    noise = _widened(None, columns, PROBES, generator)
    product, of_noise = times(matrix, torch.cat([columns, noise], dim=-1)).split(
        [columns.shape[-1], PROBES], dim=-1
    )
    values, basis = eigendecompose(columns.mT @ product)
    assert basis is not None
    values, basis = values.flip(-1), basis.flip(-1)
    vectors, images = columns @ basis, product @ basis  # U and A U
    residuals = (images - vectors * values.unsqueeze(-2)).square().sum(-2)

    def outside(probes: Tensor) -> Tensor:
        return probes - vectors @ (vectors.mT @ probes)

    once = outside(of_noise - images @ (vectors.mT @ noise))  # B times the noise
    twice = outside(times(matrix, once))
    first = total - values.sum(-1)
    moments = [(one * other).sum((-2, -1)) / PROBES for one, other in ((once, once), (once, twice))]
    traces = torch.stack([first, *moments], dim=-1).clamp_min(0)
    return Spectrum(values, vectors, residuals, traces)


def _inverse(found: Spectrum, shift: Tensor, level: Tensor, rank: int) -> Tensor:
    """Return (A_r + s I)⁻¹ as (f, P), (groups, n, 1 + r), with c = level (groups, 1)."""
    floor = 1 / (level + shift.unsqueeze(-1))
    kept = 1 / (found.values[:, :rank] + shift.unsqueeze(-1))
    columns = found.vectors[..., :rank] * (floor - kept).clamp_min(0).sqrt().unsqueeze(-2)
    first = floor.unsqueeze(-2).expand(*columns.shape[:-1], 1)
    return torch.cat([first, columns], dim=-1)
