"""The diagonal of the exact Fisher block, and nothing else of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from kfc.kronecker import reciprocal_or_zero
from kfc.layers.base import Inverse, KeptInputs, Moment, Statistics
from kfc.layers.structures.base import Structure
from kfc.layers.structures.gradients import Bases, SquaredGradients

if TYPE_CHECKING:
    from kfc.layers.factored import KroneckerHandler


class Diagonal(Structure):
    """Mean over examples of the squares of their gradients, (groups, I · n).

    There are no factors to be damped: δ is added to every entry.
    """

    treatment = "diagonal"

    def statistics(self, handler: KroneckerHandler, inverse: Inverse | None) -> Statistics:
        return _DiagonalStatistics(handler)

    def shapes(self, handler: KroneckerHandler) -> tuple[tuple[int, ...], ...]:
        width, height = handler.sizes()
        return ((handler.groups, height * width),)

    def factors(self, handler: KroneckerHandler, running: tuple[Tensor, ...]) -> None:
        return None

    def invert(
        self, handler: KroneckerHandler, running: tuple[Tensor, ...], damping: float, kind: str
    ) -> Inverse:
        return DiagonalInverse({"inverse": reciprocal_or_zero(running[0] + damping)})

    def inverse_shapes(self, handler: KroneckerHandler, kind: str) -> dict[str, tuple[int, ...]]:
        return {"inverse": self.shapes(handler)[0]}

    def restore_inverse(self, tensors: Mapping[str, Tensor], kind: str) -> Inverse:
        return DiagonalInverse(tensors)

    def summary(self, handler: KroneckerHandler, running: tuple[Tensor, ...]) -> dict[str, Any]:
        return {"block_trace": running[0].sum().item()}


class DiagonalInverse:
    """The inverse of a diagonal block: its entries, (groups, I · n)."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = dict(tensors)

    def apply(self, gradient: Tensor) -> Tensor:
        """(groups, I, n) -> (groups, I, n)"""
        return gradient * self.tensors["inverse"].reshape(gradient.shape)


class _DiagonalStatistics(Statistics):
    def __init__(self, handler: KroneckerHandler) -> None:
        self.squares = SquaredGradients(handler, Bases())

    def forward(self, inputs: Tensor, outputs: Tensor) -> KeptInputs | None:
        return self.squares.forward(inputs)

    def backward(self, kept: KeptInputs | None, derivatives: Tensor, examples: int) -> None:
        self.squares.backward(kept, derivatives, examples)

    def end_draw(self) -> None:
        self.squares.end_draw()

    def moments(self, examples: int) -> tuple[Moment, ...]:
        return () if self.squares.total is None else (self.squares.moment(examples),)
