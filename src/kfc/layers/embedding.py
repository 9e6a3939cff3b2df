"""Embeddings, which multiply one-hot rows by their weight."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfc.layers.base import TransposedLinearLayer


class EmbeddingLayer(TransposedLinearLayer):
    """``nn.Embedding``: Ω is diagonal, the number of times that each index occurs in an example.

    The index ``padding_idx`` has no gradient; its rows are zero.
    """

    module: nn.Embedding
    one_hot: ClassVar[bool] = True

    def activation_rows(self, source: Tensor) -> Tensor:
        rows = F.one_hot(source.long().reshape(1, -1), self.module.num_embeddings).to(self.dtype)
        return rows * self._counts_as_row(rows)

    def activation_moment(self, source: Tensor, *, homogeneous: bool, diagonal: bool) -> Tensor:
        indices = source.long().flatten()
        ones = torch.ones(indices.shape, dtype=self.dtype, device=indices.device)
        counts = ones.new_zeros(self.module.num_embeddings).index_add_(0, indices, ones)
        counts = (counts * self._counts_as_row(counts)).unsqueeze(0)
        return counts if diagonal else torch.diag_embed(counts)

    def _counts_as_row(self, like: Tensor) -> Tensor:
        """Return 1 for every index, and 0 for the padding."""
        mask = like.new_ones(self.module.num_embeddings)
        if self.module.padding_idx is not None:
            mask[self.module.padding_idx] = 0
        return mask
