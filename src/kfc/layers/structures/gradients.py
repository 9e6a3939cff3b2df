"""Squares of the gradients of single examples, summed over examples, a few at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from kfc.layers.base import KeptInputs, Moment
from kfc.patches import CHUNK_ELEMENTS

if TYPE_CHECKING:
    from kfc.layers.factored import KroneckerHandler


class Bases(NamedTuple):
    """Orthogonal bases U_Ω (groups, n, n) and U_Γ (groups, I, I); ``None`` is the identity."""

    activation: Tensor | None = None
    derivative: Tensor | None = None


class _Call(NamedTuple):
    """One call's rows in its first dimension, as many of each example.

    Attributes:
        source: what the rows are made of; ``None`` if the weight is not trained.
        examples: that the rows belong to; each row is its own if it cannot be said to whom.
    """

    source: Tensor | None
    derivatives: Tensor
    examples: int

    def part(self, start: int, stop: int) -> _Call:
        each = len(self.derivatives) // self.examples
        rows = slice(each * start, each * stop)
        source = None if self.source is None else self.source[rows]
        return _Call(source, self.derivatives[rows], min(stop, self.examples) - start)


class SquaredGradients:
    """Σ over examples of (U_Γᵀ G U_Ω)², squared entry by entry, with G = Σ_t Ds_t (1, a_t).

    The calls of one draw add up before their squares are taken: like frames folded into the batch
    they are locations of their example. (Of a layer that is called once, two backward passes of the
    user through one forward pass are two draws, whose squares add up.) Rows that are not of one
    example each count alone; independent targets make them uncorrelated.
    """

    def __init__(self, handler: KroneckerHandler, bases: Bases) -> None:
        self.handler = handler
        self.bases = bases
        self.trained = handler.trained()
        self.width, self.height = handler.sizes()
        self.calls = 0
        self.waiting: list[_Call] = []
        self.total: Tensor | None = None

    def forward(self, inputs: Tensor) -> KeptInputs | None:
        """What ``backward`` needs of a call."""
        self.calls += 1
        return KeptInputs.of(inputs) if "weight" in self.trained else None

    def backward(self, kept: KeptInputs | None, derivatives: Tensor, examples: int) -> None:
        handler = self.handler
        derivatives = derivatives.detach().to(handler.dtype)
        source = None
        if kept is not None:
            source = handler.row_source(kept.get(handler.dtype), derivatives)
            source = handler.rows_first(source, examples)
        derivatives = handler.rows_first(derivatives, examples)
        if len(derivatives) % examples:
            self._add([_Call(source, derivatives, len(derivatives))])
            return
        self.waiting.append(_Call(source, derivatives, examples))
        if self.calls == 1:
            # Nothing else to wait for, and to hold the derivatives for.
            self.end_draw()

    def end_draw(self) -> None:
        if self.waiting:
            self._add(self.waiting)
            self.waiting = []

    def moment(self, examples: int) -> Moment:
        """The diagonal of the mean over examples, (groups, I · n)."""
        assert self.total is not None
        return Moment(self.total.flatten(1), examples, of_derivatives=True)

    def _add(self, calls: Sequence[_Call]) -> None:
        """Calls whose gradients add up, example by example."""
        for part in self._parts(calls):
            squares = self._squares(part)
            self.total = squares if self.total is None else self.total.add_(squares)

    def _parts(self, calls: Sequence[_Call]) -> Iterator[list[_Call]]:
        """A few examples at a time, so that neither rows nor gradients take much memory."""
        examples, locations = calls[0].examples, self._locations(calls)
        per_location = self.handler.groups * self.width
        gradient = per_location * self.height if locations > 1 else 0
        step = max(1, CHUNK_ELEMENTS // (locations * per_location + gradient))
        for start in range(0, examples, step):
            yield [call.part(start, start + step) for call in calls]

    def _locations(self, calls: Sequence[_Call]) -> int:
        """Of an example, in all the calls."""
        derivatives = sum(call.derivatives.numel() for call in calls) // calls[0].examples
        return derivatives // (self.handler.groups * self.height)

    def _squares(self, calls: Sequence[_Call]) -> Tensor:
        """(groups, I, n)"""
        if self._locations(calls) == 1:
            return self._squares_of_products(calls[0])
        gradients = sum(
            self.handler.example_gradients(call.source, call.derivatives, call.examples)
            for call in calls
        )
        assert isinstance(gradients, Tensor)
        by_group = into_basis(gradients.transpose(0, 1), self.bases.activation)
        turned = into_basis(by_group.mT, self.bases.derivative)  # (groups, examples, n, I)
        return turned.square().sum(1).mT

    def _squares_of_products(self, call: _Call) -> Tensor:
        """Of gradients Dsᵀ (1, a), which factor: so do their squares, and none has to be made."""
        columns = self.handler.derivative_rows(call.derivatives)
        parts = [torch.ones_like(columns[:, :, :1])] if "bias" in self.trained else []
        if call.source is not None:
            parts.append(self.handler.activation_rows(call.source))
        rows = into_basis(torch.cat(parts, dim=2), self.bases.activation)
        return into_basis(columns, self.bases.derivative).square().mT @ rows.square()


def into_basis(rows: Tensor, basis: Tensor | None) -> Tensor:
    """(groups, ..., n) times (groups, n, n), in one product for each group."""
    if basis is None:
        return rows
    product = rows.flatten(1, -2) @ basis.to(rows.dtype)
    return product.reshape(rows.shape)
