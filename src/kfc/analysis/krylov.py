"""Eigenvalues and solutions of symmetric matrices, from their products with vectors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

Product = Callable[[Tensor], Tensor]
STEPS_BETWEEN_CHECKS = 8


class UnsolvableError(ArithmeticError):
    """Raised if a system is singular, or was not solved in the allowed number of steps."""


def ritz_values(
    product: Product, start: Tensor, sizes: Iterable[int]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the Ritz values of a symmetric matrix, descending, and a bound on the error of each.

    This is Lanczos' method with full reorthogonalisation.

    Args:
        product: returns the matrix times a vector of any shape.
        start: the first vector; eigenvectors orthogonal to it are not found.
        sizes: the sizes of the Krylov space, ascending, at which to yield. Iteration ends early if
            the space cannot grow any more.
    """
    basis: list[Tensor] = []
    diagonal: list[Tensor] = []
    off_diagonal: list[Tensor] = []
    vector, norm = start, start.norm()
    for size in sizes:
        while len(basis) < size:
            basis.append(vector / norm)
            vector = product(basis[-1])
            diagonal.append((vector * basis[-1]).sum())
            for direction in 2 * basis:  # in floating point, a second pass is necessary and enough
                vector = vector - (vector * direction).sum() * direction
            norm = vector.norm()
            off_diagonal.append(norm)
            rounding = 10 * torch.finfo(vector.dtype).eps * torch.stack(diagonal).abs().max()
            if len(basis) == vector.numel() or norm <= rounding:
                yield _tridiagonal_eigenvalues(diagonal, off_diagonal)
                return
        yield _tridiagonal_eigenvalues(diagonal, off_diagonal)


def _tridiagonal_eigenvalues(
    diagonal: list[Tensor], off_diagonal: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the eigenvalues, descending, and the errors due to the last off-diagonal entry."""
    inner = torch.stack(off_diagonal)[:-1]
    matrix = torch.stack(diagonal).diag() + inner.diag(1) + inner.diag(-1)
    values, vectors = torch.linalg.eigh(matrix.to("cpu", torch.float64))
    errors = off_diagonal[-1].to(values) * vectors[-1].abs()
    return values.flip(0), errors.flip(0)


def random_start(shape: tuple[int, ...], like: Tensor, seed: int = 0) -> Tensor:
    """Return Gaussian numbers, which are the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(like)


def top_eigenvalues(
    product: Product, start: Tensor, count: int, *, tolerance: float = 1e-6, most: int = 300
) -> Tensor:
    """Return the largest eigenvalues, descending.

    Their relative error is below the tolerance, unless that takes more than ``most`` products. A
    multiple eigenvalue is returned once.
    """
    sizes = [2 * count + 10]
    while sizes[-1] < most:
        sizes.append(min(2 * sizes[-1], most))
    for values, errors in ritz_values(product, start, sizes):
        if bool((errors[:count] <= tolerance * values[0].abs()).all()):
            break
    return values[:count]


def operator_norm(
    product: Product, start: Tensor, *, tolerance: float = 1e-2, most: int = 96
) -> float:
    """Return the largest magnitude of an eigenvalue.

    Its relative error is below the tolerance, unless that takes more than ``most`` products.
    """
    sizes = range(STEPS_BETWEEN_CHECKS, most + 1, STEPS_BETWEEN_CHECKS)
    for values, errors in ritz_values(product, start, sizes):
        norm, index = values.abs().max(0)
        if errors[index] <= tolerance * norm:
            break
    return float(norm)


def conjugate_gradients(
    product: Product,
    right: Tensor,
    *,
    tolerance: float = 1e-6,
    most: int = 1000,
    preconditioner: Product = lambda vector: vector,
) -> Tensor:
    """Return the solution of a positive definite system.

    Args:
        preconditioner: returns an approximate inverse, positive definite, times a vector.

    Raises:
        UnsolvableError: if the relative residual is above the tolerance after ``most`` steps.
    """
    solution = torch.zeros_like(right)
    residual = right
    goal = tolerance * right.norm()
    direction = preconditioner(residual)
    square = (residual * direction).sum()
    for _ in range(most):
        if residual.norm() <= goal:
            return solution
        image = product(direction)
        length = square / (direction * image).sum()
        solution = solution + length * direction
        residual = residual - length * image
        scaled = preconditioner(residual)
        square, before = (residual * scaled).sum(), square
        direction = scaled + square / before * direction
    if residual.norm() <= goal:
        return solution
    raise UnsolvableError(
        f"the system was not solved in {most} steps; the relative residual is "
        f"{(residual.norm() / right.norm()).item():.1e}; give a larger damping"
    )
