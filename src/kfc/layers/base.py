"""What every handler of a layer type offers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

DEFAULT_MAX_FACTOR_SIZE = 8192


class Moment(NamedTuple):
    """A sum, and the weight by which to divide it for a mean.

    Attributes:
        total: second moments, (groups, n, n), or their diagonal alone, of two dimensions; or any
            other matrix without groups, such as SUA's boundary counts: of its "trace", the sum of
            all entries then, nothing is asked but whether it is finite.
        of_derivatives: whether it is quadratic in derivatives, and scales as their squares do.
    """

    total: Tensor
    weight: float
    of_derivatives: bool

    def plus(self, other: Moment) -> Moment:
        return Moment(self.total + other.total, self.weight + other.weight, self.of_derivatives)

    def scaled(self, scale: float) -> Moment:
        """With the squares of derivatives multiplied."""
        if scale == 1 or not self.of_derivatives:
            return self
        return self._replace(total=self.total * scale)

    def to_mean_(self) -> Tensor:
        """The sum becomes the mean, in place."""
        return self.total.div_(self.weight)


class Inverse(Protocol):
    """A damped block's inverse; the tensors are its whole state."""

    tensors: dict[str, Tensor]

    def apply(self, gradient: Tensor) -> Tensor: ...


class KeptInputs(NamedTuple):
    """A call's inputs, which autograd usually keeps too; and what tells if they have changed."""

    values: Tensor
    version: int

    @classmethod
    def of(cls, inputs: Tensor) -> KeptInputs:
        return cls(inputs.detach(), inputs._version)

    def get(self, dtype: torch.dtype) -> Tensor:
        """As they were when the layer ran; an error if they are not any more."""
        if self.values._version != self.version:
            raise RuntimeError(
                "the input of a layer was changed in place after the layer ran, so that its "
                "statistics cannot be taken; change a copy of it"
            )
        return self.values.to(dtype)


def is_sequence_first(leading: torch.Size, examples: int) -> bool:
    """Whether rows lie as (length, N, ...), as recurrent layers and transformers have them.

    Frames folded into the batch in front of a dimension that happens to be N look the same, and
    are rarer. With a length of N nobody can tell: the first dimension is then the examples'.
    """
    return len(leading) > 1 and leading[0] != examples and leading[1] == examples


class Statistics(ABC):
    """The statistics of one layer, gathered over the calls of one forward pass."""

    @abstractmethod
    def forward(self, inputs: Tensor, outputs: Tensor) -> Any:
        """Take in a call; return what ``backward`` needs of it."""

    @abstractmethod
    def backward(self, kept: Any, derivatives: Tensor, examples: int) -> None:
        """Take in the derivatives with respect to a call's outputs; a call without any is void."""

    @abstractmethod
    def end_draw(self) -> None:
        """Every call has had its derivatives for one draw (or one exact column) of the targets."""

    @abstractmethod
    def moments(self, examples: int) -> tuple[Moment, ...]:
        """What was gathered for a batch of that many examples; empty if no derivatives came.

        First what feeds the running averages; then, if anything, what refers to the inverse that
        the statistics were made with, and goes into it.
        """


class Handler(ABC):
    """One layer: a module, or several of the same configuration tied to the same parameters.

    A handler knows the layer's form and holds no statistics. ``running`` in its methods is the
    tuple of running averages that the moments of its statistics feed.
    """

    #: The parameters a handler covers, in the order of the block's coordinates.
    roles: ClassVar[tuple[str, ...]] = ()

    def __init__(self, module: nn.Module) -> None:
        self.modules = [module]
        self.max_factor_size = DEFAULT_MAX_FACTOR_SIZE

    @property
    @abstractmethod
    def treatment(self) -> str:
        """What ``describe`` calls the layer's Fisher block."""

    @property
    def module(self) -> nn.Module:
        return self.modules[0]

    @property
    def weight(self) -> nn.Parameter:
        return cast(nn.Parameter, self.module._parameters["weight"])

    @property
    def dtype(self) -> torch.dtype:
        """What statistics and inverses are kept in: float32 at least."""
        return torch.promote_types(self.weight.dtype, torch.float32)

    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that are not frozen, by role, in the order of ``roles``."""
        parameters = {role: self.module._parameters.get(role) for role in self.roles}
        return {r: p for r, p in parameters.items() if p is not None and p.requires_grad}

    @abstractmethod
    def statistics(self, inverse: Inverse | None = None) -> Statistics:
        """A new, empty gathering.

        Args:
            inverse: the layer's present one, if there is one for the parameters trained now.
        """

    @abstractmethod
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the running averages, for the parameters trained now."""

    @abstractmethod
    def invert(self, running: tuple[Tensor, ...], damping: float, kind: str) -> Inverse:
        """The inverse of the block, damped by δ = λ + γ."""

    def continued(self, inverse: Inverse, previous: Inverse) -> Inverse:
        """A new inverse with what the one that it takes the place of had measured."""
        return inverse

    def measured_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of what statistics that have an inverse measure for it."""
        return ()

    def updated(self, inverse: Inverse, means: tuple[Tensor, ...], decay: float) -> Inverse:
        """The inverse with what its statistics gave for it, beside the running averages.

        Args:
            means: what ``moments`` had beyond what ``shapes`` tells of.
            decay: the weight of what the inverse knew before.
        """
        return inverse

    def redamp(
        self, inverse: Inverse, running: tuple[Tensor, ...], damping: float, kind: str
    ) -> Inverse:
        """The inverse of the same block with another damping."""
        return self.invert(running, damping, kind)

    @abstractmethod
    def inverse_shapes(self, kind: str) -> dict[str, tuple[int, ...]]:
        """The shapes of an inverse's tensors, for the parameters trained now."""

    def inverse_triangles(self, kind: str) -> tuple[str, ...]:
        """Those of an inverse's tensors of which the lower triangle says all."""
        return ()

    @abstractmethod
    def restore_inverse(self, tensors: Mapping[str, Tensor], kind: str) -> Inverse:
        """An inverse from its tensors, as a checkpoint or another process has them."""

    @abstractmethod
    def natural_gradient(
        self, inverse: Inverse, gradients: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """The inverse times the gradients of the trained parameters, by role."""

    def note(self) -> str:
        """What ``describe`` should say beyond the treatment's name."""
        return ""

    def summary(self, running: tuple[Tensor, ...]) -> dict[str, Any]:
        """Numbers for ``diagnostics``."""
        return {}
