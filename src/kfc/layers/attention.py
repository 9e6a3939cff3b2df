"""The in-projection of ``nn.MultiheadAttention``."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

from kfc.layers.base import LinearLayer


class InProjectionLayer(LinearLayer):
    """Queries, keys and values as the outputs of one linear layer.

    If their inputs differ, each call of ``F.linear`` uses some rows of the weight. It counts as a
    call of the whole layer whose other outputs are not used: their derivatives are zero.
    """

    names: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"weight": "in_proj_weight", "bias": "in_proj_bias"}
    )
    functional = True
