"""Record the activations of one layer, and the derivatives at its pre-activations, on a batch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from kfc._helpers import require_whole
from kfc.curvature.layer import LayerCurvature
from kfc.curvature.options import Approximation
from kfc.fisher.calls import (
    SavedBuffers,
    accelerators_of,
    call_of,
    forked_random_state,
    suspended,
    without_autocast,
)
from kfc.fisher.compiled import eagerly
from kfc.fisher.heads import Output, select_output
from kfc.fisher.likelihoods import Likelihood, resolve_likelihood
from kfc.layers import (
    LinearLayer,
    MatrixLayer,
    TiedEmbeddingLayer,
    find_layers,
    mixes_examples,
)
from kfc.statistics.backward import output_edge

# Enumerating the targets takes one backward pass per column.
MAX_COLUMNS = 1024
# The number of elements of the arrays that are processed at a time.
CHUNK_ELEMENTS = 1 << 25


@dataclass(frozen=True)
class LayerCall:
    """One call of a layer.

    Attributes:
        inputs: (B, J, *T), or (B, ..., J) for a linear layer; B is a multiple of the examples.
        derivatives: (draws, *outputs), scaled so that sums over draws are expectations.
    """

    inputs: Tensor
    derivatives: Tensor

    @property
    def outputs(self) -> Tensor:
        """A tensor of the shape of the call's outputs, without values."""
        return self.derivatives[0].to("meta")


@dataclass(frozen=True)
class LayerRecord:
    """Activations and derivatives of one layer on one batch.

    The layer's gradient for example m and draw r is the matrix G = Σ_t Ds_t (1, a_t), of shape
    (groups, I, n): rows are output maps; columns are the homogeneous coordinate and the J|D|
    weights, if they are trained. Its Fisher block is E[vec G vec Gᵀ]: the sum over draws, and the
    mean over examples.

    Attributes:
        name: the layer's name in ``model.named_modules()``.
        layer: the layer's geometry.
        calls: the calls of the layer in one forward pass.
        examples: the number of examples in the batch.
        blocks: blocks of the record that are needed more than once, by name.
    """

    name: str
    layer: MatrixLayer
    calls: tuple[LayerCall, ...]
    examples: int
    blocks: dict[str, object] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def draws(self) -> int:
        """The number of derivatives per example: drawn targets, or columns of the exact Fisher."""
        return self.calls[0].derivatives.shape[0]

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape (groups, I, n) of a gradient."""
        columns, rows = self.layer.factor_sizes()
        return self.layer.groups, rows, columns

    @property
    def size(self) -> int:
        """The number of trained parameters."""
        return math.prod(self.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.layer.dtype

    @property
    def rows_per_example(self) -> int:
        """|T|, over all calls."""
        rows = (self.layer.derivative_rows(call.outputs).shape[1] for call in self.calls)
        return sum(rows) // self.examples

    @property
    def like(self) -> Tensor:
        """An empty tensor with the dtype and the device of rows."""
        return self.calls[0].inputs.new_empty(0, dtype=self.dtype)

    def curvature(self, approximation: Approximation) -> LayerCurvature:
        """Return the curvature that training would have after the statistics of the record."""
        curvature = approximation.for_layer(self.layer)
        self.gather(curvature)
        return curvature

    def gather(self, curvature: LayerCurvature) -> None:
        """Set the running averages, and what the inverse measures, to those of the record."""
        statistics = curvature.statistics(fresh=False)
        kept = [statistics.forward(call.inputs, call.outputs) for call in self.calls]
        for draw in range(self.draws):
            for call, of_call in zip(self.calls, kept, strict=True):
                statistics.backward(of_call, call.derivatives[draw], self.examples)
            statistics.end_draw()
        moments = statistics.moments(self.examples)
        curvature.average_in_(tuple(moment.to_mean_() for moment in moments), decay=0.0)

    def activation_rows(self, part: slice) -> Tensor:
        """Return the rows (1, a_t) of a part of the examples, (examples, groups, |T|, n)."""
        layer, trained, rows = self.layer, self.layer.trained(), []
        for call in self.calls:
            inputs, outputs = self.selected(call, part)
            columns = []
            if "bias" in trained:
                columns.append(inputs.new_ones(*layer.derivative_rows(outputs).shape[:2], 1))
            if "weight" in trained:
                columns.append(layer.activation_rows(layer.row_source(inputs, outputs)))
            by_example = torch.cat(columns, dim=2).unflatten(1, (part.stop - part.start, -1))
            rows.append(by_example.transpose(0, 1))
        return torch.cat(rows, dim=2)

    def derivative_rows(self, part: slice) -> Tensor:
        """Return Ds_t for a part of the examples, (draws, examples, groups, |T|, I)."""
        rows = []
        for call in self.calls:
            derivatives = self._select(call.derivatives, part, dim=1).to(self.dtype)
            by_row = self.layer.derivative_rows(derivatives.flatten(0, 1))
            by_row = by_row.unflatten(1, (self.draws, part.stop - part.start, -1))
            rows.append(by_row.permute(1, 2, 0, 3, 4))
        return torch.cat(rows, dim=3)

    def selected(self, call: LayerCall, part: slice) -> tuple[Tensor, Tensor]:
        """Return a call's inputs, and a tensor like its outputs, for a part of the examples."""
        inputs = self._select(call.inputs, part).to(self.dtype)
        return inputs, self._select(call.outputs, part)

    def _select(self, tensor: Tensor, part: slice, dim: int = 0) -> Tensor:
        """Return a part of the examples; frames folded into the batch stay with their example."""
        frames = tensor.shape[dim] // self.examples
        return tensor.narrow(dim, part.start * frames, (part.stop - part.start) * frames)

    def chunks(self, elements_per_example: int) -> Iterator[slice]:
        """Yield a few examples at a time, to bound the memory of arrays made from them."""
        step = max(1, CHUNK_ELEMENTS // max(1, elements_per_example))
        for start in range(0, self.examples, step):
            yield slice(start, min(start + step, self.examples))

    def row_chunks(self, extra_elements: int = 0) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield (part, activation rows, derivative rows) for a few examples at a time."""
        groups, rows, columns = self.shape
        per_example = groups * self.rows_per_example * (columns + self.draws * rows)
        for part in self.chunks(per_example + extra_elements):
            yield part, self.activation_rows(part), self.derivative_rows(part)

    def gradient_chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield (part, gradients (draws, examples, groups, I, n)) for a few examples at a time."""
        for part, activations, derivatives in self.row_chunks(self.draws * self.size):
            yield part, derivatives.mT @ activations


def factored_layers(model: nn.Module) -> dict[str, MatrixLayer]:
    """Return the layers that can be analysed, by name: those with Kronecker factors.

    These are layers whose modules compute the product of one dense matrix and their inputs.
    """
    return {
        name: layer
        for name, layer in find_layers(model).layers.items()
        if isinstance(layer, MatrixLayer)
        and layer.trained()
        and not (layer.one_hot or layer.centred or layer.functional)
        and not isinstance(layer, TiedEmbeddingLayer)
    }


def record_layer(
    model: nn.Module,
    inputs: Any,
    layer: str,
    *,
    likelihood: str | Likelihood = "categorical",
    samples: int | None = None,
    output: Output | None = None,
    seed: int = 0,
) -> LayerRecord:
    """Run the model once, and one backward pass for every draw of the targets.

    Args:
        model: the model, in the mode to analyse it in (usually after ``model.eval()``).
            Parameters, buffers, gradients and the random state do not change.
        inputs: one batch: a tensor, a tuple of arguments, or a dict of them.
        layer: the layer's name in ``model.named_modules()``; linear or convolutional.
        likelihood: the distribution that the outputs parametrise; see ``kfc.Likelihood``.
        samples: the number of targets to draw for every example; ``None`` enumerates all targets,
            which makes expectations exact.
        output: selects the tensor of outputs from what the model returns.
        seed: the seed of the drawn targets.
    """
    if samples is not None:
        require_whole("samples", samples)
    geometry = _find_layer(model, layer)
    if mixes_examples(model):
        raise ValueError(
            "the model normalises with the statistics of its batch, so that no example has a "
            "gradient of its own; call model.eval() first"
        )
    with unchanged(model):
        with _recorded(geometry) as calls:
            outputs = run_model(model, inputs, output)
        distribution = resolve_likelihood(likelihood)
        distribution.validate(outputs)
        examples = len(outputs)
        _check_calls(layer, geometry, calls, examples)
        columns = _output_derivatives(distribution, outputs.detach(), samples, seed)
        draws = zip(*(_backward(outputs, column, calls) for column in columns), strict=True)
    found = (
        LayerCall(
            geometry.rows_first(call.inputs, examples),
            torch.stack([geometry.rows_first(derivative, examples) for derivative in derivatives]),
        )
        for call, derivatives in zip(calls, draws, strict=True)
    )
    return LayerRecord(layer, geometry, tuple(found), examples)


def _find_layer(model: nn.Module, name: str) -> MatrixLayer:
    layers = factored_layers(model)
    if name not in layers:
        raise ValueError(
            f"the model has no trained layer {name!r} with Kronecker factors; it has "
            f"{', '.join(map(repr, layers)) or 'none'}"
        )
    return layers[name]


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Run a model with autograd, without effect on its buffers, hooks and the random state."""
    buffers = SavedBuffers(model)
    try:
        with (
            suspended(),
            eagerly(),
            forked_random_state(accelerators_of(model)),
            torch.enable_grad(),
        ):
            yield
    finally:
        buffers.restore()


def run_model(model: nn.Module, inputs: Any, output: Output | None) -> Tensor:
    """Return the tensor of outputs, for inputs as in ``record_layer``."""
    call = call_of(model, inputs)
    return select_output(model(*call.args, **call.kwargs), output)


class _Call(NamedTuple):
    """One call in a forward pass: its inputs, and the shape and gradient edge of its outputs."""

    inputs: Tensor
    shape: torch.Size
    edge: GradientEdge


@contextmanager
def _recorded(layer: MatrixLayer) -> Iterator[list[_Call]]:
    """Record the calls of a layer in the list that the context returns."""
    calls: list[_Call] = []

    def record(module: nn.Module, args: Any, kwargs: Any, outputs: Tensor) -> None:
        inputs = args[0] if args else next(iter(kwargs.values()))
        # The edge, not the tensor: after an operation in place its derivative is another one.
        calls.append(_Call(inputs.detach().clone(), outputs.shape, output_edge(outputs)))

    # Removed before the backward pass, in which checkpointing runs layers again.
    hooks = [m.register_forward_hook(record, with_kwargs=True) for m in layer.modules]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def _backward(outputs: Tensor, column: Tensor, calls: list[_Call]) -> list[Tensor]:
    """Carry a derivative in the model's outputs back to the pre-activations of every call."""
    edges, column = [call.edge for call in calls], column.to(outputs.dtype)
    with without_autocast(outputs.device):
        found = torch.autograd.grad(outputs, edges, column, retain_graph=True, allow_unused=True)
    return [
        outputs.new_zeros(call.shape) if derivative is None else derivative.reshape(call.shape)
        for call, derivative in zip(calls, found, strict=True)
    ]


def _check_calls(name: str, layer: MatrixLayer, calls: list[_Call], examples: int) -> None:
    """Raise ``ValueError`` unless every row belongs to one example that can be identified."""
    if not calls:
        raise ValueError(f"layer {name!r} did not run on these inputs")
    for shape in (tuple(s) for call in calls for s in (call.inputs.shape, call.shape)):
        is_sequence = isinstance(layer, LinearLayer) and len(shape) > 2
        if is_sequence and shape[0] == shape[1] == examples > 1:
            raise ValueError(
                f"layer {name!r} runs on rows of shape {shape}: either of the first two dimensions "
                f"could be that of the {examples} examples; use another number of examples"
            )
        if len(layer.rows_first(torch.empty(shape, device="meta"), examples)) % examples:
            raise ValueError(
                f"layer {name!r} runs on rows that do not belong to one of the {examples} "
                f"examples each (shape {shape}), so that no example has a gradient of its own"
            )


def _output_derivatives(
    likelihood: Likelihood, outputs: Tensor, samples: int | None, seed: int
) -> Iterator[Tensor]:
    """Yield derivatives in the outputs; sums of their squares are expectations over targets."""
    if samples is None:
        columns = likelihood.columns_per_example(outputs)
        if columns > MAX_COLUMNS:
            raise ValueError(
                f"enumerating the targets of an output of shape {tuple(outputs.shape)} takes "
                f"{columns} backward passes, more than {MAX_COLUMNS}; give samples= instead"
            )
        yield from likelihood.derivative_columns(outputs)
        return
    generator = torch.Generator(outputs.device).manual_seed(seed)
    for _ in range(samples):
        yield likelihood.sample_derivative(outputs, generator) / math.sqrt(samples)
