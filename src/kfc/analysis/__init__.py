"""Measures of how accurate approximations of the Fisher matrix are for a network.

>>> import kfc.analysis as analysis
>>> model.eval()
>>> block = analysis.exact_block(model, images, "conv1")
>>> quality = analysis.compare_approximations(model, images, ["conv1"])["conv1"]
>>> ladder = analysis.measure_ladder(model, batches, ["conv1"], loss=F.cross_entropy)
>>> analysis.ladder_steps(ladder["conv1"])["SUD"].verdict
>>> record = analysis.record_layer(model, images, "conv1", samples=8)
>>> analysis.correlations(record).derivative_offsets
"""

from kfc.analysis.approximations import APPROXIMATIONS, Approximation
from kfc.analysis.blocks import Block, TooLargeError
from kfc.analysis.comparison import Comparison, compare_approximations, loss_gradient
from kfc.analysis.correlations import Correlations, correlations
from kfc.analysis.exact import ExactBlock, exact_block
from kfc.analysis.ladder import (
    LADDER,
    STEPS,
    Estimate,
    Step,
    ladder_steps,
    measure_ladder,
    rung_estimates,
)
from kfc.analysis.qualities import LayerComparison, Quality
from kfc.analysis.recording import LayerRecord, factored_layers, record_layer

__all__ = [
    "APPROXIMATIONS",
    "LADDER",
    "STEPS",
    "Approximation",
    "Block",
    "Comparison",
    "Correlations",
    "Estimate",
    "ExactBlock",
    "LayerComparison",
    "LayerRecord",
    "Quality",
    "Step",
    "TooLargeError",
    "compare_approximations",
    "correlations",
    "exact_block",
    "factored_layers",
    "ladder_steps",
    "loss_gradient",
    "measure_ladder",
    "record_layer",
    "rung_estimates",
]
