"""The value objects that choose how a model's Fisher matrix is approximated."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, Self

from kfc._helpers import require_choice, require_number, require_whole
from kfc.curvature.channels import ChannelCurvature
from kfc.curvature.diagonal import DiagonalCurvature
from kfc.curvature.ekfac import EKFACCurvature, MeasuredInverse
from kfc.curvature.kfc import KroneckerCurvature
from kfc.curvature.kronecker import INVERSES
from kfc.curvature.layer import LayerCurvature
from kfc.curvature.prong import PRONGCurvature
from kfc.curvature.sua import SUACurvature
from kfc.curvature.tied import TiedCurvature
from kfc.curvature.whitening import WhiteningCurvature
from kfc.layers import Layer, MatrixLayer, NormalisationLayer, TiedEmbeddingLayer

FisherKind = Literal["sampled", "exact", "empirical"]
InverseKind = Literal["factored", "eigen"]
Decay = float | Literal["averaging"]

INVERSE_ERROR = 0.05
#: The word for ξ = exp(-1/τ), with τ the timescale of the averaged parameters (Algorithm 1).
AVERAGING: Literal["averaging"] = "averaging"


@dataclass(frozen=True, kw_only=True)
class Approximation(ABC):
    """An approximation of the Fisher matrix with its options; see ``Kronecker``."""

    fisher: FisherKind = "sampled"
    factor_decay: Decay = 0.95
    fraction: float = 0.25
    gather_in_eval: bool = False

    #: The string that stands for the approximation with its default options.
    name: ClassVar[str]
    #: Whether statistics need derivatives with respect to the layers' outputs.
    needs_derivatives: ClassVar[bool] = True
    #: How ``describe`` names the treatment of parameters without a block.
    fallback: ClassVar[str] = "plain gradient"

    def __post_init__(self) -> None:
        require_choice("fisher", self.fisher, ("sampled", "exact", "empirical"))
        require_number("fraction", self.fraction, positive=True)
        if self.fraction > 1:
            raise ValueError(f"fraction must be at most 1, got {self.fraction}")
        if isinstance(self.factor_decay, str) and self.factor_decay != AVERAGING:
            raise ValueError(
                f'factor_decay must be a number or "{AVERAGING}", got {self.factor_decay!r}'
            )
        if self.factor_decay != AVERAGING:
            require_number("factor_decay", self.factor_decay, below=1)
        if not isinstance(self.gather_in_eval, bool):
            raise ValueError(f"gather_in_eval must be a boolean, got {self.gather_in_eval!r}")

    def with_decay(self, averaging_timescale: float | None) -> Self:
        """Return the approximation with a number as ξ: exp(-1/τ) in place of ``"averaging"``."""
        if self.factor_decay != AVERAGING:
            return self
        if averaging_timescale is None:
            raise ValueError(
                f'factor_decay="{AVERAGING}" is exp(-1/τ) with τ = averaging_timescale, which is '
                "not given: pass a number as factor_decay, or averaging_timescale= to an optimizer "
                "that has it"
            )
        require_number("averaging_timescale", averaging_timescale, positive=True)
        return replace(self, factor_decay=math.exp(-1 / averaging_timescale))

    @property
    def inverse_kind(self) -> str:
        """The kind of a layer's inverse, as checkpoints record it."""
        return self.name

    def exclusion(self, layer: Layer) -> str | None:
        """Return why a layer has no block, or ``None`` if it has one."""
        return None

    def for_layer(self, layer: Layer) -> LayerCurvature:
        """Return the empty curvature of a layer."""
        if isinstance(layer, NormalisationLayer):
            return ChannelCurvature(layer)
        if isinstance(layer, MatrixLayer):
            return self.for_matrix(layer)
        raise TypeError(
            f"{type(layer).__name__} must be a kfc.layers.MatrixLayer or NormalisationLayer"
        )

    @abstractmethod
    def for_matrix(self, layer: MatrixLayer) -> LayerCurvature:
        """Return the empty curvature of a linear or convolutional layer."""


@dataclass(frozen=True, kw_only=True)
class FactorApproximation(Approximation):
    """An approximation by factors of a layer's block."""

    max_factor_size: int = 8192

    def __post_init__(self) -> None:
        super().__post_init__()
        require_whole("max_factor_size", self.max_factor_size)


@dataclass(frozen=True, kw_only=True)
class Kronecker(FactorApproximation):
    """Ω ⊗ Γ, the second moments of patches and of derivatives (Theorem 2).

    Args:
        fisher: the targets of the Fisher matrix: ``"sampled"`` from the model (one draw), the
            ``"exact"`` expectation over them, or ``"empirical"``, the targets of the data, taken
            from the user's own backward pass.
        factor_decay: ξ, the weight of the old value in the moving averages (eqn 33). It applies to
            each update of the statistics, not to each step: with statistics every T_s steps, the
            averages cover about T_s / (1 - ξ) steps. ``"averaging"``: ξ = exp(-1/τ) with τ the
            ``averaging_timescale`` of the optimizer, as in Algorithm 1.
        fraction: the part of the batch that ``"sampled"`` statistics are gathered from, with a
            forward and a backward pass of their own. It has at least 32 examples, and n / 16 rows
            for every Ω of width n. One process uses batches of less than 64 examples as a whole.
        gather_in_eval: gather statistics in evaluation mode too, to train a model under
            ``model.eval()``, with frozen batch normalisation for instance.
        inverse: ``"factored"`` damps each factor (Cholesky decompositions); ``"eigen"`` adds the
            damping to the products of eigenvalues exactly.
        inverse_error: the error of ``"factored"`` inverses of wide factors, relative to the natural
            gradient. They are found from leading eigenpairs, as many as needed but at most n / 8 up
            to 128, or n / 32 if that is more. Which factors are wide follows from the schedule's
            ``overhead``, which may also limit the eigenpairs further; without it, n >= 1100.
            ``None``: all inverses are exact.
        max_factor_size: wider factors keep their diagonal only.
    """

    inverse: InverseKind = "factored"
    inverse_error: float | None = INVERSE_ERROR

    name: ClassVar[str] = "kfc"
    curvature: ClassVar[type[KroneckerCurvature]] = KroneckerCurvature

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("inverse", self.inverse, tuple(INVERSES))
        if self.inverse_error is not None:
            require_number("inverse_error", self.inverse_error, positive=True, below=1)
        if self.inverse == "eigen" and self.inverse_error not in (None, INVERSE_ERROR):
            raise ValueError(
                f'inverse_error={self.inverse_error} has no effect with inverse="eigen", which is '
                "exact; remove it"
            )

    @property
    def inverse_kind(self) -> str:
        return self.inverse

    def for_matrix(self, layer: MatrixLayer) -> LayerCurvature:
        kind = _with_indices(layer) or self.curvature
        inverse = INVERSES[self.inverse]
        return kind(layer, inverse, self.max_factor_size, self.inverse_error)


@dataclass(frozen=True, kw_only=True)
class SUA(Kronecker):
    """Kronecker factors that assume uncorrelated activations at distinct locations.

    The arguments are those of ``Kronecker``.
    """

    name: ClassVar[str] = "sua"
    curvature: ClassVar[type[KroneckerCurvature]] = SUACurvature


@dataclass(frozen=True, kw_only=True)
class PRONG(Kronecker):
    """Kronecker factors as in SUA, with derivatives assumed white: Γ = c I (Theorem 4).

    The arguments are those of ``Kronecker``.
    """

    name: ClassVar[str] = "prong"
    curvature: ClassVar[type[KroneckerCurvature]] = PRONGCurvature


@dataclass(frozen=True, kw_only=True)
class EKFAC(FactorApproximation):
    """Second moments of gradients in the eigenbasis of KFC's factors (George et al. 2018).

    The damping is added to these moments exactly. The arguments are those of ``Kronecker``, without
    ``inverse``.
    """

    name: ClassVar[str] = "ekfac"

    def for_matrix(self, layer: MatrixLayer) -> LayerCurvature:
        kind = _with_indices(layer)
        if kind is not None:
            return kind(layer, INVERSES["eigen"], self.max_factor_size)
        return EKFACCurvature(layer, MeasuredInverse, self.max_factor_size)


@dataclass(frozen=True, kw_only=True)
class Diagonal(Approximation):
    """The diagonal of the exact Fisher block; the damping is added to its entries.

    The arguments are those of ``Kronecker`` without ``inverse``, ``inverse_error`` and
    ``max_factor_size``.
    """

    name: ClassVar[str] = "diagonal"

    def for_matrix(self, layer: MatrixLayer) -> LayerCurvature:
        kind = _with_indices(layer)
        if kind is not None:
            return kind(layer, INVERSES["factored"], max_factor_size=0)
        return DiagonalCurvature(layer)


@dataclass(frozen=True, kw_only=True)
class Whitening(FactorApproximation):
    """Ω alone, from forward passes, for ``kfc.WhitenedAdam``.

    Args:
        factor_decay: ξ, a number, as in ``Kronecker``.
        gather_in_eval: as in ``Kronecker``.
        max_factor_size: if the blocks of a layer are wider, only the diagonal of Ω is kept. Layers
            with more outputs are not rotated.
        block_size: wide layers are whitened in blocks of at most this many inputs. Blocks consist
            of whole input maps, of equal numbers; if that number has no suitable divisor, blocks
            are larger.
    """

    fisher: FisherKind = field(default="sampled", init=False, repr=False)  # no targets are used
    factor_decay: Decay = 0.8
    fraction: float = field(default=1.0, init=False, repr=False)  # of forward passes as they are
    block_size: int = 256

    name: ClassVar[str] = "whitening"
    needs_derivatives: ClassVar[bool] = False
    fallback: ClassVar[str] = "Adam"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_whole("block_size", self.block_size)

    def exclusion(self, layer: Layer) -> str | None:
        if isinstance(layer, TiedEmbeddingLayer):
            return "its weight is that of an embedding, too"
        if isinstance(layer, MatrixLayer):
            # Adam scales the rows by itself.
            return "its inputs are not correlated" if layer.one_hot else None
        return f"{type(layer.module).__name__} does not multiply its inputs by a matrix"

    def for_matrix(self, layer: MatrixLayer) -> LayerCurvature:
        return WhiteningCurvature(layer, self.max_factor_size, self.block_size)


def _with_indices(layer: MatrixLayer) -> type[KroneckerCurvature] | None:
    """Return the Kronecker factors of a layer with indices as inputs, with every approximation."""
    if isinstance(layer, TiedEmbeddingLayer):
        return TiedCurvature
    return KroneckerCurvature if layer.one_hot else None


CurvatureChoice = Literal["kfc", "sua", "prong", "ekfac", "diagonal"] | Approximation
APPROXIMATIONS: dict[str, type[Approximation]] = {
    cls.name: cls for cls in (Kronecker, SUA, PRONG, EKFAC, Diagonal)
}


def resolve_curvature(choice: CurvatureChoice) -> Approximation:
    """Return the value object that a name stands for; an object stands for itself."""
    if isinstance(choice, Whitening):
        raise TypeError("kfc.Whitening is an option of kfc.WhitenedAdam only")
    if isinstance(choice, Approximation):
        return choice
    if choice not in APPROXIMATIONS:
        raise ValueError(
            f"curvature must be one of {tuple(APPROXIMATIONS)} or an object such as "
            f"kfc.Kronecker(), got {choice!r}"
        )
    return APPROXIMATIONS[choice]()
