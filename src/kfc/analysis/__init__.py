"""How good the approximation of the Fisher matrix is, on your network."""

from kfc.analysis.approximations import APPROXIMATIONS, Approximation
from kfc.analysis.blocks import Block, TooLargeError
from kfc.analysis.exact import ExactBlock, exact_block
from kfc.analysis.recording import LayerRecord, factored_layers, record_layer

__all__ = [
    "APPROXIMATIONS",
    "Approximation",
    "Block",
    "ExactBlock",
    "LayerRecord",
    "TooLargeError",
    "exact_block",
    "factored_layers",
    "record_layer",
]
