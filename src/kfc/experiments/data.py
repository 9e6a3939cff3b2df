"""Data sets, as tensors in memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Dataset:
    """Images (N, channels, height, width) and labels (N,), split for training and testing."""

    name: str
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load_digits(test_fraction: float = 0.2) -> Dataset:
    """scikit-learn's 1,797 handwritten digits of 8x8 pixels, embedded in its package.

    The last part is the test set: it was written by other people than the first.
    """
    from sklearn import datasets

    digits = datasets.load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target, dtype=torch.long)
    split = round(len(labels) * (1 - test_fraction))
    mean = images[:split].mean(dim=0)
    images = images - mean
    return Dataset("digits", images[:split], labels[:split], images[split:], labels[split:])
