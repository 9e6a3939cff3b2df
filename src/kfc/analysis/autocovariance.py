"""Theorem 1's activation factor, from autocovariances that are estimated over a layer's maps."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kfc.analysis.recording import LayerRecord
from kfc.analysis.training import KFC, SUA, factors, running_averages
from kfc.curvature.kronecker import Factors
from kfc.layers import ConvolutionLayer, TransposedConvolutionLayer
from kfc.moments.patches import window_moment


def stationary_factors(record: LayerRecord, *, boundaries: bool) -> Factors:
    """Return Ω and Γ of Theorem 1 (eqn 26); Ω may be indefinite.

    Args:
        boundaries: count the locations that see a pixel with the boundary function β (eqn 24);
            otherwise all |T| locations count, as if every one saw the whole of its patch.
    """
    layer = record.layer
    if not (isinstance(layer, ConvolutionLayer) and "weight" in layer.trained()):
        return factors(record, KFC)  # a single offset: nothing is assumed
    _, counts, derivative = running_averages(record, SUA)
    if not boundaries:
        counts = torch.full_like(counts, record.rows_per_example)
    sums, pairs = _sums_over_pairs(record, layer)
    weights = torch.where(pairs > 0.5, counts / pairs, 0)  # 0: the map is too small for any pair
    head, offsets = torch.arange(len(counts), device=counts.device).tensor_split([-layer.offsets])
    channels = (sums.shape[-1] - len(head)) // layer.offsets
    index = torch.cat([head, offsets.repeat(channels)])
    return Factors(sums * weights[index][:, index], derivative)


def _sums_over_pairs(record: LayerRecord, layer: ConvolutionLayer) -> tuple[Tensor, Tensor]:
    """Return sums of products of all pairs of pixels, and the number of the pairs.

    Their quotients estimate the functions M and Ω of spatial homogeneity (eqns 20, 21), uncentred.

    Returns:
        Σ over examples and pixels u of a_j(u) a_j′(u + d′ - d), (groups, n, n), with Σ a_j(u) for
        the homogeneous coordinate if the bias is trained; and the same for one map of ones,
        (1 + |D|, 1 + |D|).
    """
    window = layer.window()
    reach = [d * (k - 1) for k, d in zip(window.kernel_size, window.dilation, strict=True)]
    # With this padding every pixel is seen at every offset, so that a second moment of patches
    # depends on differences of offsets alone.
    everywhere = replace(
        window,
        stride=(1,) * window.dims,
        padding=tuple((extent, extent) for extent in reach),
        padding_mode="zeros",
    )
    homogeneous = "bias" in layer.trained()

    def moment(maps: Tensor, groups: int) -> Tensor:
        seen = replace(everywhere, groups=groups)
        return window_moment(maps, seen, homogeneous=homogeneous, diagonal=False)

    sums, pairs = [], []
    for call in record.calls:
        inputs = call.inputs.to(record.dtype)
        maps = window.pad(layer.row_source(inputs, call.outputs))
        # A map of ones, padded in the same way, is 1 exactly inside the map.
        inside = window.pad(layer.row_source(torch.ones_like(inputs[:1, :1]), call.outputs))
        if isinstance(layer, TransposedConvolutionLayer):
            maps = maps.flip(*range(2, maps.dim()))  # it reads its kernel backwards
        sums.append(moment(maps, layer.groups))
        pairs.append(len(maps) * moment(inside, 1).squeeze(0))
    return torch.stack(sums).sum(0), torch.stack(pairs).sum(0)
