"""Compare approximations of a layer's Fisher block with the exact block."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kfc._helpers import require_choice, require_number, require_whole
from kfc.analysis.approximations import APPROXIMATIONS
from kfc.analysis.blocks import DEFAULT_MAX_GIB, GIB, Block, TooLargeError, in_widest
from kfc.analysis.exact import ExactBlock
from kfc.analysis.krylov import UnsolvableError, operator_norm, random_start
from kfc.analysis.recording import LayerRecord, factored_layers, record_layer, run_model, unchanged
from kfc.fisher.heads import Output
from kfc.fisher.likelihoods import Likelihood

Progress = Callable[[str, str], None]

# Errors of blocks with at most this many rows are computed from dense forms.
DENSE_SIZE = 512
DEFAULT_PROBES = 32
# The relative residual of natural gradients that are found by products alone.
SOLUTION_TOLERANCE = 1e-3
# The number of eigenvectors that are treated exactly where the rest is estimated from probes.
DEFLATED = 32


@dataclass(frozen=True)
class Quality:
    """The quality of one approximation F̂ of a block F.

    Attributes:
        frobenius_error: ‖F̂ - F‖ / ‖F‖ in the Frobenius norm.
        frobenius_uncertainty: the standard error of ``frobenius_error``; 0 if it was computed
            exactly.
        operator_error: ‖F̂ - F‖ / ‖F‖ in the operator norm, to about 1% (Lanczos' method).
        cosine: the cosine of the angle between (F̂ + δ)⁻¹ g and the exact damped natural gradient.
            Either has a relative residual of 0.001 if it has to be found by products alone.
        decrease: the first-order decrease of the loss by a step along (F̂ + δ)⁻¹ g, relative to that
            of the exact natural gradient with the same vᵀ(F + δ)v, and so at the same KL divergence
            from the model before the step. At most 1.
        trace_ratio: tr F̂ / tr F.
        smallest_eigenvalue: the smallest eigenvalue of F̂, relative to the largest magnitude.
        positive: whether F̂ is positive semi-definite, up to rounding.
        spectrum: the eigenvalues of F̂, descending; ``None`` if they are not known.
    """

    frobenius_error: float
    frobenius_uncertainty: float
    operator_error: float
    cosine: float
    decrease: float
    trace_ratio: float
    smallest_eigenvalue: float
    positive: bool
    spectrum: Tensor | None


@dataclass(frozen=True)
class LayerComparison:
    """The exact block of one layer, and the quality of each approximation.

    Attributes:
        layer: the layer's name in ``model.named_modules()``.
        shape: the shape (groups, I, n) of the layer's gradient.
        gradients: the number of gradients of single examples in the exact block.
        trace, operator_norm: those of the exact block.
        spectrum: the eigenvalues of the exact block, descending; ``None`` if it is too large.
        approximations: the qualities by name, as in ``APPROXIMATIONS``.
        left_out: the reason for each approximation that was too large or could not be solved.
    """

    layer: str
    shape: tuple[int, int, int]
    gradients: int
    trace: float
    operator_norm: float
    spectrum: Tensor | None
    approximations: Mapping[str, Quality]
    left_out: Mapping[str, str]


def compare_approximations(
    model: nn.Module,
    inputs: Any,
    layers: Iterable[str] | None = None,
    *,
    loss: Callable[[Tensor], Tensor] | None = None,
    approximations: Iterable[str] | None = None,
    damping: float = 1e-3,
    likelihood: str | Likelihood = "categorical",
    samples: int | None = None,
    output: Output | None = None,
    seed: int = 0,
    probes: int = DEFAULT_PROBES,
    max_gib: float = DEFAULT_MAX_GIB,
    progress: Progress | None = None,
) -> dict[str, LayerComparison]:
    """Compare each approximation of each layer's Fisher block with the exact block.

    Args:
        layers: names in ``model.named_modules()``; by default all layers with Kronecker factors.
        loss: returns the loss, a scalar, of the model's outputs. Natural gradients are those of its
            gradient; by default, of the gradient for targets drawn from the model.
        approximations: keys of ``kfc.analysis.APPROXIMATIONS``; by default all.
        damping: δ, which is added to every block.
        seed: the seed of drawn targets and of the probes.
        probes: the number of random vectors that estimate Frobenius norms of large blocks.
        max_gib: the memory for the largest arrays of one layer.
        progress: called with the names of the layer and of the approximation that comes next.

    The other arguments are those of ``record_layer``.

    Returns:
        The comparisons by layer name.
    """
    require_number("damping", damping, positive=True)
    require_whole("probes", probes, low=2)
    names = list(APPROXIMATIONS if approximations is None else approximations)
    for name in names:
        require_choice("approximations", name, tuple(APPROXIMATIONS))
    record_of = partial(record_layer, model, inputs, likelihood=likelihood, output=output)
    found = {}
    for layer in factored_layers(model) if layers is None else layers:
        record = record_of(layer, samples=samples, seed=seed)
        if loss is None:
            gradient = mean_gradient(record_of(layer, samples=1, seed=seed + 1))
        else:
            gradient = loss_gradient(model, inputs, record, loss, output)
        found[layer] = compare_blocks(
            record,
            gradient,
            names,
            damping=damping,
            probes=probes,
            seed=seed,
            max_gib=max_gib,
            progress=progress,
        )
    return found


def mean_gradient(record: LayerRecord) -> Tensor:
    """Return the sum over draws and mean over examples of gradients, (groups, I, n)."""
    sums = [gradients.sum((0, 1)) for _, gradients in record.gradient_chunks()]
    return torch.stack(sums).sum(0) / record.examples


def loss_gradient(
    model: nn.Module,
    inputs: Any,
    record: LayerRecord,
    loss: Callable[[Tensor], Tensor],
    output: Output | None,
) -> Tensor:
    """Return the gradient of loss(outputs) in the layer's trained parameters, (groups, I, n)."""
    trained = record.layer.trained()
    with unchanged(model):
        value = loss(run_model(model, inputs, output))
        gradients = torch.autograd.grad(value, list(trained.values()))
    by_role = dict(zip(trained, gradients, strict=True))
    return record.layer.to_matrix(by_role).to(record.dtype)


def compare_blocks(
    record: LayerRecord,
    gradient: Tensor,
    names: Iterable[str],
    *,
    damping: float,
    probes: int = DEFAULT_PROBES,
    seed: int = 0,
    max_gib: float = DEFAULT_MAX_GIB,
    progress: Progress | None = None,
) -> LayerComparison:
    """Compare approximations of a recorded layer's block with the exact block.

    Args:
        gradient: the gradient to compute natural gradients of, (groups, I, n).
        names: keys of ``kfc.analysis.APPROXIMATIONS``.

    The other arguments are those of ``compare_approximations``.
    """
    tell = progress or (lambda layer, step: None)
    tell(record.name, "exact block")
    exact = ExactBlock(record, max_gib)
    reference = _Reference(exact, gradient, damping, probes, seed)
    qualities, left_out = {}, {}
    for name in names:
        approximation = APPROXIMATIONS[name]
        tell(record.name, approximation.title)
        try:
            needed = approximation.elements(record) * record.dtype.itemsize / GIB
            if needed > max_gib:
                raise TooLargeError(f"it needs {needed:.1f} GiB, more than {max_gib:g}")
            block = approximation.build(record)
            qualities[name] = reference.quality(block)
        except (TooLargeError, UnsolvableError) as error:
            left_out[name] = str(error)
    return LayerComparison(
        record.name,
        record.shape,
        exact.rows,
        reference.trace,
        reference.norm,
        exact.spectrum(),
        qualities,
        left_out,
    )


class _Reference:
    """The exact block, with everything that approximations are compared with."""

    def __init__(
        self, exact: ExactBlock, gradient: Tensor, damping: float, probes: int, seed: int
    ) -> None:
        self.exact = exact
        self.gradient = gradient
        self.damping = damping
        self.trace = exact.trace()
        self.norm = exact.operator_norm()
        self.natural = exact.solve(gradient, damping, SOLUTION_TOLERANCE)
        self.start = random_start(exact.shape, exact.like, seed + 2)
        self.is_small = exact.size <= DENSE_SIZE
        if self.is_small:
            self.dense = exact.dense()
        else:
            self._draw_probes(probes, seed)

    def _draw_probes(self, probes: int, seed: int) -> None:
        """Draw random signs z, and treat the largest eigenvectors exactly to reduce the variance.

        With the eigenvectors Q and P = 1 - QQᵀ, an error E has ‖E‖² = ‖EQ‖² + E‖EPz‖².
        """
        self.probes = probes
        vectors = random_start((probes, *self.exact.shape), self.exact.like, seed).sign()
        if self.exact.is_decomposable():
            _, top = self.exact.top_eigenvectors(DEFLATED)
            inside = vectors.flatten(1) @ top.flatten(1).mT @ top.flatten(1)
            vectors = torch.cat([vectors - inside.reshape(vectors.shape), top])
        self.vectors, self.images = vectors, self.exact.product(vectors)

    def quality(self, block: Block) -> Quality:
        natural = block.solve(self.gradient, self.damping, SOLUTION_TOLERANCE)
        spectrum = block.spectrum()
        norm = block.operator_norm() if spectrum is not None else 0.0
        return Quality(
            *self._errors(block),
            cosine=_cosine(natural, self.natural),
            decrease=self._decrease(natural),
            trace_ratio=block.trace() / self.trace if self.trace else math.nan,
            smallest_eigenvalue=block.smallest_eigenvalue() / norm if norm else 0.0,
            positive=block.is_positive(),
            spectrum=spectrum,
        )

    def _errors(self, block: Block) -> tuple[float, float, float]:
        """Return the Frobenius error, its standard error, and the operator error."""
        if not self.norm:
            return math.nan, 0.0, math.nan
        if self.is_small:
            error = block.dense() - self.dense
            operator = torch.linalg.matrix_norm(error, 2).item()
            return float(error.norm()) / float(self.dense.norm()), 0.0, operator / self.norm
        operator = operator_norm(lambda v: block.product(v) - self.exact.product(v), self.start)
        squares = (block.product(self.vectors) - self.images).square().sum((1, 2, 3))
        of_probes = squares[: self.probes] + squares[self.probes :].sum()
        ratio, uncertainty = _root_of_ratio(of_probes, self._squared_norms())
        return ratio, uncertainty, operator / self.norm

    def _squared_norms(self) -> Tensor:
        """Return ‖F‖² for every probe: the exact value, or the estimate of each probe."""
        spectrum = self.exact.spectrum()
        if spectrum is None:
            return self.images.square().sum((1, 2, 3))
        return spectrum.square().sum().to(self.images).expand(self.probes)

    def _decrease(self, natural: Tensor) -> float:
        """Return gᵀv for v scaled to a given vᵀ(F + δ)v, relative to the largest possible gᵀv."""
        image = self.exact.product(natural) + self.damping * natural
        length = _dot(natural, image)
        best = _dot(self.gradient, self.natural)
        if length <= 0 or best <= 0:
            return math.nan
        return _dot(self.gradient, natural) / math.sqrt(length * best)


def _root_of_ratio(above: Tensor, below: Tensor) -> tuple[float, float]:
    """Return the root of the ratio of two means, and its standard error (jackknife)."""
    count = len(above)
    ratio = float((above.sum() / below.sum()).sqrt())
    without = ((above.sum() - above) / (below.sum() - below)).sqrt()
    deviation = (without - without.mean()).square().sum() * (count - 1) / count
    return ratio, float(deviation.sqrt())


def _dot(first: Tensor, second: Tensor) -> float:
    return float((in_widest(first) * in_widest(second)).sum())


def _cosine(first: Tensor, second: Tensor) -> float:
    scale = math.sqrt(_dot(first, first) * _dot(second, second))
    return _dot(first, second) / scale if scale else math.nan
