"""Layers that multiply rows of their input by a matrix; linear layers, of which that is all."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kfc.kronecker import Factors
from kfc.layers.base import Handler, Inverse, Statistics, is_sequence_first
from kfc.layers.structures import STRUCTURES, Structure
from kfc.patches import row_moment


class KroneckerHandler(Handler):
    """A layer that multiplies rows of its input by one matrix (bias, weight), I x (1 + J|D|).

    Subclasses say how inputs, derivatives and the weight become rows and matrices, each with a
    leading dimension for groups (1 for most layers). The bias and its homogeneous coordinate,
    diagonals for wide factors, ties and frozen parts are taken care of here. The parameters are
    the module's ``weight`` and ``bias``.
    """

    roles = ("bias", "weight")
    #: How the layer's Fisher block is approximated.
    structure: Structure = STRUCTURES["kfc"]

    @property
    def treatment(self) -> str:
        return self.structure.treatment

    @property
    def groups(self) -> int:
        return 1

    @property
    def offsets(self) -> int:
        """|D|, of the kernel: pixels that a row is made of."""
        return 1

    def row_source(self, inputs: Tensor, outputs: Tensor) -> Tensor:
        """What rows are made of: the inputs of a call, unless the layer changes them first."""
        return inputs

    @abstractmethod
    def activation_moment(self, source: Tensor, *, homogeneous: bool, diagonal: bool) -> Tensor:
        """Σ rowᵀ row, (groups, n, n), over what each output location sees, (groups, rows, n).

        ``homogeneous`` rows begin with a 1; of a ``diagonal`` only (groups, n) is wanted.
        ``kfc.patches.row_moment`` does both.
        """

    def activation_rows(self, source: Tensor) -> Tensor:
        """(groups, rows, J|D|): what each output location sees.

        ``activation_moment`` usually has a cheaper way; this is for gradients of single examples.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not say what its rows are, which gradients of single "
            "examples need: give it activation_rows"
        )

    @abstractmethod
    def derivative_rows(self, derivatives: Tensor) -> Tensor:
        """(groups, rows, I): the derivatives with respect to each output location."""

    def rows_first(self, values: Tensor, examples: int) -> Tensor:
        """A source, or derivatives, of a call with their rows, example by example, first."""
        return values

    def example_gradients(
        self, source: Tensor | None, derivatives: Tensor, examples: int
    ) -> Tensor:
        """(examples, groups, I, n): Σ_t Ds_t (1, a_t) of each example, for the trained parameters.

        Args:
            source: what ``row_source`` made of a call's inputs; its rows lie example by example.
                ``None`` will do if the weight is not trained.
            derivatives: with respect to the call's outputs.
        """
        trained = self.trained()
        columns = self.derivative_rows(derivatives.to(self.dtype))
        # (groups, examples · locations, I) -> (examples, groups, locations, I)
        columns = columns.unflatten(1, (examples, -1)).transpose(0, 1)
        parts = [columns.sum(2).unsqueeze(-1)] if "bias" in trained else []
        if "weight" in trained:
            assert source is not None
            rows = self.activation_rows(source.to(self.dtype)).unflatten(1, (examples, -1))
            parts.append(columns.mT @ rows.transpose(0, 1))
        return torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]

    def pixel_rows(self, inputs: Tensor, outputs: Tensor) -> Tensor:
        """(groups, pixels, J): the activations at each location of the inputs.

        By default each output location sees a single pixel.
        """
        return self.activation_rows(self.row_source(inputs, outputs))

    def offset_counts(self, inputs: Tensor, outputs: Tensor) -> Tensor:
        """Σ over a call's rows of the boundary counts β, (1 + |D|, 1 + |D|).

        How many rows see a pixel at both of two offsets of the kernel: see ``kfc.stationary``. By
        default there is one offset, which always sees one.
        """
        rows = self.derivative_rows(outputs).shape[1]
        return inputs.new_full((2, 2), rows, dtype=self.dtype)

    @abstractmethod
    def weight_to_matrix(self, weight: Tensor) -> Tensor:
        """(groups, I, J|D|)"""

    @abstractmethod
    def weight_from_matrix(self, matrix: Tensor) -> Tensor:
        """The reverse of ``weight_to_matrix``."""

    def sizes(self) -> tuple[int, int]:
        """(n, m): how wide Ω and Γ are for the parameters trained now."""
        _, rows, columns = self.weight_to_matrix(self.weight).shape
        trained = self.trained()
        return ("bias" in trained) + ("weight" in trained) * columns, rows

    def are_wide(self) -> tuple[bool, bool]:
        """Whether Ω and Γ are kept as diagonals."""
        activation, derivative = self.sizes()
        return activation > self.max_factor_size, derivative > self.max_factor_size

    # What its structure says

    def statistics(self, inverse: Inverse | None = None) -> Statistics:
        return self.structure.statistics(self, inverse)

    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return self.structure.shapes(self)

    def factors(self, running: tuple[Tensor, ...]) -> Factors | None:
        """Ω and Γ, batched over groups, if the block is made of them."""
        return self.structure.factors(self, running)

    def invert(self, running: tuple[Tensor, ...], damping: float, kind: str) -> Inverse:
        return self.structure.invert(self, running, damping, kind)

    def continued(self, inverse: Inverse, previous: Inverse) -> Inverse:
        return self.structure.continued(inverse, previous)

    def measured_shapes(self) -> tuple[tuple[int, ...], ...]:
        return self.structure.measured_shapes(self)

    def updated(self, inverse: Inverse, means: tuple[Tensor, ...], decay: float) -> Inverse:
        return self.structure.updated(inverse, means, decay)

    def redamp(
        self, inverse: Inverse, running: tuple[Tensor, ...], damping: float, kind: str
    ) -> Inverse:
        return self.structure.redamp(self, inverse, running, damping, kind)

    def inverse_shapes(self, kind: str) -> dict[str, tuple[int, ...]]:
        return self.structure.inverse_shapes(self, kind)

    def inverse_triangles(self, kind: str) -> tuple[str, ...]:
        return self.structure.inverse_triangles(kind)

    def restore_inverse(self, tensors: Mapping[str, Tensor], kind: str) -> Inverse:
        return self.structure.restore_inverse(tensors, kind)

    def note(self) -> str:
        return self.structure.note(self)

    def summary(self, running: tuple[Tensor, ...]) -> dict[str, Any]:
        return self.structure.summary(self, running)

    def natural_gradient(
        self, inverse: Inverse, gradients: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """The inverse times V = (bias, weight), as in Γ_damped⁻¹ V Ω_damped⁻¹ (eqn 10)."""
        parts = []
        if "bias" in gradients:
            parts.append(gradients["bias"].reshape(self.groups, -1, 1))
        if "weight" in gradients:
            parts.append(self.weight_to_matrix(gradients["weight"]))
        solution = inverse.apply(torch.cat(parts, dim=2) if len(parts) > 1 else parts[0])
        result = {}
        if "bias" in gradients:
            result["bias"] = solution[:, :, 0].reshape(-1)
            solution = solution[:, :, 1:]
        if "weight" in gradients:
            result["weight"] = self.weight_from_matrix(solution)
        return result


class LinearHandler(KroneckerHandler):
    """``nn.Linear``: all dimensions between the first and the last count as locations."""

    def activation_rows(self, source: Tensor) -> Tensor:
        return source.reshape(1, -1, source.shape[-1])

    def activation_moment(self, source: Tensor, *, homogeneous: bool, diagonal: bool) -> Tensor:
        rows = self.activation_rows(source)
        return row_moment(rows, homogeneous=homogeneous, diagonal=diagonal)

    def rows_first(self, values: Tensor, examples: int) -> Tensor:
        if values.dim() == 1:
            return values.unsqueeze(0)
        return values.transpose(0, 1) if is_sequence_first(values.shape[:-1], examples) else values

    def derivative_rows(self, derivatives: Tensor) -> Tensor:
        return derivatives.reshape(1, -1, derivatives.shape[-1])

    def weight_to_matrix(self, weight: Tensor) -> Tensor:
        return weight.unsqueeze(0)

    def weight_from_matrix(self, matrix: Tensor) -> Tensor:
        return matrix.squeeze(0)
