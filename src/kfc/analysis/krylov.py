"""Eigenvalues and solutions of symmetric matrices that are known by their products only."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Product = Callable[[Tensor], Tensor]
STEPS_BETWEEN_LOOKS = 8


class UnsolvableError(ArithmeticError):
    """A system that is singular, or was not solved in as many steps as were allowed."""


class Lanczos:
    """Ritz values of a symmetric matrix, from a Krylov space that can be extended.

    With full reorthogonalisation.

    Args:
        product: the matrix times a vector, in any shape.
        start: a vector; directions orthogonal to it stay unseen.
    """

    def __init__(self, product: Product, start: Tensor) -> None:
        self._product = product
        self._next: Tensor | None = start / start.norm()
        self._basis: list[Tensor] = []
        self._diagonal: list[Tensor] = []
        self._beside: list[Tensor] = []

    @property
    def exhausted(self) -> bool:
        """Whether the space is as large as it can become."""
        return self._next is None

    def extend(self, steps: int) -> None:
        for _ in range(steps):
            if self._next is None:
                return
            self._basis.append(self._next)
            vector = self._product(self._next)
            self._diagonal.append((vector * self._next).sum())
            vector = _orthogonal_to(self._basis, vector)
            self._beside.append(vector.norm())
            scale = torch.stack(self._diagonal).abs().max()
            complete = len(self._basis) == vector.numel()
            tiny = self._beside[-1] <= 10 * torch.finfo(vector.dtype).eps * scale
            self._next = None if complete or tiny else vector / self._beside[-1]

    def values(self) -> tuple[Tensor, Tensor]:
        """Ritz values, descending, and a bound on each one's error."""
        tridiagonal = torch.stack(self._diagonal).diag()
        if len(self._diagonal) > 1:
            beside = torch.stack(self._beside[:-1])
            tridiagonal = tridiagonal + beside.diag(1) + beside.diag(-1)
        values, vectors = torch.linalg.eigh(tridiagonal.to("cpu", torch.float64))
        errors = self._beside[-1].to(values) * vectors[-1].abs()
        return values.flip(0), errors.flip(0)


def _orthogonal_to(basis: list[Tensor], vector: Tensor) -> Tensor:
    for _ in range(2):  # once is not enough in floating point, twice is
        for direction in basis:
            vector = vector - (vector * direction).sum() * direction
    return vector


def random_start(shape: tuple[int, ...], like: Tensor, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(like)


def top_eigenvalues(
    product: Product, start: Tensor, count: int, *, tolerance: float = 1e-6, most: int = 300
) -> Tensor:
    """The largest eigenvalues, descending.

    To a relative error below the tolerance, unless that takes more than ``most`` products. Copies
    of a multiple eigenvalue are seen once.
    """
    space, taken, steps = Lanczos(product, start), 0, 2 * count + 10
    while True:
        space.extend(steps)
        taken += steps
        values, errors = space.values()
        settled = bool((errors[:count] <= tolerance * values[0].abs()).all())
        if settled or space.exhausted or taken >= most:
            return values[:count]
        steps = min(taken, most - taken)


def operator_norm(
    product: Product, start: Tensor, *, tolerance: float = 1e-2, most: int = 96
) -> float:
    """The largest magnitude of an eigenvalue.

    To a relative error below the tolerance, unless that takes more than ``most`` products.
    """
    space = Lanczos(product, start)
    for _ in range(most // STEPS_BETWEEN_LOOKS):
        space.extend(STEPS_BETWEEN_LOOKS)
        values, errors = space.values()
        norm, index = values.abs().max(0)
        if errors[index] <= tolerance * norm or space.exhausted:
            break
    return float(norm)


def conjugate_gradients(
    product: Product, right: Tensor, *, tolerance: float = 1e-6, most: int = 1000
) -> Tensor:
    """The solution of a positive definite system, to a relative residual below the tolerance.

    Raises:
        UnsolvableError: if it is not reached.
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
    raise UnsolvableError(
        f"the system was not solved in {most} steps: the relative residual is "
        f"{(square / right.square().sum()).sqrt().item():.1e}; give a larger damping"
    )
