"""What every approximation of a Kronecker-factored layer's Fisher block offers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from kfc.kronecker import INVERSES, Factors, KroneckerInverse, factor_balance, trace
from kfc.layers.base import Inverse, Statistics

if TYPE_CHECKING:
    from kfc.layers.factored import KroneckerHandler


class Structure(ABC):
    """One way to approximate a layer's Fisher block; it holds nothing of any layer.

    The methods are those of :class:`kfc.layers.Handler`, for the layer of the handler they are
    given. The block's coordinates are those of a gradient (groups, I, n), n = (1 +) J|D|.
    """

    #: What ``describe`` calls it.
    treatment: ClassVar[str]

    @abstractmethod
    def statistics(self, handler: KroneckerHandler, inverse: Inverse | None) -> Statistics: ...

    @abstractmethod
    def shapes(self, handler: KroneckerHandler) -> tuple[tuple[int, ...], ...]: ...

    @abstractmethod
    def factors(self, handler: KroneckerHandler, running: tuple[Tensor, ...]) -> Factors | None:
        """Ω and Γ, if the block is made of them."""

    @abstractmethod
    def invert(
        self, handler: KroneckerHandler, running: tuple[Tensor, ...], damping: float, kind: str
    ) -> Inverse: ...

    def redamp(
        self,
        handler: KroneckerHandler,
        inverse: Inverse,
        running: tuple[Tensor, ...],
        damping: float,
        kind: str,
    ) -> Inverse:
        return self.invert(handler, running, damping, kind)

    def continued(self, inverse: Inverse, previous: Inverse) -> Inverse:
        return inverse

    def measured_shapes(self, handler: KroneckerHandler) -> tuple[tuple[int, ...], ...]:
        return ()

    def updated(self, inverse: Inverse, means: tuple[Tensor, ...], decay: float) -> Inverse:
        return inverse

    @abstractmethod
    def inverse_shapes(
        self, handler: KroneckerHandler, kind: str
    ) -> dict[str, tuple[int, ...]]: ...

    def inverse_triangles(self, kind: str) -> tuple[str, ...]:
        return ()

    @abstractmethod
    def restore_inverse(self, tensors: Mapping[str, Tensor], kind: str) -> Inverse: ...

    def note(self, handler: KroneckerHandler) -> str:
        return ""

    @abstractmethod
    def summary(self, handler: KroneckerHandler, running: tuple[Tensor, ...]) -> dict[str, Any]: ...


class KroneckerProduct(Structure):
    """Ω ⊗ Γ: structures that differ in what the factors are made of.

    Wide factors are kept as diagonals; ``inverse`` says how the damping enters.
    """

    @abstractmethod
    def factors(self, handler: KroneckerHandler, running: tuple[Tensor, ...]) -> Factors: ...

    def factor_shapes(self, handler: KroneckerHandler) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of Ω and Γ."""
        wide_activation, wide_derivative = handler.are_wide()
        activation, derivative = handler.sizes()
        return (
            factor_shape(handler.groups, activation, diagonal=wide_activation),
            factor_shape(handler.groups, derivative, diagonal=wide_derivative),
        )

    def invert(
        self, handler: KroneckerHandler, running: tuple[Tensor, ...], damping: float, kind: str
    ) -> Inverse:
        return INVERSES[kind].of(self.factors(handler, running), damping)

    def redamp(
        self,
        handler: KroneckerHandler,
        inverse: Inverse,
        running: tuple[Tensor, ...],
        damping: float,
        kind: str,
    ) -> Inverse:
        assert isinstance(inverse, KroneckerInverse)
        return inverse.redamped(self.factors(handler, running), damping)

    def inverse_shapes(self, handler: KroneckerHandler, kind: str) -> dict[str, tuple[int, ...]]:
        return INVERSES[kind].shapes(*self.factor_shapes(handler))

    def inverse_triangles(self, kind: str) -> tuple[str, ...]:
        return INVERSES[kind].triangles

    def restore_inverse(self, tensors: Mapping[str, Tensor], kind: str) -> Inverse:
        return INVERSES[kind].restored(tensors)

    def wide_factors(self, handler: KroneckerHandler) -> list[str]:
        """Which factors are kept as diagonals because they are wide."""
        wide = zip(Factors._fields, handler.are_wide(), strict=True)
        return [name for name, is_wide in wide if is_wide]

    def note(self, handler: KroneckerHandler) -> str:
        wide = " and ".join(self.wide_factors(handler))
        return wide and f"{wide} factor wider than {handler.max_factor_size}: diagonal only"

    def summary(self, handler: KroneckerHandler, running: tuple[Tensor, ...]) -> dict[str, Any]:
        factors = self.factors(handler, running)
        names = ("pi", "activation_trace", "derivative_trace")
        values = (factor_balance(factors), *map(trace, factors))
        return {
            name: value.item() if value.numel() == 1 else value.tolist()
            for name, value in zip(names, values, strict=True)
        }


def factor_shape(groups: int, size: int, *, diagonal: bool) -> tuple[int, ...]:
    return (groups, size) if diagonal else (groups, size, size)
