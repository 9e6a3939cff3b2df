"""Compare approximations of a layer's Fisher block with the exact block, over several batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kfc._helpers import require_choice, require_number, require_whole
from kfc.analysis.approximations import APPROXIMATIONS
from kfc.analysis.blocks import DEFAULT_MAX_GIB, GIB, Block, TooLargeError, in_widest
from kfc.analysis.errors import Errors, Probes
from kfc.analysis.exact import ExactBlock
from kfc.analysis.krylov import UnsolvableError, operator_norm, random_start
from kfc.analysis.qualities import LayerComparison, Quality
from kfc.analysis.recording import LayerRecord, factored_layers, record_layer, run_model, unchanged
from kfc.fisher.heads import Output
from kfc.fisher.likelihoods import Likelihood

Progress = Callable[[str, str], None]

DEFAULT_PROBES = 32
# The relative residual of natural gradients that are found by products alone.
SOLUTION_TOLERANCE = 1e-3
MOST_LANCZOS_STEPS = 24
# Other approximations and the advice build on this one, which takes less time than the exact block.
ALWAYS = "kfc"


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
    """Compare each approximation of each layer's Fisher block with the exact block of one batch.

    ``Comparison`` compares several batches.

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
        comparison = Comparison(
            names, damping=damping, probes=probes, seed=seed, max_gib=max_gib, progress=progress
        )
        comparison.add(record, gradient)
        found[layer] = comparison.result()
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


@dataclass(frozen=True)
class _First:
    """What is measured in the first batch only."""

    operator_error: float
    cosine: float
    smallest_eigenvalue: float
    spectrum: Tensor | None


class Comparison:
    """Compares approximations of a layer's block with the exact block, batch by batch.

    Args:
        names: keys of ``kfc.analysis.APPROXIMATIONS``.
        batches: the largest number of batches, which determines the memory of the probes.
        expired: returns whether the approximations that follow must be left out, except KFC.

    The other arguments are those of ``compare_approximations``.
    """

    def __init__(
        self,
        names: Iterable[str],
        *,
        damping: float,
        probes: int = DEFAULT_PROBES,
        seed: int = 0,
        max_gib: float = DEFAULT_MAX_GIB,
        batches: int = 1,
        progress: Progress | None = None,
        expired: Callable[[], bool] = lambda: False,
    ) -> None:
        self._names = list(names)
        self._damping, self._seed, self._max_gib = damping, seed, max_gib
        self._probes, self._batches = probes, batches
        self._tell = progress or (lambda layer, step: None)
        self._expired = expired
        self._references: list[_Reference] = []
        self._vectors: Probes | None = None
        self._errors: dict[str, Errors] = {name: Errors(batches) for name in self._names}
        self._exact = Errors(batches)
        self._traces: dict[str, list[float]] = {name: [] for name in self._names}
        self._decreases: dict[str, list[float]] = {name: [] for name in self._names}
        self._positive = dict.fromkeys(self._names, True)
        self._firsts: dict[str, _First] = {}
        self._left_out: dict[str, str] = {}
        self._summary: dict[str, Any] = {}

    def add(self, record: LayerRecord, gradient: Tensor) -> None:
        """Compare the blocks of one more batch.

        Args:
            gradient: the gradient to compute natural gradients of, (groups, I, n).
        """
        self._tell(record.name, "exact block")
        exact = ExactBlock(record, self._max_gib)
        if self._vectors is None:
            self._vectors = Probes.for_block(exact, self._probe_count(exact), self._seed)
            self._summary = _summary(record, exact)
        reference = _Reference(exact, gradient, self._damping)
        self._references.append(reference.without_block())
        images = exact.product(self._vectors.vectors)
        self._exact.add(images)
        for name in self._names:
            if name in self._left_out:
                continue
            self._tell(record.name, APPROXIMATIONS[name].title)
            try:
                if name != ALWAYS and name not in self._firsts and self._expired():
                    raise TooLargeError("no time was left")
                self._add_block(name, self._built(name, record), reference, images)
            except (TooLargeError, UnsolvableError) as error:
                self._left_out[name] = str(error)

    def _probe_count(self, exact: ExactBlock) -> int:
        """Return the number of probes whose images in all batches fit into memory."""
        if self._batches == 1:
            return self._probes
        # Of every approximation and of the exact block, and as many eigenvectors
        copies = 2 * self._batches * (len(self._names) + 1)
        room = self._max_gib * GIB / (exact.size * exact.like.element_size() * copies)
        return min(self._probes, max(4, int(room)))

    def result(self) -> LayerComparison:
        """Return the comparison of all batches so far."""
        found = {name: self._quality(name) for name in self._names if name not in self._left_out}
        references = self._references
        return LayerComparison(
            **self._summary,
            batches=len(references),
            gain=_mean([each.best for each in references]),
            plain_decrease=_mean([each.plain_decrease for each in references]),
            approximations=found,
            left_out=self._left_out,
        )

    def _built(self, name: str, record: LayerRecord) -> Block:
        needed = APPROXIMATIONS[name].elements(record) * record.dtype.itemsize / GIB
        if needed > self._max_gib:
            raise TooLargeError(f"it needs {needed:.1f} GiB, more than {self._max_gib:g}")
        return APPROXIMATIONS[name].build(record)

    def _add_block(self, name: str, block: Block, reference: _Reference, images: Tensor) -> None:
        assert self._vectors is not None
        natural = block.solve(reference.gradient, self._damping, SOLUTION_TOLERANCE)
        trace, decrease = block.trace(), reference.decrease(natural)
        errors = block.product(self._vectors.vectors) - images
        if name not in self._firsts:
            self._firsts[name] = reference.details(block, natural, self._seed)
        self._traces[name].append(trace)
        self._decreases[name].append(decrease)
        self._errors[name].add(errors)
        self._positive[name] &= block.is_positive()

    def _quality(self, name: str) -> Quality:
        assert self._vectors is not None
        exact = torch.tensor([each.trace for each in self._references], dtype=torch.float64)
        own = torch.tensor(self._traces[name], dtype=torch.float64)
        decreases = torch.tensor(self._decreases[name], dtype=torch.float64)
        weights = self._vectors.weights
        error, probe_error = self._errors[name].relative_to(self._exact, weights)
        kept = _without_each(len(own))
        rows = [
            [
                _ratio(own[some], exact[some]),
                self._errors[name].relative_to(self._exact, weights, some)[0],
                float(decreases[some].mean()),
            ]
            for some in kept
        ]
        return Quality(
            frobenius_error=error,
            probe_error=probe_error,
            decrease=float(decreases.mean()),
            trace_ratio=_ratio(own, exact),
            positive=self._positive[name],
            without_batch=torch.tensor(rows, dtype=torch.float64).reshape(-1, 3),
            **vars(self._firsts[name]),
        )


def _summary(record: LayerRecord, exact: ExactBlock) -> dict[str, Any]:
    """Return what a ``LayerComparison`` says about the layer and its first exact block."""
    return {
        "layer": record.name,
        "shape": record.shape,
        "locations": record.rows_per_example,
        "offsets": record.layer.offsets,
        "gradients": exact.rows,
        "trace": exact.trace(),
        "operator_norm": exact.operator_norm(),
        "spectrum": exact.spectrum(),
    }


class _Reference:
    """The exact block of a batch, and its natural gradient."""

    def __init__(self, exact: ExactBlock, gradient: Tensor, damping: float) -> None:
        self.exact: ExactBlock | None = exact
        self.gradient = gradient
        self.damping = damping
        self.trace = exact.trace()
        self.natural = exact.solve(gradient, damping, SOLUTION_TOLERANCE)
        self.best = _dot(gradient, self.natural)
        self.plain_decrease = self.decrease(gradient)

    def without_block(self) -> _Reference:
        """Return a copy without the block, to free the memory of its gradients."""
        other = _Reference.__new__(_Reference)
        vars(other).update({**vars(self), "exact": None})
        return other

    def decrease(self, step: Tensor) -> float:
        """Return gᵀv for v scaled to a given vᵀ(F + δ)v, relative to the largest possible gᵀv."""
        assert self.exact is not None
        image = self.exact.product(step) + self.damping * step
        length = _dot(step, image)
        if length <= 0 or self.best <= 0:
            return math.nan
        return _dot(self.gradient, step) / math.sqrt(length * self.best)

    def details(self, block: Block, natural: Tensor, seed: int) -> _First:
        """Return what is measured in one batch only."""
        exact = self.exact
        assert exact is not None
        start = random_start(exact.shape, exact.like, seed + 2)
        norm = exact.operator_norm()
        error = operator_norm(
            lambda v: block.product(v) - exact.product(v), start, most=MOST_LANCZOS_STEPS
        )
        spectrum = block.spectrum()
        own = block.operator_norm() if spectrum is not None else 0.0
        return _First(
            operator_error=error / norm if norm else math.nan,
            cosine=_cosine(natural, self.natural),
            smallest_eigenvalue=block.smallest_eigenvalue() / own if own else 0.0,
            spectrum=spectrum,
        )


def _without_each(count: int) -> list[list[int]]:
    """Return all batches but one, for each one; nothing for fewer than three batches."""
    everything = range(count)
    return [[b for b in everything if b != left] for left in everything] if count > 2 else []


def _ratio(above: Tensor, below: Tensor) -> float:
    total = float(below.sum())
    return float(above.sum()) / total if total else math.nan


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _dot(first: Tensor, second: Tensor) -> float:
    return float((in_widest(first) * in_widest(second)).sum())


def _cosine(first: Tensor, second: Tensor) -> float:
    scale = math.sqrt(_dot(first, first) * _dot(second, second))
    return _dot(first, second) / scale if scale else math.nan
