"""The data of the workloads, in the form that their networks take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from kfc.lab.data import Dataset, Inputs, Split
from kfc.lab.data.datasets import content_digest

Form = Literal["images", "sequences", "canvases"]

CANVAS_SIDE = 28
CANVASES = {"train": 8000, "test": 2000}
MOST_DIGITS = 4
BACKGROUND = 10  # the class of pixels that belong to no digit
INK = 64  # pixels at least this bright belong to their digit
SEED = 1


@dataclass(frozen=True, eq=False)
class Problem:
    """Training and test examples, the conversion of pixels to inputs, and the content's hash."""

    train: Split
    test: Split
    inputs: Inputs
    digest: str


def make_problem(data: Dataset, form: Form, inputs: str) -> Problem:
    """Return a data set's examples as images, as sequences of pixels, or composed on canvases."""
    if form == "canvases":
        train, test = canvases(data.train, "train"), canvases(data.test, "test")
    elif form == "sequences":
        train, test = sequences(data.train), sequences(data.test)
    else:
        train, test = data.train, data.test
    digest = data.digest
    if form == "canvases":
        digest = content_digest(type(data)(train, test, data.name, BACKGROUND + 1, "", False))
    return Problem(train, test, getattr(Inputs, inputs)(train), digest)


def sequences(split: Split) -> Split:
    """Return images (N, 1, height, width) as sequences (N, 1, height · width), row by row."""
    return Split(split.images.reshape(len(split), 1, -1), split.labels)


def canvases(split: Split, name: str) -> Split:
    """Compose images of two to four digits of half the size, with the class of every pixel.

    Where digits overlap, the class is that of the brighter one. The result depends on the digits
    and a fixed seed only.

    Returns:
        Images (N, 1, 28, 28) and classes (N, 28, 28), 10 for the background.
    """
    count = CANVASES[name]
    generator = np.random.default_rng([SEED, len(split)])
    images = np.zeros((count, 1, CANVAS_SIDE, CANVAS_SIDE), dtype=np.uint8)
    classes: NDArray[np.int64] = np.full((count, CANVAS_SIDE, CANVAS_SIDE), BACKGROUND)
    digits = halved(split.images[:, 0])
    size = digits.shape[-1]
    for image, labels in zip(images[:, 0], classes, strict=True):
        for index in generator.integers(len(split), size=generator.integers(2, MOST_DIGITS + 1)):
            top, left = generator.integers(CANVAS_SIDE - size + 1, size=2)
            place = slice(top, top + size), slice(left, left + size)
            digit = digits[index]
            labels[place][(digit >= INK) & (digit > image[place])] = split.labels[index]
            np.maximum(image[place], digit, out=image[place])
    return Split(images, classes)


def halved(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return images (N, height, width) of half the size, the means of 2x2 pixels."""
    count, height, width = images.shape
    blocks = images.reshape(count, height // 2, 2, width // 2, 2)
    means: NDArray[np.uint8] = blocks.mean(axis=(2, 4), dtype=np.float32).astype(np.uint8)
    return means


def cropped_and_flipped(images: Tensor, generator: torch.Generator, margin: int = 4) -> Tensor:
    """Shift each image by up to ``margin`` pixels, with zeros beyond its border, and flip half.

    Args:
        images: (N, channels, height, width).
    """
    count, _, height, width = images.shape
    padded = F.pad(images, (margin,) * 4)
    top, left = torch.randint(2 * margin + 1, (2, count, 1), generator=generator)
    rows, columns = top + torch.arange(height), left + torch.arange(width)
    flipped = torch.rand(count, 1, generator=generator) < 0.5
    columns = torch.where(flipped, columns.flip(1), columns)
    examples = torch.arange(count)[:, None, None]
    # Indices around a slice move its axis to the end: (N, height, width, channels).
    return padded[examples, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
