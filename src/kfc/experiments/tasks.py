"""What a network is trained to do: to name an image's class, or to give the image back."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch.nn.functional as F
from torch import Tensor


class Task(ABC):
    """
    Attributes:
        likelihood: what its loss says of the outputs, as :class:`kfc.KFC` takes it.
    """

    likelihood: str

    @abstractmethod
    def output_shape(self, images: Tensor, classes: int) -> tuple[int, ...]:
        """What a network must return for these images."""

    @abstractmethod
    def loss(self, outputs: Tensor, images: Tensor, labels: Tensor) -> Tensor:
        """The mean over the examples."""

    @abstractmethod
    def mistakes(self, outputs: Tensor, images: Tensor, labels: Tensor) -> Tensor:
        """(N,): what each example adds to the error."""

    @abstractmethod
    def error(self, mean_mistake: float) -> float:
        """In percent."""


class Classification(Task):
    """Cross-entropy; the error is the share of images that are given another class."""

    likelihood = "categorical"

    def output_shape(self, images: Tensor, classes: int) -> tuple[int, ...]:
        return len(images), classes

    def loss(self, outputs: Tensor, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(outputs, labels)

    def mistakes(self, outputs: Tensor, images: Tensor, labels: Tensor) -> Tensor:
        return outputs.argmax(dim=1) != labels

    def error(self, mean_mistake: float) -> float:
        return 100 * mean_mistake


class Reconstruction(Task):
    """Pixels of 0 to 1 as probabilities; the error is the root mean square of a pixel's."""

    likelihood = "bernoulli"

    def output_shape(self, images: Tensor, classes: int) -> tuple[int, ...]:
        return tuple(images.shape)

    def loss(self, outputs: Tensor, images: Tensor, labels: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(outputs, images)

    def mistakes(self, outputs: Tensor, images: Tensor, labels: Tensor) -> Tensor:
        return (outputs.sigmoid() - images).square().flatten(1).mean(dim=1)

    def error(self, mean_mistake: float) -> float:
        return float(100 * mean_mistake**0.5)


TASKS: dict[str, Task] = {"classification": Classification(), "reconstruction": Reconstruction()}
