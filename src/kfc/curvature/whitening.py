"""Input whitening: the activation factor alone, and a root of its inverse.

The matrix W (I x n) of a layer acts on rows a with second moments Ω. Let R be a root of the damped
inverse, (Ω + δ I)⁻¹ = Rᵀ R. In the coordinates W' = W R⁻¹, the layer acts on whitened rows R a, and
the gradient is G' = G Rᵀ. A step Δ' there is the step Δ' R of W. This needs forward passes only:
neither derivatives nor targets.

R = L⁻¹, with the Cholesky decomposition Ω + δ I = L Lᵀ. The bias comes first, so that the other
coordinates of R a are those of centred rows, each with its regression on the earlier coordinates
removed.

A wide layer is whitened in blocks of inputs. Ω is then replaced by its blocks, each with its own
leading 1, (groups · B, n_B, n_B): every input is centred, but regressed only on inputs of its own
block. R has the same first coordinate for all blocks, and is block-diagonal in the others.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kfc.curvature.damping import Damping
from kfc.curvature.factor import (
    add_to_diagonal,
    cholesky,
    eigendecompose,
    is_diagonal,
    trace,
)
from kfc.curvature.kfc import activation_sum
from kfc.curvature.kronecker import Inverse
from kfc.curvature.layer import LayerCurvature
from kfc.curvature.statistics import LayerStatistics, Moment
from kfc.layers import MatrixLayer
from kfc.moments.folding import Shape, whole


class WhiteningRoot(Inverse):
    """R with (Ω + δ I)⁻¹ = Rᵀ R: (groups, n, n), its diagonal (groups, n), or its blocks."""

    def whiten(self, matrix: Tensor) -> Tensor:
        """Return V Rᵀ of V (groups, I, n)."""
        root = self.tensors["root"]
        if root.dim() == 2:
            return matrix * root.unsqueeze(1)
        bias, blocks = split_blocks(matrix, root)
        if bias is None:
            return _joined(torch.bmm(blocks, root.mT), len(matrix))
        copies = bias.repeat_interleave(len(root) // len(matrix), dim=0)
        whole = torch.bmm(torch.cat([copies, blocks], dim=2), root.mT)
        first = whole.unflatten(0, (len(matrix), -1))[:, 0, :, :1]
        return torch.cat([first, _joined(whole[:, :, 1:], len(matrix))], dim=2)

    def unwhiten(self, matrix: Tensor) -> Tensor:
        """Return V R of V (groups, I, n)."""
        root = self.tensors["root"]
        if root.dim() == 2:
            return matrix * root.unsqueeze(1)
        bias, blocks = split_blocks(matrix, root)
        if bias is None:
            return _joined(torch.bmm(blocks, root), len(matrix))
        whole = torch.bmm(blocks, root[:, 1:])
        first = whole[:, :, :1].unflatten(0, (len(matrix), -1)).sum(1)
        first = first + bias * root.unflatten(0, (len(matrix), -1))[:, 0, :1, :1]
        return torch.cat([first, _joined(whole[:, :, 1:], len(matrix))], dim=2)

    def apply(self, gradient: Tensor) -> Tensor:
        """Return V (Ω + δ I)⁻¹ of V (groups, I, n)."""
        return self.unwhiten(self.whiten(gradient))


def split_blocks(matrix: Tensor, root: Tensor) -> tuple[Tensor | None, Tensor]:
    """Return the column of the bias, (groups, I, 1), and the other columns by block.

    The bias is ``None`` if there is none or only one block, which then contains it.

    Args:
        matrix: (groups, I, n).
        root: the blocks of R, (groups · B, n_B, n_B).

    Returns:
        The bias, and (groups · B, I, n_B), or (groups · B, I, n_B - 1) with a bias.
    """
    blocks = len(root) // len(matrix)
    if blocks == 1:
        return None, matrix
    bias = None
    if matrix.shape[2] < blocks * root.shape[2]:
        bias, matrix = matrix[:, :, :1], matrix[:, :, 1:]
    return bias, matrix.unflatten(2, (blocks, -1)).transpose(1, 2).flatten(0, 1)


def _joined(blocks: Tensor, groups: int) -> Tensor:
    """Return (groups, I, B · width) from (groups · B, I, width)."""
    joined: Tensor = blocks.unflatten(0, (groups, -1)).transpose(1, 2).flatten(2)
    return joined


def count_blocks(maps: int, offsets: int, size: int) -> int:
    """Return the number of blocks of whole input maps, a divisor of their number.

    It is the smallest number with which a block has at most ``size`` inputs, unless blocks then
    have less than a quarter of that; then it is the next smaller divisor. If a single map has more
    inputs than ``size``, every map is a block.

    Args:
        maps: J.
        offsets: |D|, the number of inputs that belong to a map.
    """
    divisors = [count for count in range(1, maps + 1) if maps % count == 0]
    fitting = [count for count in divisors if maps // count * offsets <= size]
    if not fitting:
        return maps
    best = fitting[0]
    is_small = best > 1 and 4 * (maps // best) * offsets < size
    return max(count for count in divisors if count < best) if is_small else best


class WhiteningCurvature(LayerCurvature):
    """Ω as a running average, and a root of (Ω + δ I)⁻¹, whole or in blocks.

    δ is the damping times Ω's mean eigenvalue, for each group. If blocks are wider than
    ``max_factor_size``, only the diagonal of Ω is kept.

    Args:
        block_size: the number of inputs in a block, at most, if the layer's sizes allow it.
    """

    treatment = "whitened inputs"
    layer: MatrixLayer
    inverse_class = WhiteningRoot

    def __init__(self, layer: MatrixLayer, max_factor_size: int, block_size: int) -> None:
        super().__init__(layer)
        self.max_factor_size = max_factor_size
        shape_only = torch.empty(layer.weight.shape, device="meta")
        self._inputs = layer.weight_to_matrix(shape_only).shape[2]
        self._blocks = count_blocks(self._inputs // layer.offsets, layer.offsets, block_size)

    def blocks(self) -> int:
        """Return B, the number of blocks of each group, for the parameters trained now."""
        return self._blocks if "weight" in self.layer.trained_roles() else 1

    def _block_width(self) -> int:
        has_bias = "bias" in self.layer.trained_roles()
        return has_bias + (self.layer.factor_sizes()[0] - has_bias) // self.blocks()

    def is_wide(self) -> bool:
        """Return whether only the diagonal of Ω is kept."""
        cuts_whole = type(self.layer).block_moment is MatrixLayer.block_moment
        width = self.layer.factor_sizes()[0] if cuts_whole else self._block_width()
        return width > self.max_factor_size

    def new_statistics(self, inverse: Inverse | None) -> LayerStatistics:
        return _ActivationStatistics(self.layer, 0 if self.is_wide() else self.blocks())

    def running_shapes(self) -> tuple[Shape, ...]:
        groups, width = self.layer.groups, self._block_width()
        if self.is_wide():
            return ((groups, self.layer.factor_sizes()[0]),)
        return ((groups * self.blocks(), width, width),)

    def invert(
        self, running: tuple[Tensor, ...], damping: Damping, previous: Inverse | None = None
    ) -> Inverse:
        factor, groups = running[0], self.layer.groups
        has_bias = self._has_bias(factor)
        return WhiteningRoot(
            {"root": inverse_root(factor, damping.weight, groups, has_bias=has_bias)}
        )

    def _has_bias(self, factor: Tensor) -> bool:
        """Return whether blocks have a leading 1.

        Not from the roles trained now: an asynchronous root belongs to those of its statistics.
        """
        return factor.shape[-1] * len(factor) > self.layer.groups * self._inputs

    def inverse_shapes(self, widths: tuple[int, ...] = ()) -> dict[str, Shape]:
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
        if self.is_wide():
            return f"blocks of inputs wider than {self.max_factor_size}: diagonal only"
        return f"in {self.blocks()} blocks of inputs" if self.blocks() > 1 else ""

    def summary(self) -> dict[str, Any]:
        assert self.state.running is not None
        factor, groups = self.state.running[0], self.layer.groups
        traces = whole_trace(factor, groups, has_bias=self._has_bias(factor)).tolist()
        return {"activation_trace": traces[0] if len(traces) == 1 else traces}


class _ActivationStatistics(LayerStatistics):
    """Ω: summed over the rows of all calls, mean over examples (eqn 32)."""

    def __init__(self, layer: MatrixLayer, blocks: int) -> None:
        self.layer = layer
        self.blocks = blocks  # 0: only the diagonal
        self.total: Tensor | None = None

    def forward(self, inputs: Tensor, outputs: Tensor) -> None:
        inputs = inputs.detach().to(self.layer.dtype)
        if self.blocks > 1:
            source = self.layer.row_source(inputs, outputs)
            has_bias = "bias" in self.layer.trained_roles()
            moment = self.layer.block_moment(source, self.blocks, homogeneous=has_bias)
        else:
            moment = whole(activation_sum(self.layer, inputs, outputs, diagonal=not self.blocks))
        self.total = moment if self.total is None else self.total + moment

    def backward(self, kept: None, derivatives: Tensor, examples: int) -> None:
        """Ignore the derivatives."""

    def moments(self, examples: int) -> tuple[Moment, ...]:
        return () if self.total is None else (Moment(self.total, examples, of_derivatives=False),)


def inverse_root(factor: Tensor, damping: float, groups: int, *, has_bias: bool) -> Tensor:
    """Return R with (Ω + δ I)⁻¹ = Rᵀ R for each block, with δ = damping times Ω's mean eigenvalue.

    Args:
        factor: Ω by blocks, (groups · B, n_B, n_B), or its diagonal, (groups, n).
        has_bias: whether the first coordinate of every block is the leading 1.

    Returns:
        A tensor of the same shape. It is lower triangular, unless Ω + δ I is nearly singular. Then
        it is the symmetric root, without the directions in which Ω + δ I is zero, as in a
        pseudo-inverse; with several blocks, after the bias has been eliminated. If all of Ω is
        zero, R is the identity.
    """
    blocks = len(factor) // groups
    mean = _mean_eigenvalue(factor, groups, has_bias=has_bias)
    shift = torch.where(mean > 0, damping * mean, 1).repeat_interleave(blocks)
    if not is_diagonal(factor):
        lower, is_accurate = cholesky(add_to_diagonal(factor, shift))
        if is_accurate:
            one = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)
            root: Tensor = torch.linalg.solve_triangular(lower, one.expand_as(lower), upper=False)
            return root
        if blocks > 1 and has_bias:
            return _bordered_root(factor, shift)
    return _symmetric_root(factor, shift)


def _mean_eigenvalue(factor: Tensor, groups: int, *, has_bias: bool) -> Tensor:
    """Return the mean eigenvalue of the whole Ω, (groups,), from its blocks."""
    blocks = len(factor) // groups
    width = blocks * factor.shape[-1] - (blocks - 1) * has_bias
    return whole_trace(factor, groups, has_bias=has_bias) / width


def whole_trace(factor: Tensor, groups: int, *, has_bias: bool) -> Tensor:
    """Return the trace of the whole Ω, (groups,), from its blocks."""
    blocks = len(factor) // groups
    total = trace(factor).view(groups, blocks).sum(1)
    if has_bias and blocks > 1:
        total = total - (blocks - 1) * factor[::blocks, 0, 0]  # all have the same leading 1
    return total


def _symmetric_root(factor: Tensor, shift: Tensor) -> Tensor:
    """Return the symmetric root of the pseudo-inverse of Ω + δ I, or of its diagonal."""
    values, basis = eigendecompose(factor)
    values = values + shift.unsqueeze(-1)
    roots = torch.where(values > 0, values, 1).rsqrt() * (values > 0)
    return roots if basis is None else (basis * roots.unsqueeze(-2)) @ basis.mT


def _bordered_root(factor: Tensor, shift: Tensor) -> Tensor:
    """Return [[1/l, 0], [-S m, S]], with S the symmetric root of blocks without their mean m."""
    corner, column = factor[:, :1, :1] + shift.view(-1, 1, 1), factor[:, 1:, :1]
    mean = column / corner
    rest = _symmetric_root(factor[:, 1:, 1:] - mean @ column.mT, shift)
    top = F.pad(corner.rsqrt(), (0, mean.shape[1]))
    return torch.cat([top, torch.cat([-rest @ mean, rest], dim=2)], dim=1)
