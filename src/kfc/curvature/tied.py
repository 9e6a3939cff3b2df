"""A linear layer that shares its weight with an embedding, as in language models."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kfc.curvature.factor import trace
from kfc.curvature.kfc import FactorStatistics, KroneckerCurvature, without_padding
from kfc.curvature.kronecker import Factors, Inverse
from kfc.curvature.statistics import LayerStatistics, Moment
from kfc.layers import TiedEmbeddingLayer
from kfc.moments.folding import Shape, plus_diagonal, to_keep
from kfc.moments.patches import row_moment


class TiedCurvature(KroneckerCurvature):
    """One Kronecker product for two: Ω ⊗ Γ of the linear layer, and Γₑ ⊗ Ωₑ of embeddings.

    Ωₑ are the counts of the indices, which are rows of the weight, and Γₑ are the second moments of
    derivatives, whose elements are columns. Their sum is approximated as damping is:
    (Ω + π Γₑ) ⊗ (Γ + Ωₑ / π), with the π for which the trace of the terms too many is least,
    π² = (tr Ω tr Ωₑ) / (tr Γ tr Γₑ).
    """

    layer: TiedEmbeddingLayer

    def new_statistics(self, inverse: Inverse | None) -> LayerStatistics:
        return TiedStatistics(self.layer, self.are_wide())

    def may_be_rounded(self, inverse: Inverse | None) -> tuple[bool, ...]:
        return (False,) * len(self.running_shapes())

    def running_shapes(self) -> tuple[Shape, ...]:
        activation, derivative = super().running_shapes()
        return activation, derivative, (1, self.layer.factor_sizes()[1]), activation

    def factors_of(self, running: tuple[Tensor, ...]) -> Factors:
        activation, derivative, counts, embedded = running
        numerator = trace(activation) * trace(counts)
        denominator = trace(derivative) * trace(embedded)
        # Without derivatives of one of the uses, its product is zero, and any π will do.
        known = (numerator > 0) & (denominator > 0)
        pi = torch.where(known, numerator / denominator, 1).sqrt()
        shape = (-1,) + (1,) * (activation.dim() - 1)
        is_used = trace(embedded).gt(0).to(counts)
        return Factors(
            activation + (is_used * pi).view(shape).to(activation) * embedded,
            plus_diagonal(derivative, (is_used / pi).view(-1, 1).to(counts) * counts),
        )

    def note(self) -> str:
        return "; ".join(filter(None, ("tied to an embedding", super().note())))


class _Indices(NamedTuple):
    """A call of an embedding: the counts of its indices, used up by the first draw, and a mask."""

    counts: list[Tensor]
    mask: Tensor | None


class TiedStatistics(LayerStatistics):
    """Ω and Γ of the linear layer, and the counts of indices and Γₑ of the embeddings.

    Args:
        wide: whether Ω and Γ are kept as diagonals.
    """

    def __init__(self, layer: TiedEmbeddingLayer, wide: tuple[bool, bool]) -> None:
        self.layer, self._wide = layer, wide
        self._linear = FactorStatistics(layer, wide)
        self._counts: Tensor | None = None
        self._embedded: Tensor | None = None
        self._rows = 0

    def forward(self, inputs: Tensor, outputs: Tensor) -> Any:
        if inputs.is_floating_point():
            return self._linear.forward(inputs, outputs)
        return _Indices([self.layer.index_counts(inputs)], self.layer.padding_mask(inputs))

    def backward(self, kept: Any, derivatives: Tensor, examples: int) -> None:
        if not isinstance(kept, _Indices):
            self._linear.backward(kept, derivatives, examples)
            return
        moment, rows = self._moment(derivatives.detach().to(self.layer.dtype), kept.mask)
        self._embedded = moment if self._embedded is None else self._embedded.add_(moment)
        if kept.counts:
            counts = kept.counts.pop()
            self._counts = counts if self._counts is None else self._counts.add_(counts)
            self._rows += rows

    def _moment(self, derivatives: Tensor, mask: Tensor | None) -> tuple[Tensor, int]:
        """Return Σ rowᵀ row of derivatives, with the shape of Ω, and the number of rows."""
        rows, count = without_padding(self.layer.derivative_rows(derivatives), mask)
        trained = self.layer.trained_roles()
        if "weight" not in trained:  # embeddings have no bias
            rows = torch.zeros_like(rows[..., :1])
        elif "bias" in trained:
            rows = F.pad(rows, (1, 0))
        diagonal = self._wide[0]
        return row_moment(rows, homogeneous=False, diagonal=diagonal, fold=True), count

    def moments(self, examples: int) -> tuple[Moment, ...]:
        linear = self._linear.moments(examples)
        if not linear:
            return ()
        activation = linear[0].total
        counts, embedded = self._counts, self._embedded
        if counts is None or embedded is None:
            counts = activation.new_zeros(1, self.layer.factor_sizes()[1])
            embedded = torch.zeros_like(activation)
        return (
            *linear,
            Moment(counts, examples, of_derivatives=False),
            Moment(to_keep(embedded), self._rows or examples, of_derivatives=True),
        )
