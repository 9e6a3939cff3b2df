"""The approximations of a layer's Fisher block that can be compared, and what each assumes.

Those of training are computed by its own classes, from the statistics of a record.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kfc.analysis.blocks import Block, DiagonalBlock, KroneckerBlock, UnitBlock
from kfc.analysis.exact import ExactBlock
from kfc.analysis.independent import (
    independent,
    is_single,
    kfc_block,
    kronecker,
    uncorrelated_over_space,
)
from kfc.analysis.recording import LayerRecord
from kfc.curvature import options
from kfc.curvature.damping import UNDAMPED
from kfc.curvature.ekfac import MeasuredInverse
from kfc.curvature.kronecker import Factors
from kfc.layers import ConvolutionLayer
from kfc.moments.patches import Window, window_moment

# As in training, but never with the diagonal in place of a wide factor.
SUA = options.SUA(max_factor_size=sys.maxsize)
PRONG = options.PRONG(max_factor_size=sys.maxsize)
EKFAC = options.EKFAC(max_factor_size=sys.maxsize)


def eigenvalue_corrected(record: LayerRecord) -> DiagonalBlock:
    """Return EKFAC's block: KFC's eigenbases with the second moments of gradients in them."""
    curvature = record.curvature(EKFAC)
    # The moments refer to the bases of an inverse, so that they need a second pass.
    running = curvature.block(UNDAMPED).running
    curvature.adopt_inverse(curvature.invert(running, UNDAMPED), UNDAMPED)
    record.gather(curvature)
    inverse = curvature.state.inverse
    assert isinstance(inverse, MeasuredInverse)
    return DiagonalBlock(inverse.tensors["eigenvalues"], inverse.bases)


def stationary(record: LayerRecord) -> KroneckerBlock:
    """Return Theorem 1's block (eqn 26), which may be indefinite, from estimated autocovariances.

    Autocovariances are means over all pairs of pixels at an offset; the boundary function β (eqn
    24) counts the locations that see both.
    """
    layer = record.layer
    if not (isinstance(layer, ConvolutionLayer) and "weight" in layer.trained()):
        return kfc_block(record)  # a single offset: nothing is assumed
    _, counts, derivative = record.curvature(SUA).block(UNDAMPED).running
    sums = torch.zeros((), device=counts.device)
    pairs = torch.zeros_like(counts)
    everywhere, homogeneous = _everywhere(layer.window()), "bias" in layer.trained()
    moment = partial(window_moment, homogeneous=homogeneous, diagonal=False)
    for maps, inside in _padded_maps(record, layer):
        sums = sums + moment(maps, everywhere)
        pairs += len(maps) * moment(inside, replace(everywhere, groups=1)).squeeze(0)
    weights = torch.where(pairs > 0.5, counts / pairs, 0)  # 0: the map is too small for any pair
    head, offsets = torch.arange(len(counts), device=counts.device).tensor_split([-layer.offsets])
    channels = (sums.shape[-1] - len(head)) // layer.offsets
    index = torch.cat([head, offsets.repeat(channels)])
    return KroneckerBlock(Factors(sums * weights[index][:, index], derivative))


def without_boundaries(record: LayerRecord) -> KroneckerBlock:
    """Return Theorem 1's block with |T| in place of β, as if every location saw a whole patch.

    Ω = |T| ((1, M)ᵀ (1, M) + C) with the means M over all pixels, and the biased autocovariances
    C(j, j′, δ): the sum over pixels u of (a_j(u) - M_j) (a_j′(u + δ) - M_j′), divided by the number
    of pixels. Dividing by the number of pairs instead would not keep C positive semi-definite.
    """
    layer = record.layer
    if not (isinstance(layer, ConvolutionLayer) and "weight" in layer.trained()):
        return kfc_block(record)
    *_, derivative = record.curvature(SUA).block(UNDAMPED).running
    window, calls = layer.window(), list(_padded_maps(record, layer))
    pixels = sum(len(maps) * inside.sum() for maps, inside in calls)
    space = tuple(range(2, 2 + window.dims))
    mean = torch.stack([maps.sum((0, *space)) for maps, _ in calls]).sum(0) / pixels
    by_map = mean.reshape(1, -1, *(1,) * window.dims)
    moment = partial(window_moment, homogeneous=False, diagonal=False)
    centred = [moment(m - by_map * inside, _everywhere(window)) for m, inside in calls]
    covariance = torch.stack(centred).sum(0) / pixels
    patch = mean.reshape(layer.groups, -1).repeat_interleave(layer.offsets, dim=1)
    if "bias" in layer.trained():
        patch = F.pad(patch, (1, 0), value=1.0)
        covariance = F.pad(covariance, (1, 0, 1, 0))
    factor = record.rows_per_example * (patch.unsqueeze(2) * patch.unsqueeze(1) + covariance)
    return KroneckerBlock(Factors(factor, derivative))


def _everywhere(window: Window) -> Window:
    """Return a window that sees every pixel at every offset.

    A second moment of its patches depends on differences of offsets alone.
    """
    reach = [d * (k - 1) for k, d in zip(window.kernel_size, window.dilation, strict=True)]
    return replace(
        window,
        stride=(1,) * window.dims,
        padding=tuple((extent, extent) for extent in reach),
        padding_mode="zeros",
    )


def _padded_maps(record: LayerRecord, layer: ConvolutionLayer) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the maps of every call with the layer's padding, and (1, 1, *map) of ones inside."""
    window = layer.window()
    for call in record.calls:
        inputs = call.inputs.to(record.dtype)
        ones = torch.ones_like(inputs[:1, :1])
        # A map of ones, padded in the same way, is 1 exactly inside the map.
        both = (layer.row_source(each, call.outputs) for each in (inputs, ones))
        maps, inside = map(window.pad, both)
        yield maps, inside


def white(record: LayerRecord) -> KroneckerBlock:
    """Return the block of IAD and WD: derivatives uncorrelated, with one variance c (section 4.2).

    Σ_t E[a_t a_tᵀ] ⊗ c I = Ω ⊗ c I, where c is the mean of E[Ds²] over maps and locations.
    """
    activation, derivative = kfc_block(record).factors
    level = derivative.diagonal(dim1=-2, dim2=-1).mean()
    identity = torch.eye(derivative.shape[-1]).to(derivative)
    return KroneckerBlock(Factors(activation, (level * identity).expand_as(derivative)))


def diagonal(record: LayerRecord) -> DiagonalBlock:
    """Return the diagonal of the exact block."""
    return DiagonalBlock(ExactBlock(record).diagonal())


def unit_wise(record: LayerRecord) -> UnitBlock:
    """Return the exact block of every output map, without what lies between maps."""
    groups, rows, columns = record.shape
    total = record.like.new_zeros(groups, rows, columns, columns)
    for _, gradients in record.gradient_chunks():
        by_unit = gradients.flatten(0, 1).permute(1, 2, 0, 3)
        total += by_unit.mT @ by_unit
    return UnitBlock(total / record.examples)


@dataclass(frozen=True)
class Approximation:
    """A way to approximate a layer's Fisher block.

    Attributes:
        title: the name in tables.
        assumes: the assumptions it makes, by the names of the paper.
        build: returns the block of a record.
        invariant: the affine changes ("activations", "derivatives") under which its undamped
            natural gradient is the same step (Theorem 3; with padding 0 or circular).
        elements: returns the number of elements it holds, if these are many more than those of
            two factors.
    """

    title: str
    assumes: str
    build: Callable[[LayerRecord], Block]
    invariant: frozenset[str]
    elements: Callable[[LayerRecord], int] = lambda record: 0


def _independent_elements(record: LayerRecord) -> int:
    """Return the size of all derivatives, and of the moments between locations in its trace."""
    if is_single(record):
        return 0
    (groups, rows, _), locations = record.shape, record.rows_per_example
    return groups * locations * (record.draws * record.examples * rows + 2 * locations)


def _location_elements(record: LayerRecord) -> int:
    groups, rows, _ = record.shape
    return 0 if is_single(record) else record.rows_per_example * (groups * rows) ** 2


def _unit_wise_elements(record: LayerRecord) -> int:
    return record.size * record.shape[2]


ACTIVATIONS, DERIVATIVES = frozenset({"activations"}), frozenset({"derivatives"})
NEITHER, BOTH = frozenset[str](), ACTIVATIONS | DERIVATIVES
APPROXIMATIONS = {
    "iad": Approximation("IAD", "IAD", independent, BOTH, _independent_elements),
    "iad-sud": Approximation(
        "IAD + SUD", "IAD, SUD", uncorrelated_over_space, BOTH, _location_elements
    ),
    "kfc": Approximation("KFC", "IAD, SUD, SH", kfc_block, BOTH),
    "sua": Approximation("SUA", "IAD, SUD, SH, SUA", partial(kronecker, SUA), BOTH),
    "prong": Approximation("PRONG", "IAD, SH, SUA, WD", partial(kronecker, PRONG), ACTIVATIONS),
    "iad-wd": Approximation("IAD + WD", "IAD, WD", white, ACTIVATIONS),
    "ekfac": Approximation("EKFAC", "KFC's eigenvectors", eigenvalue_corrected, NEITHER),
    # Means and autocovariances are estimated from different pixels, so that they do not change
    # consistently if the activations are shifted.
    "autocovariance": Approximation("autocovariances", "IAD, SH, SUD", stationary, DERIVATIVES),
    "no-boundaries": Approximation(
        "without boundaries", "IAD, SH, SUD, no boundaries", without_boundaries, BOTH
    ),
    "unit-wise": Approximation(
        "unit-wise", "independent output maps", unit_wise, ACTIVATIONS, _unit_wise_elements
    ),
    "diagonal": Approximation("diagonal", "independent parameters", diagonal, NEITHER),
}
