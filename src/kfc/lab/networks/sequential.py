"""Networks that are a plain sequence of layers: digits, VGG, SVHN and autoencoders."""

from __future__ import annotations

from itertools import pairwise

from torch import nn

# Hinton and Salakhutdinov's for MNIST, as Martens and Grosse (2015) train it with K-FAC.
MNIST_SIZES = (784, 1000, 500, 250, 30)
DIGITS_SIZES = (64, 128, 64, 32, 10)


def digits(channels: int, classes: int) -> nn.Sequential:
    """Return a small network from images (N, channels, 8, 8) to logits (N, classes)."""
    return nn.Sequential(
        *(nn.Conv2d(channels, 16, kernel_size=3, padding=1), nn.ReLU(inplace=True)),
        nn.MaxPool2d(2),
        *(nn.Conv2d(16, 32, kernel_size=3, padding=1), nn.ReLU(inplace=True)),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 2 * 2, classes),
    )


def vgg(channels: int, classes: int) -> nn.Sequential:
    """Return a small VGG (after Simonyan & Zisserman, 2015): 40 million multiply-adds per image.

    It takes images (N, channels, 32, 32), or of 28x28 pixels, to logits (N, classes).
    """

    def convolutions(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
        """Return two convolutions, and pooling to maps of half the size, rounded up."""
        return (
            *(nn.Conv2d(inputs, outputs, kernel_size=3, padding=1), nn.ReLU(inplace=True)),
            *(nn.Conv2d(outputs, outputs, kernel_size=3, padding=1), nn.ReLU(inplace=True)),
            nn.MaxPool2d(2, ceil_mode=True),
        )

    return nn.Sequential(
        *convolutions(channels, 32),
        *convolutions(32, 64),
        *convolutions(64, 128),
        nn.Flatten(),
        *(nn.Linear(128 * 4 * 4, 256), nn.ReLU(inplace=True)),
        nn.Linear(256, classes),
    )


def svhn_convnet(channels: int, classes: int) -> nn.Sequential:
    """Return the network for SVHN of Srivastava et al., "Dropout" (2014).

    It takes images (N, channels, 32, 32) to logits (N, classes). Dropout applies to the input, and
    after pooling to the output of every layer but the last. Pooling windows extend over the border
    (ceil mode), so that maps are halved to 16, 8 and 4 pixels.
    """

    def convolution(inputs: int, outputs: int, dropout: float) -> tuple[nn.Module, ...]:
        return (
            *(nn.Conv2d(inputs, outputs, kernel_size=5, padding=2), nn.ReLU(inplace=True)),
            nn.MaxPool2d(3, stride=2, ceil_mode=True),
            nn.Dropout(dropout),
        )

    return nn.Sequential(
        nn.Dropout(1 - 0.9),  # the paper states the probability of keeping a unit
        *convolution(channels, 96, dropout=0.25),
        *convolution(96, 128, dropout=0.25),
        *convolution(128, 256, dropout=0.5),
        nn.Flatten(),
        *(nn.Linear(256 * 4 * 4, 2048), nn.ReLU(inplace=True), nn.Dropout(0.5)),
        *(nn.Linear(2048, 2048), nn.ReLU(inplace=True), nn.Dropout(0.5)),
        nn.Linear(2048, classes),
    )


def autoencoder(channels: int, side: int, sizes: tuple[int, ...]) -> nn.Sequential:
    """Return a deep autoencoder from pixels (N, channels, side, side) to logits of the same shape.

    Args:
        sizes: of the layers from a single-channel image to the code; the decoder reverses them.
    """
    pixels = channels * side**2
    widths = [pixels, *sizes[1:], *reversed(sizes[1:-1]), pixels]
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    # The code is linear, as the outputs are.
    del layers[2 * (len(sizes) - 1)]
    return nn.Sequential(*layers[:-1], nn.Unflatten(1, (channels, side, side)))
