"""Embeddings, which multiply one-hot rows by their weight, and heads that share it."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfc.layers.base import LinearLayer, TransposedLinearLayer


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
        counts = index_counts(self.module, source, self.dtype)
        return counts if diagonal else torch.diag_embed(counts)

    def padding_mask(self, inputs: Tensor) -> Tensor | None:
        return padding_mask(self.module, inputs)

    def _counts_as_row(self, like: Tensor) -> Tensor:
        """Return 1 for every index, and 0 for the padding."""
        mask = like.new_ones(self.module.num_embeddings)
        if self.module.padding_idx is not None:
            mask[self.module.padding_idx] = 0
        return mask


def index_counts(embedding: nn.Embedding, indices: Tensor, dtype: torch.dtype) -> Tensor:
    """Return how often each index occurs, (1, indices); never for the padding."""
    flat = indices.long().flatten()
    ones = torch.ones(flat.shape, dtype=dtype, device=flat.device)
    counts = ones.new_zeros(embedding.num_embeddings).index_add_(0, flat, ones)
    if embedding.padding_idx is not None:
        counts[embedding.padding_idx] = 0
    return counts.unsqueeze(0)


def padding_mask(embedding: nn.Embedding, indices: Tensor) -> Tensor | None:
    """Return whether each index is one of a row that is trained; ``None`` without padding."""
    padding = embedding.padding_idx
    return None if padding is None else indices.flatten() != padding


class TiedEmbeddingLayer(LinearLayer):
    """``nn.Linear`` with the weight of embeddings, as in language models: a row per index.

    Calls with indices are those of an embedding, all others those of the linear layer.
    """

    def tie(self, modules: tuple[nn.Module, ...]) -> None:
        """Treat modules as calls of this layer; the linear ones come first."""
        super().tie(tuple(sorted(modules, key=lambda module: isinstance(module, nn.Embedding))))

    def index_counts(self, indices: Tensor) -> Tensor:
        """Return how often each index occurs, (1, indices); never for the padding."""
        embedding = self.modules[-1]
        assert isinstance(embedding, nn.Embedding)
        return index_counts(embedding, indices, self.dtype)

    def padding_mask(self, inputs: Tensor) -> Tensor | None:
        embedding = self.modules[-1]
        if inputs.is_floating_point() or not isinstance(embedding, nn.Embedding):
            return None
        return padding_mask(embedding, inputs)
