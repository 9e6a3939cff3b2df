"""The tasks that networks are trained on: classification and reconstruction of images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Task:
    """A loss and an error measure.

    Attributes:
        likelihood: the likelihood that belongs to the loss, as :class:`kfc.KFC` takes it.
        output_shape: the shape of a network's output, from (images, number of classes).
        loss: the mean loss over the examples, from (outputs, images, labels).
        mistakes: (N,) the contribution of each example to the error, from the same.
        error: the error in percent, from the mean of the contributions.
    """

    likelihood: str
    output_shape: Callable[[Tensor, int], tuple[int, ...]]
    loss: Callable[[Tensor, Tensor, Tensor], Tensor]
    mistakes: Callable[[Tensor, Tensor, Tensor], Tensor]
    error: Callable[[float], float]


# The error is the fraction of images that are classified wrongly.
CLASSIFICATION = Task(
    likelihood="categorical",
    output_shape=lambda images, classes: (len(images), classes),
    loss=lambda outputs, images, labels: F.cross_entropy(outputs, labels),
    mistakes=lambda outputs, images, labels: outputs.argmax(dim=1) != labels,
    error=lambda mean: 100 * mean,
)

# Pixels from 0 to 1 are probabilities; the error is their root mean square error.
RECONSTRUCTION = Task(
    likelihood="bernoulli",
    output_shape=lambda images, classes: tuple(images.shape),
    loss=lambda outputs, images, labels: F.binary_cross_entropy_with_logits(outputs, images),
    mistakes=lambda outputs, images, labels: (
        (outputs.sigmoid() - images).square().flatten(1).mean(dim=1)
    ),
    error=lambda mean: float(100 * mean**0.5),
)

TASKS = {"classification": CLASSIFICATION, "reconstruction": RECONSTRUCTION}
