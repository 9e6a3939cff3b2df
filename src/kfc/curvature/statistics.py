"""Statistics of a batch: sums over its examples, gathered layer by layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kfc.curvature.factor import trace
from kfc.moments.folding import Shape


class Moment(NamedTuple):
    """A sum, and the weight to divide it by for a mean.

    Attributes:
        total: second moments, (groups, n, n), or their diagonal, of two dimensions; or any other
            matrix without groups, such as boundary counts.
        of_derivatives: whether the sum is quadratic in derivatives and scales as they do.
    """

    total: Tensor
    weight: float
    of_derivatives: bool

    def plus(self, other: Moment) -> Moment:
        return Moment(self.total + other.total, self.weight + other.weight, self.of_derivatives)

    def scaled(self, scale: float) -> Moment:
        """Return the moment with the squares of derivatives multiplied by a number."""
        if scale == 1 or not self.of_derivatives:
            return self
        return self._replace(total=self.total * scale)

    def to_mean_(self) -> Tensor:
        """Divide the sum by its weight, in place; a sum of weight 0 is zero."""
        return self.total.div_(self.weight or 1.0)


class MomentLayout(NamedTuple):
    """The shapes, dtype and device of the moments that a layer's statistics consist of."""

    shapes: tuple[Shape, ...]
    dtype: torch.dtype
    device: torch.device


class LayerStatistics(ABC):
    """The statistics of one layer, gathered over its calls in one forward pass."""

    @abstractmethod
    def forward(self, inputs: Tensor, outputs: Tensor) -> Any:
        """Add a call; return what ``backward()`` needs to know about it."""

    @abstractmethod
    def backward(self, kept: Any, derivatives: Tensor, examples: int) -> None:
        """Add the derivatives with respect to a call's outputs; a call without any is ignored."""

    def end_draw(self) -> None:  # noqa: B027 - nothing to do by default
        """End one draw (or one exact column) of the targets, after the backward of every call."""

    @abstractmethod
    def moments(self, examples: int) -> tuple[Moment, ...]:
        """Return the moments of a batch with this many examples; empty if no derivatives came.

        The first ones feed the running averages. Any others refer to the inverse that the
        statistics were made with, and update it.
        """


class KeptInputs(NamedTuple):
    """The inputs of a call, which autograd usually keeps too, with their version."""

    values: Tensor
    version: int

    @classmethod
    def of(cls, inputs: Tensor) -> KeptInputs:
        return cls(inputs.detach(), inputs._version)

    def get(self, dtype: torch.dtype) -> Tensor:
        """Return the inputs; raise an error if they have changed since the call."""
        if self.values._version != self.version:
            raise RuntimeError(
                "the input of a layer was changed in place after the layer ran, so that its "
                "statistics cannot be gathered; change a copy of it instead"
            )
        return self.values.to(dtype)


class BatchStatistics:
    """The statistics of all forward passes of a step.

    Attributes:
        moments: the moments of every layer, by name.
        examples: the number of examples they were gathered from.
    """

    def __init__(self) -> None:
        self.moments: dict[str, tuple[Moment, ...]] = {}
        self.examples = 0

    def add(
        self, moments: Mapping[str, tuple[Moment, ...]], examples: int, scale: float = 1.0
    ) -> None:
        """Add a pass; every moment is weighted by what it is a mean over.

        Args:
            moments: the moments by layer; empty for layers that no derivative reached.
            scale: the factor for squares of derivatives.
        """
        self.examples += examples
        for name, new in moments.items():
            if not new:
                continue
            new = tuple(moment.scaled(scale) for moment in new)
            old = self.moments.get(name)
            if old is not None:
                new = tuple(a.plus(b) for a, b in zip(old, new, strict=True))
            self.moments[name] = new

    def scale(self, scale: float) -> None:
        """Multiply the squares of derivatives by a number."""
        self.moments = {
            name: tuple(moment.scaled(scale) for moment in moments)
            for name, moments in self.moments.items()
        }

    def stand_for(self, examples: int) -> None:
        """Let the statistics, if there are any, stand for all examples that they are a part of."""
        if self.moments:
            self.examples = examples

    def clear(self) -> None:
        """Remove all statistics."""
        self.moments, self.examples = {}, 0

    def traces(self) -> list[Tensor]:
        """Return scalars that are finite if and only if all statistics are."""
        # If an entry of a second moment is not finite, neither is its diagonal.
        return [trace(moment.total).sum() for many in self.moments.values() for moment in many]
