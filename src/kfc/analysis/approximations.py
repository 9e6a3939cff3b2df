"""The approximations of a layer's Fisher block that can be compared, and what each assumes.

Those of training are computed by its own classes, from the statistics of a record.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from kfc.analysis.blocks import Block, DiagonalBlock, KroneckerBlock, UnitBlock
from kfc.analysis.exact import ExactBlock, IndependentBlock
from kfc.analysis.recording import LayerRecord
from kfc.curvature import options
from kfc.curvature.damping import UNDAMPED
from kfc.curvature.ekfac import MeasuredInverse
from kfc.curvature.kronecker import Factors
from kfc.layers import ConvolutionLayer
from kfc.moments.patches import window_moment

# As in training, but never with the diagonal in place of a wide factor.
KFC = options.Kronecker(max_factor_size=sys.maxsize)
SUA = options.SUA(max_factor_size=sys.maxsize)
PRONG = options.PRONG(max_factor_size=sys.maxsize)
EKFAC = options.EKFAC(max_factor_size=sys.maxsize)


def kronecker(approximation: options.Kronecker, record: LayerRecord) -> KroneckerBlock:
    """Return the block Ω ⊗ Γ of training."""
    factors = record.curvature(approximation).factors()
    assert factors is not None
    return KroneckerBlock(Factors(*(f if f.dim() == 3 else f.diag_embed() for f in factors)))


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


def stationary(record: LayerRecord, *, boundaries: bool) -> KroneckerBlock:
    """Return Theorem 1's block (eqn 26), which may be indefinite, from estimated autocovariances.

    Args:
        boundaries: count the locations that see a pixel with the boundary function β (eqn 24);
            otherwise all |T| locations count, as if every one saw the whole of its patch.
    """
    layer = record.layer
    if not (isinstance(layer, ConvolutionLayer) and "weight" in layer.trained()):
        return kronecker(KFC, record)  # a single offset: nothing is assumed
    _, counts, derivative = record.curvature(SUA).block(UNDAMPED).running
    if not boundaries:
        counts = torch.full_like(counts, record.rows_per_example)
    sums, pairs = _sums_over_pairs(record, layer)
    weights = torch.where(pairs > 0.5, counts / pairs, 0)  # 0: the map is too small for any pair
    head, offsets = torch.arange(len(counts), device=counts.device).tensor_split([-layer.offsets])
    channels = (sums.shape[-1] - len(head)) // layer.offsets
    index = torch.cat([head, offsets.repeat(channels)])
    return KroneckerBlock(Factors(sums * weights[index][:, index], derivative))


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
    moment = partial(window_moment, homogeneous="bias" in layer.trained(), diagonal=False)
    sums, pairs = [], []
    for call in record.calls:
        inputs = call.inputs.to(record.dtype)
        maps = window.pad(layer.row_source(inputs, call.outputs))
        # A map of ones, padded in the same way, is 1 exactly inside the map.
        inside = window.pad(layer.row_source(torch.ones_like(inputs[:1, :1]), call.outputs))
        sums.append(moment(maps, everywhere))
        pairs.append(len(maps) * moment(inside, replace(everywhere, groups=1)).squeeze(0))
    return torch.stack(sums).sum(0), torch.stack(pairs).sum(0)


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
    (groups, rows, _), locations = record.shape, record.rows_per_example
    return groups * locations * (record.draws * record.examples * rows + 2 * locations)


def _unit_wise_elements(record: LayerRecord) -> int:
    return record.size * record.shape[2]


ACTIVATIONS, DERIVATIVES = frozenset({"activations"}), frozenset({"derivatives"})
NEITHER, BOTH = frozenset[str](), ACTIVATIONS | DERIVATIVES
APPROXIMATIONS = {
    "iad": Approximation("IAD alone", "IAD", IndependentBlock, BOTH, _independent_elements),
    "kfc": Approximation("KFC", "IAD, SH, SUD", partial(kronecker, KFC), BOTH),
    "ekfac": Approximation("EKFAC", "KFC's eigenvectors", eigenvalue_corrected, NEITHER),
    # Means and autocovariances are estimated from different pixels, so that they do not change
    # consistently if the activations are shifted.
    "autocovariance": Approximation(
        "autocovariances", "IAD, SH, SUD", partial(stationary, boundaries=True), DERIVATIVES
    ),
    "no-boundaries": Approximation(
        "without boundaries",
        "IAD, SH, SUD, no boundaries",
        partial(stationary, boundaries=False),
        DERIVATIVES,
    ),
    "sua": Approximation("SUA", "IAD, SH, SUD, SUA", partial(kronecker, SUA), BOTH),
    "prong": Approximation("PRONG", "IAD, SH, SUA, WD", partial(kronecker, PRONG), ACTIVATIONS),
    "unit-wise": Approximation(
        "unit-wise", "independent output maps", unit_wise, ACTIVATIONS, _unit_wise_elements
    ),
    "diagonal": Approximation("diagonal", "independent parameters", diagonal, NEITHER),
}
