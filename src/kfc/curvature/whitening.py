"""Input whitening: the activation factor alone, and a root of its inverse.

The matrix W (I x n) of a layer acts on rows a with second moments Ω. Let R be a root of the damped
inverse, (Ω + δ I)⁻¹ = Rᵀ R. In the coordinates W' = W R⁻¹, the layer acts on whitened rows R a, and
the gradient is G' = G Rᵀ. A step Δ' there is the step Δ' R of W. This needs forward passes only:
neither derivatives nor targets.

R = L⁻¹, with the Cholesky decomposition Ω + δ I = L Lᵀ. The bias comes first, so that the other
coordinates of R a are those of centred rows, each with its regression on the earlier coordinates
removed.
"""

from typing import Any

import torch
from torch import Tensor

from kfc.curvature.damping import Damping
from kfc.curvature.kfc import activation_sum
from kfc.curvature.kronecker import (
    Inverse,
    Shape,
    add_to_diagonal,
    cholesky,
    eigendecompose,
    is_diagonal,
    mean_eigenvalue,
    trace,
)
from kfc.curvature.layer import LayerCurvature
from kfc.curvature.statistics import LayerStatistics, Moment
from kfc.layers import MatrixLayer


class WhiteningRoot(Inverse):
    """R with (Ω + δ I)⁻¹ = Rᵀ R, (groups, n, n), or its diagonal, (groups, n)."""

    def whiten(self, matrix: Tensor) -> Tensor:
        """Return V Rᵀ of V (groups, I, n)."""
        root = self.tensors["root"]
        return matrix * root.unsqueeze(1) if root.dim() == 2 else torch.bmm(matrix, root.mT)

    def unwhiten(self, matrix: Tensor) -> Tensor:
        """Return V R of V (groups, I, n)."""
        root = self.tensors["root"]
        return matrix * root.unsqueeze(1) if root.dim() == 2 else torch.bmm(matrix, root)

    def apply(self, gradient: Tensor) -> Tensor:
        """Return V (Ω + δ I)⁻¹ of V (groups, I, n)."""
        return self.unwhiten(self.whiten(gradient))


class WhiteningCurvature(LayerCurvature):
    """Ω as a running average, and a root of (Ω + δ I)⁻¹.

    δ is the damping times Ω's mean eigenvalue, for each group. If Ω is wider than
    ``max_factor_size``, only its diagonal is kept.
    """

    treatment = "whitened inputs"
    layer: MatrixLayer
    inverse_class = WhiteningRoot

    def __init__(self, layer: MatrixLayer, max_factor_size: int) -> None:
        super().__init__(layer)
        self.max_factor_size = max_factor_size

    def is_wide(self) -> bool:
        """Return whether only the diagonal of Ω is kept."""
        return self.layer.factor_sizes()[0] > self.max_factor_size

    def new_statistics(self, inverse: Inverse | None) -> LayerStatistics:
        return _ActivationStatistics(self.layer, wide=self.is_wide())

    def running_shapes(self) -> tuple[Shape, ...]:
        groups, width = self.layer.groups, self.layer.factor_sizes()[0]
        return ((groups, width) if self.is_wide() else (groups, width, width),)

    def invert(self, running: tuple[Tensor, ...], damping: Damping) -> Inverse:
        return WhiteningRoot({"root": inverse_root(running[0], damping.weight)})

    def inverse_shapes(self) -> dict[str, Shape]:
        return {"root": self.running_shapes()[0]}

    def apply_inverse(self, inverse: Inverse, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return V (Ω + δ I)⁻¹ with V = (bias, weight)."""
        return self.layer.from_matrix(inverse.apply(self.layer.to_matrix(gradients)))

    def whiten(self, matrix: Tensor) -> Tensor:
        """Return V Rᵀ of V (groups, I, n)."""
        root = self._inverse_in_dtype()
        assert root is not None
        return root.whiten(matrix)

    def unwhiten(self, matrix: Tensor) -> Tensor:
        """Return V R of V (groups, I, n)."""
        root = self._inverse_in_dtype()
        assert root is not None
        return root.unwhiten(matrix)

    def activation_factor(self) -> Tensor | None:
        return None if self.state.running is None else self.state.running[0]

    def note(self) -> str:
        wide = f"activation factor wider than {self.max_factor_size}: diagonal only"
        return wide if self.is_wide() else ""

    def summary(self) -> dict[str, Any]:
        assert self.state.running is not None
        traces = trace(self.state.running[0]).tolist()
        return {"activation_trace": traces[0] if len(traces) == 1 else traces}


class _ActivationStatistics(LayerStatistics):
    """Ω: summed over the rows of all calls, mean over examples (eqn 26)."""

    def __init__(self, layer: MatrixLayer, *, wide: bool) -> None:
        self.layer = layer
        self.wide = wide
        self.total: Tensor | None = None

    def forward(self, inputs: Tensor, outputs: Tensor) -> None:
        inputs = inputs.detach().to(self.layer.dtype)
        moment = activation_sum(self.layer, inputs, outputs, diagonal=self.wide)
        self.total = moment if self.total is None else self.total + moment

    def backward(self, kept: None, derivatives: Tensor, examples: int) -> None:
        """Ignore the derivatives."""

    def moments(self, examples: int) -> tuple[Moment, ...]:
        return () if self.total is None else (Moment(self.total, examples, of_derivatives=False),)


def inverse_root(factor: Tensor, damping: float) -> Tensor:
    """Return R with (Ω + δ I)⁻¹ = Rᵀ R for each group, with δ = damping times Ω's mean eigenvalue.

    Args:
        factor: Ω, (groups, n, n), or its diagonal, (groups, n).

    Returns:
        A tensor of the same shape. It is lower triangular, unless Ω + δ I is nearly singular. Then
        it is the symmetric root, without the directions in which Ω + δ I is zero, as in a
        pseudo-inverse. If all of Ω is zero, R is the identity.
    """
    mean = mean_eigenvalue(factor)
    shift = torch.where(mean > 0, damping * mean, 1)
    if not is_diagonal(factor):
        lower, is_accurate = cholesky(add_to_diagonal(factor, shift))
        if is_accurate:
            one = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)
            root: Tensor = torch.linalg.solve_triangular(lower, one.expand_as(lower), upper=False)
            return root
    values, basis = eigendecompose(factor)
    values = values + shift.unsqueeze(-1)
    roots = torch.where(values > 0, values, 1).rsqrt() * (values > 0)
    return roots if basis is None else (basis * roots.unsqueeze(-2)) @ basis.mT
