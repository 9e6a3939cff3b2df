"""Deep autoencoders of fully connected layers, as optimizers are often compared on."""

from __future__ import annotations

from itertools import pairwise

from torch import nn

# Hinton and Salakhutdinov's for MNIST, as Martens and Grosse (2015) train it with K-FAC.
MNIST_SIZES = (784, 1000, 500, 250, 30)
DIGITS_SIZES = (64, 128, 64, 32, 10)


def autoencoder(channels: int, side: int, sizes: tuple[int, ...]) -> nn.Sequential:
    """Images (N, channels, side, side) of pixels from 0 to 1 to logits of the same shape.

    Args:
        sizes: of the layers from the image, without its channels, to the code; the decoder has them
            in reverse.
    """
    pixels = channels * side**2
    widths = [pixels, *sizes[1:], *reversed(sizes[1:-1]), pixels]
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    # The code is linear, as the outputs are.
    del layers[2 * (len(sizes) - 1)]
    return nn.Sequential(*layers[:-1], nn.Unflatten(1, (channels, side, side)))
