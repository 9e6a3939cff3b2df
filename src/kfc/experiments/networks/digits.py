"""A small convolutional network for scikit-learn's handwritten digits."""

from __future__ import annotations

from torch import nn


def digits(channels: int, classes: int) -> nn.Sequential:
    """Images (N, channels, 8, 8) to logits (N, classes)."""
    return nn.Sequential(
        nn.Conv2d(channels, 16, kernel_size=3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 2 * 2, classes),
    )
