"""Layer types, and how inputs, derivatives and weights are arranged as rows and matrices.

Two kinds of layers have a Fisher block: those that multiply rows of their input by a matrix
(linear and convolutional layers) and normalisation layers, which have a small block per channel.
Every other parameter has none, for a reason that ``PlainGradient`` states.

To add a layer type, subclass ``MatrixLayer`` or ``LinearLayer`` and register it::

    @kfc.layers.layer_for.register
    def _(module: MyModule) -> kfc.layers.Layer:
        return MyLayer(module)
"""

from kfc.layers.attention import InProjectionLayer
from kfc.layers.base import (
    Layer,
    LinearLayer,
    MatrixLayer,
    NormalisationLayer,
    TransposedLinearLayer,
)
from kfc.layers.convolution import (
    ConvolutionLayer,
    SameConvolutionLayer,
    TransposedConvolutionLayer,
)
from kfc.layers.embedding import EmbeddingLayer, TiedEmbeddingLayer
from kfc.layers.look_alikes import is_look_alike
from kfc.layers.normalisation import mixes_examples
from kfc.layers.registry import PlainGradient, Plan, find_layers, layer_for
from kfc.layers.standardised import (
    StandardisedConvolutionLayer,
    StandardisedSameConvolutionLayer,
)

__all__ = [
    "ConvolutionLayer",
    "EmbeddingLayer",
    "InProjectionLayer",
    "Layer",
    "LinearLayer",
    "MatrixLayer",
    "NormalisationLayer",
    "PlainGradient",
    "Plan",
    "SameConvolutionLayer",
    "StandardisedConvolutionLayer",
    "StandardisedSameConvolutionLayer",
    "TiedEmbeddingLayer",
    "TransposedConvolutionLayer",
    "TransposedLinearLayer",
    "find_layers",
    "is_look_alike",
    "layer_for",
    "mixes_examples",
]
