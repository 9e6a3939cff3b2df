"""Linear layers."""

from torch import Tensor

from kfc.layers.base import MatrixLayer, is_sequence_first
from kfc.moments.patches import row_moment


class LinearLayer(MatrixLayer):
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
