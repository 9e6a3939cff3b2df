"""The approximations of a layer's Fisher block that can be compared, and what each assumes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kfc.analysis.autocovariance import stationary_factors
from kfc.analysis.blocks import (
    Block,
    DiagonalBlock,
    EigenvalueCorrectedBlock,
    KroneckerBlock,
    UnitBlock,
)
from kfc.analysis.exact import IndependentBlock
from kfc.analysis.recording import LayerRecord
from kfc.analysis.training import KFC, PRONG, SUA, diagonal, factors, measured_inverse
from kfc.curvature.options import Kronecker


def trained(approximation: Kronecker) -> Callable[[LayerRecord], KroneckerBlock]:
    """Return a function that builds the block Ω ⊗ Γ of training."""
    return lambda record: KroneckerBlock(factors(record, approximation))


def stationary(*, boundaries: bool) -> Callable[[LayerRecord], KroneckerBlock]:
    """Return a function that builds Theorem 1's block from estimated autocovariances."""
    return lambda record: KroneckerBlock(stationary_factors(record, boundaries=boundaries))


def eigenvalue_corrected(record: LayerRecord) -> EigenvalueCorrectedBlock:
    """Return EKFAC's block: KFC's eigenbases with the second moments of gradients in them."""
    tensors = measured_inverse(record).tensors
    names = ("activation_basis", "derivative_basis", "eigenvalues")
    return EigenvalueCorrectedBlock(*(tensors[name] for name in names))


def unit_wise(record: LayerRecord) -> UnitBlock:
    """Return the exact block of every output map, without what lies between maps."""
    groups, rows, columns = record.shape
    total = record.zeros(groups, rows, columns, columns)
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


ACTIVATIONS, DERIVATIVES = frozenset({"activations"}), frozenset({"derivatives"})
NEITHER, BOTH = frozenset[str](), ACTIVATIONS | DERIVATIVES
APPROXIMATIONS = {
    "iad": Approximation("IAD alone", "IAD", IndependentBlock, BOTH, _independent_elements),
    "kfc": Approximation("KFC", "IAD, SH, SUD", trained(KFC), BOTH),
    "ekfac": Approximation("EKFAC", "KFC's eigenvectors", eigenvalue_corrected, NEITHER),
    # Means and autocovariances are estimated from different pixels, so that they do not change
    # consistently if the activations are shifted.
    "autocovariance": Approximation(
        "autocovariances", "IAD, SH, SUD", stationary(boundaries=True), DERIVATIVES
    ),
    "no-boundaries": Approximation(
        "without boundaries",
        "IAD, SH, SUD, no boundaries",
        stationary(boundaries=False),
        DERIVATIVES,
    ),
    "sua": Approximation("SUA", "IAD, SH, SUD, SUA", trained(SUA), BOTH),
    "prong": Approximation("PRONG", "IAD, SH, SUA, WD", trained(PRONG), ACTIVATIONS),
    "unit-wise": Approximation(
        "unit-wise",
        "independent output maps",
        unit_wise,
        ACTIVATIONS,
        elements=lambda record: record.size * record.shape[2],
    ),
    "diagonal": Approximation(
        "diagonal",
        "independent parameters",
        lambda record: DiagonalBlock(diagonal(record)),
        NEITHER,
    ),
}
