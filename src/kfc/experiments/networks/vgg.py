"""A small VGG (after Simonyan & Zisserman, 2015): 3x3 convolutions in pairs, then linear layers.

Six convolutions of 32 to 128 maps, 40 million multiply-adds per image: two cores can train it.
"""

from __future__ import annotations

from torch import nn


def vgg(channels: int, classes: int) -> nn.Sequential:
    """Images (N, channels, 32, 32), or of 28x28 pixels, to logits (N, classes)."""
    return nn.Sequential(
        *convolution_pair(channels, 32),
        *convolution_pair(32, 64),
        *convolution_pair(64, 128),
        nn.Flatten(),
        nn.Linear(128 * 4 * 4, 256),
        nn.ReLU(inplace=True),
        nn.Linear(256, classes),
    )


def convolution_pair(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    """Two convolutions, and maps of half the size, rounded up."""
    return (
        nn.Conv2d(inputs, outputs, kernel_size=3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(outputs, outputs, kernel_size=3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2, ceil_mode=True),
    )
