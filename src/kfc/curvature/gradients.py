"""Squares of the gradients of single examples, summed over a few examples at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kfc.curvature.kronecker import Bases
from kfc.curvature.statistics import KeptInputs, LayerStatistics, Moment
from kfc.layers import MatrixLayer
from kfc.moments.patches import CHUNK_ELEMENTS


class _Call(NamedTuple):
    """One call, with its rows in the first dimension and equally many for every example.

    Attributes:
        source: what rows are cut from; ``None`` if the weight is not trained.
        examples: the number of examples; if rows mix examples, the number of rows.
    """

    source: Tensor | None
    derivatives: Tensor
    examples: int

    def part(self, start: int, stop: int) -> _Call:
        each = len(self.derivatives) // self.examples
        rows = slice(each * start, each * stop)
        source = None if self.source is None else self.source[rows]
        return _Call(source, self.derivatives[rows], min(stop, self.examples) - start)


class SquaredGradients(LayerStatistics):
    """Σ over examples of (U_Γᵀ G U_Ω)², squared entry by entry, with G = Σ_t Ds_t (1, a_t).

    The calls of one draw are added before squaring: like frames folded into the batch, they are
    locations of their example. (For a layer that is called once, two backward passes of the user
    through one forward pass are two draws, and their squares are added.) Rows that mix examples
    count on their own: independent targets make them uncorrelated.
    """

    def __init__(self, layer: MatrixLayer, bases: Bases) -> None:
        self.layer = layer
        self.bases = bases
        self.trained = layer.trained()
        self.width, self.height = layer.factor_sizes()
        self.calls = 0
        self.waiting: list[_Call] = []
        self.total: Tensor | None = None

    def forward(self, inputs: Tensor, outputs: Tensor) -> KeptInputs | None:
        self.calls += 1
        return KeptInputs.of(inputs) if "weight" in self.trained else None

    def backward(self, kept: KeptInputs | None, derivatives: Tensor, examples: int) -> None:
        layer = self.layer
        derivatives = derivatives.detach().to(layer.dtype)
        source = None
        if kept is not None:
            source = layer.row_source(kept.get(layer.dtype), derivatives)
            source = layer.rows_first(source, examples)
        derivatives = layer.rows_first(derivatives, examples)
        if len(derivatives) % examples:
            self._add([_Call(source, derivatives, len(derivatives))])
            return
        self.waiting.append(_Call(source, derivatives, examples))
        if self.calls == 1:
            # No other call to wait for: release the derivatives.
            self.end_draw()

    def end_draw(self) -> None:
        if self.waiting:
            self._add(self.waiting)
            self.waiting = []

    def moments(self, examples: int) -> tuple[Moment, ...]:
        """Return the mean over examples as a diagonal, (groups, I · n)."""
        if self.total is None:
            return ()
        return (Moment(self.total.flatten(1), examples, of_derivatives=True),)

    def _add(self, calls: Sequence[_Call]) -> None:
        """Add calls, whose gradients are summed example by example before squaring."""
        for part in self._parts(calls):
            squares = self._squares(part)
            self.total = squares if self.total is None else self.total.add_(squares)

    def _parts(self, calls: Sequence[_Call]) -> Iterator[list[_Call]]:
        """Yield a few examples at a time, to limit the memory of rows and gradients."""
        examples, locations = calls[0].examples, self._locations(calls)
        per_location = self.layer.groups * self.width
        gradient = 0 if self._are_products(calls) else per_location * self.height
        step = max(1, CHUNK_ELEMENTS // (locations * per_location + gradient))
        for start in range(0, examples, step):
            yield [call.part(start, start + step) for call in calls]

    def _locations(self, calls: Sequence[_Call]) -> int:
        """Return the number of locations of an example in all the calls."""
        derivatives = sum(call.derivatives.numel() for call in calls) // calls[0].examples
        return derivatives // (self.layer.groups * self.height)

    def _are_products(self, calls: Sequence[_Call]) -> bool:
        """Return whether gradients of examples are products of two vectors."""
        return self._locations(calls) == 1 and not self.layer.centred

    def _squares(self, calls: Sequence[_Call]) -> Tensor:
        """Return the sum over examples of squared gradients, (groups, I, n)."""
        if self._are_products(calls):
            return self._squares_of_products(calls[0])
        gradients = sum(
            self.layer.example_gradients(call.source, call.derivatives, call.examples)
            for call in calls
        )
        assert isinstance(gradients, Tensor)
        by_group = into_basis(gradients.transpose(0, 1), self.bases.activation)
        turned = into_basis(by_group.mT, self.bases.derivative)  # (groups, examples, n, I)
        return turned.square().sum(1).mT

    def _squares_of_products(self, call: _Call) -> Tensor:
        """Return the squares of gradients Dsᵀ (1, a), which factor, without forming them."""
        columns = self.layer.derivative_rows(call.derivatives)
        parts = [torch.ones_like(columns[:, :, :1])] if "bias" in self.trained else []
        if call.source is not None:
            parts.append(self.layer.activation_rows(call.source))
        rows = into_basis(torch.cat(parts, dim=2), self.bases.activation)
        return into_basis(columns, self.bases.derivative).square().mT @ rows.square()


def into_basis(rows: Tensor, basis: Tensor | None) -> Tensor:
    """Return (groups, ..., n) times (groups, n, n), in one product per group."""
    if basis is None:
        return rows
    product = rows.flatten(1, -2) @ basis.to(rows.dtype)
    return product.reshape(rows.shape)
