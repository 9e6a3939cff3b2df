"""Eigenvalues and solutions of symmetric matrices that are known by their products only."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Product = Callable[[Tensor], Tensor]


def lanczos(product: Product, start: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Ritz values of a symmetric matrix, descending, and a bound on each one's error.

    With full reorthogonalisation; ends early when the Krylov space is exhausted.

    Args:
        product: the matrix times a vector, in any shape.
        start: a vector; directions orthogonal to it stay unseen.
    """
    basis = [start / start.norm()]
    diagonal: list[Tensor] = []
    off_diagonal: list[Tensor] = []
    steps = min(steps, start.numel())
    for step in range(steps):
        vector = product(basis[-1])
        diagonal.append((vector * basis[-1]).sum())
        vector = _orthogonal_to(basis, vector)
        off_diagonal.append(vector.norm())
        scale = torch.stack(diagonal).abs().max()
        if step + 1 == steps or off_diagonal[-1] <= 10 * _rounding(start) * scale:
            break
        basis.append(vector / off_diagonal[-1])
    tridiagonal = torch.stack(diagonal).diag()
    if len(diagonal) > 1:
        beside = torch.stack(off_diagonal[:-1])
        tridiagonal = tridiagonal + beside.diag(1) + beside.diag(-1)
    values, vectors = torch.linalg.eigh(tridiagonal.double())
    errors = off_diagonal[-1].double() * vectors[-1].abs()
    return values.flip(0), errors.flip(0)


def _orthogonal_to(basis: list[Tensor], vector: Tensor) -> Tensor:
    for _ in range(2):  # once is not enough in floating point, twice is
        for direction in basis:
            vector = vector - (vector * direction).sum() * direction
    return vector


def _rounding(tensor: Tensor) -> float:
    return torch.finfo(tensor.dtype).eps


def random_start(shape: tuple[int, ...], like: Tensor, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(like)


def top_eigenvalues(
    product: Product, start: Tensor, count: int, *, tolerance: float = 1e-6, most: int = 300
) -> Tensor:
    """The largest eigenvalues, descending, each to a relative error that is below the tolerance.

    Copies of a multiple eigenvalue are seen once.
    """
    steps = min(start.numel(), 2 * count + 10)
    while True:
        values, errors = lanczos(product, start, steps)
        settled = (errors[:count] <= tolerance * values[0].abs()).all()
        if settled or steps >= min(most, start.numel()) or len(values) < steps:
            return values[:count]
        steps = min(2 * steps, most)


def operator_norm(product: Product, start: Tensor, *, tolerance: float = 1e-2) -> float:
    """The largest magnitude of an eigenvalue, to a relative error below the tolerance."""
    steps = 12
    while True:
        values, errors = lanczos(product, start, steps)
        norm, index = values.abs().max(0)
        if errors[index] <= tolerance * norm or steps >= start.numel() or steps >= 96:
            return float(norm)
        steps *= 2


def conjugate_gradients(
    product: Product, right: Tensor, *, tolerance: float = 1e-6, most: int = 1000
) -> Tensor:
    """The solution of a positive definite system, to a relative residual below the tolerance.

    Raises:
        ArithmeticError: if it is not reached.
    """
    solution = torch.zeros_like(right)
    residual = right.clone()
    direction = residual
    square = residual.square().sum()
    goal = tolerance**2 * square
    for _ in range(most):
        if square <= goal:
            return solution
        image = product(direction)
        length = square / (direction * image).sum()
        solution = solution + length * direction
        residual = residual - length * image
        square, before = residual.square().sum(), square
        direction = residual + square / before * direction
    if square <= goal:
        return solution
    raise ArithmeticError(
        f"the system was not solved in {most} steps: the relative residual is "
        f"{(square / right.square().sum()).sqrt().item():.1e}; give a larger damping"
    )
