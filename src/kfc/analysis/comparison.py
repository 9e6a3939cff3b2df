"""Approximations of a layer's Fisher block beside the exact one, in numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kfc.analysis.approximations import APPROXIMATIONS
from kfc.analysis.blocks import (
    DEFAULT_MAX_GIB,
    GIB,
    NEGATIVE_TOLERANCE,
    Block,
    TooLargeError,
    in_widest,
)
from kfc.analysis.exact import ExactBlock
from kfc.analysis.krylov import UnsolvableError, operator_norm, random_start
from kfc.analysis.recording import LayerRecord, factored_layers, record_layer, run_model
from kfc.buffers import SavedBuffers
from kfc.capture import suspended
from kfc.checks import require_choice, require_number, require_whole
from kfc.fisher import Output, select_output
from kfc.likelihoods import Likelihood
from kfc.randomness import accelerators_of, forked_random_state

Progress = Callable[[str, str], None]

# Up to here the error is computed from dense forms.
DENSE_SIZE = 512
DEFAULT_PROBES = 32
# The relative residual of natural gradients that are found by products alone.
SOLUTION_TOLERANCE = 1e-3
DEFLATED = 32


@dataclass(frozen=True)
class Quality:
    """How good one approximation F̂ of a block F is.

    Attributes:
        frobenius_error: ‖F̂ - F‖ / ‖F‖ in the Frobenius norm.
        frobenius_uncertainty: its standard error, 0 where it was computed exactly.
        operator_error: ‖F̂ - F‖ / ‖F‖ in the operator norm, to about 1% (Lanczos' method).
        cosine: of the angle between (F̂ + δ)⁻¹ g and the exact damped natural gradient; each, if it
            has to be found by products, to a relative residual of 0.001.
        decrease: what a step along (F̂ + δ)⁻¹ g makes the loss decrease by, to first order, relative
            to the exact natural gradient of the same norm vᵀ(F + δ)v: at the same KL divergence
            from the model before the step. At most 1.
        trace_ratio: tr F̂ / tr F.
        smallest_eigenvalue: relative to the largest magnitude of one.
        positive: whether F̂ is positive semi-definite, up to rounding.
        spectrum: F̂'s largest eigenvalues, descending; ``None`` where they are not at hand.
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
    """One layer's exact block, and every approximation of it.

    Attributes:
        shape: (groups, I, n) of the layer's gradient.
        gradients: how many gradients of single examples the exact block is made of.
        spectrum: the exact block's largest eigenvalues, descending; ``None`` if too large.
        approximations: by name, as in ``APPROXIMATIONS``.
        left_out: those that are too large, or could not be solved, by name, and why.
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
    """Per layer, how far each approximation is from the exact block, and what that costs.

    Args:
        model: in the mode it is to be analysed in (usually after ``model.eval()``).
        inputs: one batch: a tensor, a tuple of arguments, or a dict of them.
        layers: names in ``model.named_modules()``; by default all that have Kronecker factors.
        loss: of the model's outputs, a scalar; its gradient is what natural gradients are made of.
            By default the gradient for targets drawn from the model.
        approximations: keys of ``kfc.analysis.APPROXIMATIONS``; by default all.
        damping: δ, added to every block.
        likelihood: what the outputs parametrise; see :class:`kfc.Likelihood`.
        samples: how many targets to draw for every example; ``None`` enumerates them, exactly.
        output: picks the tensor of outputs from what the model returns.
        seed: of drawn targets and of the probes.
        probes: random vectors by which the Frobenius norms of large blocks are estimated.
        max_gib: memory for the largest arrays of one layer.
        progress: called with the layer and the approximation that comes next.
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
    """(groups, I, n): the sum over draws and mean over examples."""
    total = torch.zeros(record.shape, dtype=record.dtype, device=record.device)
    for _, gradients in record.gradient_chunks():
        total += gradients.sum((0, 1))
    return total / record.examples


def loss_gradient(
    model: nn.Module,
    inputs: Any,
    record: LayerRecord,
    loss: Callable[[Tensor], Tensor],
    output: Output | None,
) -> Tensor:
    """(groups, I, n): of loss(outputs) in the layer's trained parameters; the model stays as is."""
    trained = record.handler.trained()
    buffers = SavedBuffers(model)
    try:
        with suspended(), forked_random_state(accelerators_of(model)), torch.enable_grad():
            value = loss(select_output(run_model(model, inputs), output))
            gradients = torch.autograd.grad(value, list(trained.values()))
    finally:
        buffers.restore()
    return record.matrix(dict(zip(trained, gradients, strict=True)))


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
    """Approximations of a recorded layer's block; arguments as in ``compare_approximations``."""
    if progress is not None:
        progress(record.name, "exact block")
    exact = ExactBlock(record, max_gib)
    exact.tolerance = SOLUTION_TOLERANCE
    truth = _Truth(exact, gradient, damping, probes, seed)
    qualities, left_out = {}, {}
    for name in names:
        if progress is not None:
            progress(record.name, APPROXIMATIONS[name].title)
        try:
            qualities[name] = truth.quality(_built(name, record, max_gib))
        except (TooLargeError, UnsolvableError) as error:
            left_out[name] = str(error)
    return LayerComparison(
        record.name,
        record.shape,
        exact.rows,
        truth.trace,
        truth.norm,
        exact.spectrum(),
        qualities,
        left_out,
    )


def _built(name: str, record: LayerRecord, max_gib: float) -> Block:
    approximation = APPROXIMATIONS[name]
    needed = approximation.elements(record) * record.dtype.itemsize / GIB
    if needed > max_gib:
        raise TooLargeError(f"it takes {needed:.1f} GiB, more than {max_gib:g}")
    block = approximation.build(record)
    block.tolerance = SOLUTION_TOLERANCE
    return block


class _Truth:
    """The exact block, with all that every approximation is compared to."""

    def __init__(
        self, exact: ExactBlock, gradient: Tensor, damping: float, probes: int, seed: int
    ) -> None:
        self.exact = exact
        self.gradient = gradient
        self.damping = damping
        self.trace = exact.trace()
        self.norm = exact.operator_norm()
        self.natural = exact.solve(gradient, damping)
        self.start = exact.random_vector(seed + 2)
        self.is_small = exact.size <= DENSE_SIZE
        if self.is_small:
            self.dense = exact.dense()
        else:
            self._draw_probes(probes, seed)

    def _draw_probes(self, probes: int, seed: int) -> None:
        """Random vectors, and the largest eigenvectors, which would make their spread large.

        With Q the eigenvectors and P = 1 - QQᵀ, ‖E‖² = ‖EQ‖² + E‖EPz‖² for random signs z.
        """
        exact = self.exact
        signs = random_start((probes, *exact.shape), exact.like, seed).sign()
        self.top = exact.like.new_zeros(0, *exact.shape)
        self.top_images = self.top
        if exact.is_decomposable():
            values, self.top = exact.top_eigenvectors(DEFLATED)
            self.top_images = values.to(self.top).reshape(-1, 1, 1, 1) * self.top
            inside = signs.flatten(1) @ self.top.flatten(1).mT
            signs = signs - (inside @ self.top.flatten(1)).reshape(signs.shape)
        self.probes, self.probe_images = signs, exact.product(signs)

    def quality(self, block: Block) -> Quality:
        error, uncertainty = self._frobenius_error(block)
        natural = block.solve(self.gradient, self.damping)
        spectrum = block.spectrum()
        norm = block.operator_norm() if spectrum is not None else 0.0
        smallest = block.smallest_eigenvalue() / norm if norm else 0.0
        return Quality(
            frobenius_error=error,
            frobenius_uncertainty=uncertainty,
            operator_error=self._operator_error(block),
            cosine=_cosine(natural, self.natural),
            decrease=self._decrease(natural),
            trace_ratio=block.trace() / self.trace if self.trace else math.nan,
            smallest_eigenvalue=smallest,
            positive=smallest >= -NEGATIVE_TOLERANCE,
            spectrum=spectrum,
        )

    def _operator_error(self, block: Block) -> float:
        if self.is_small:
            difference = torch.linalg.matrix_norm(block.dense() - self.dense, 2).item()
        else:
            difference = operator_norm(
                lambda v: block.product(v) - self.exact.product(v), self.start
            )
        return difference / self.norm if self.norm else math.nan

    def _frobenius_error(self, block: Block) -> tuple[float, float]:
        """‖F̂ - F‖ / ‖F‖, and its standard error."""
        if self.is_small:
            norm = float(self.dense.norm())
            error = float((block.dense() - self.dense).norm())
            return (error / norm, 0.0) if norm else (math.nan, 0.0)
        outside = (block.product(self.probes) - self.probe_images).square().sum((1, 2, 3))
        inside = (block.product(self.top) - self.top_images).square().sum() if len(self.top) else 0
        return _root_of_ratio(outside + inside, self._squared_norms())

    def _squared_norms(self) -> Tensor:
        """‖F‖² for every probe: exactly, or as each of them estimates it."""
        spectrum = self.exact.spectrum()
        if spectrum is None:
            return self.probe_images.square().sum((1, 2, 3))
        return spectrum.square().sum().to(self.probes).expand(len(self.probes))

    def _decrease(self, natural: Tensor) -> float:
        """gᵀv at equal vᵀ(F + δ)v, relative to the largest there is."""
        image = self.exact.product(natural) + self.damping * natural
        length = _dot(natural, image)
        best = _dot(self.gradient, self.natural)
        if length <= 0 or best <= 0:
            return math.nan
        return _dot(self.gradient, natural) / math.sqrt(length * best)


def _root_of_ratio(above: Tensor, below: Tensor) -> tuple[float, float]:
    """The root of the ratio of two means, and its standard error (jackknife)."""
    count = len(above)
    if not bool(below.any()):
        return math.nan, 0.0
    ratio = float((above.sum() / below.sum()).sqrt())
    without = ((above.sum() - above) / (below.sum() - below)).sqrt()
    deviation = (without - without.mean()).square().sum() * (count - 1) / count
    return ratio, float(deviation.sqrt())


def _dot(first: Tensor, second: Tensor) -> float:
    return float((in_widest(first) * in_widest(second)).sum())


def _cosine(first: Tensor, second: Tensor) -> float:
    scale = math.sqrt(_dot(first, first) * _dot(second, second))
    return _dot(first, second) / scale if scale else math.nan
