"""The network for street-view house numbers of Srivastava et al., "Dropout" (2014)."""

from __future__ import annotations

from torch import nn


def svhn_convnet(channels: int, classes: int) -> nn.Sequential:
    """Images (N, channels, 32, 32) to logits (N, classes).

    Units are kept with probability (0.9, 0.75, 0.75, 0.5, 0.5, 0.5): those of the input, of the
    three convolutional layers (after pooling: what the next layer sees), and of the two fully
    connected ones. Windows reach over the border (ceil mode), so that maps halve: 16, 8, 4.
    """
    return nn.Sequential(
        dropout(keep=0.9),
        *convolutional_layer(channels, 96, keep=0.75),
        *convolutional_layer(96, 128, keep=0.75),
        *convolutional_layer(128, 256, keep=0.5),
        nn.Flatten(),
        *fully_connected_layer(256 * 4 * 4, 2048, keep=0.5),
        *fully_connected_layer(2048, 2048, keep=0.5),
        nn.Linear(2048, classes),
    )


def convolutional_layer(inputs: int, outputs: int, keep: float) -> tuple[nn.Module, ...]:
    return (
        nn.Conv2d(inputs, outputs, kernel_size=5, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2, ceil_mode=True),
        dropout(keep),
    )


def fully_connected_layer(inputs: int, outputs: int, keep: float) -> tuple[nn.Module, ...]:
    return nn.Linear(inputs, outputs), nn.ReLU(inplace=True), dropout(keep)


def dropout(keep: float) -> nn.Dropout:
    return nn.Dropout(1 - keep)
