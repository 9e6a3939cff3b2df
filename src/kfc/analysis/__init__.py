"""Measures of how accurate approximations of the Fisher matrix are for a network.

>>> import kfc.analysis as analysis
>>> model.eval()
>>> block = analysis.exact_block(model, images, "conv1")
>>> quality = analysis.compare_approximations(model, images, ["conv1"])["conv1"]
>>> record = analysis.record_layer(model, images, "conv1", samples=8)
>>> analysis.assumptions(record)["SUD"].verdict
>>> analysis.correlations(record).derivative_offsets
"""

from kfc.analysis.approximations import APPROXIMATIONS, Approximation
from kfc.analysis.assumptions import Assumption, Estimate, assumptions
from kfc.analysis.blocks import Block, TooLargeError
from kfc.analysis.comparison import (
    LayerComparison,
    Quality,
    compare_approximations,
    compare_blocks,
    loss_gradient,
)
from kfc.analysis.correlations import Correlations, correlations
from kfc.analysis.exact import ExactBlock, exact_block
from kfc.analysis.recording import LayerRecord, factored_layers, record_layer

__all__ = [
    "APPROXIMATIONS",
    "Approximation",
    "Assumption",
    "Block",
    "Correlations",
    "Estimate",
    "ExactBlock",
    "LayerComparison",
    "LayerRecord",
    "Quality",
    "TooLargeError",
    "assumptions",
    "compare_approximations",
    "compare_blocks",
    "correlations",
    "exact_block",
    "factored_layers",
    "loss_gradient",
    "record_layer",
]
