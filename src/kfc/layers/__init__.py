"""What a layer type contributes to the curvature: its statistics, and its gradient as a matrix.

Two kinds of layers have a Fisher block: those whose block is Kronecker-factored (linear and
convolutional layers) and normalisation layers, which have a small block per channel. Every other
parameter follows its plain gradient, for a reason that :class:`PlainGradient` states.

To teach the library a new layer, write a handler and register it::

    @kfc.layers.handler_for.register
    def _(module: MyLayer) -> kfc.layers.Handler:
        return MyHandler(module)
"""

from kfc.layers.base import Handler, Moment, Statistics
from kfc.layers.convolution import ConvolutionHandler, TransposedConvolutionHandler
from kfc.layers.factored import KroneckerHandler, LinearHandler
from kfc.layers.normalisation import NormalisationHandler, mixes_examples
from kfc.layers.registry import PlainGradient, Plan, handler_for, plan_layers

__all__ = [
    "ConvolutionHandler",
    "Handler",
    "KroneckerHandler",
    "LinearHandler",
    "Moment",
    "NormalisationHandler",
    "PlainGradient",
    "Plan",
    "Statistics",
    "TransposedConvolutionHandler",
    "handler_for",
    "mixes_examples",
    "plan_layers",
]
