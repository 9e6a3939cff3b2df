"""What one layer sees on a batch: its activations, and derivatives at its pre-activations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from kfc.buffers import SavedBuffers
from kfc.capture import suspended
from kfc.checks import require_whole
from kfc.fisher import Output, select_output
from kfc.generator import OwnGenerator
from kfc.layers import (
    ConvolutionHandler,
    KroneckerHandler,
    LinearHandler,
    mixes_examples,
    plan_layers,
)
from kfc.layers.base import DEFAULT_MAX_FACTOR_SIZE
from kfc.likelihoods import Likelihood, resolve_likelihood
from kfc.randomness import accelerators_of, forked_random_state
from kfc.session import output_edge, without_autocast

# Enumeration takes one backward pass per column.
MAX_COLUMNS = 1024
# Elements of the arrays that are worked on at a time.
CHUNK_ELEMENTS = 1 << 25


@dataclass(frozen=True)
class LayerCall:
    """One call of a layer.

    Attributes:
        inputs: (B, J, *T), or (B, ..., J) of a linear layer; B is a multiple of the examples.
        outputs: without values, for its shape.
        derivatives: (draws, *outputs), scaled so that sums over draws are expectations.
    """

    inputs: Tensor
    outputs: Tensor
    derivatives: Tensor


@dataclass(frozen=True)
class LayerRecord:
    """Activations and derivatives of one layer on one batch.

    The layer's gradient for example m and draw r is the matrix G = Σ_t Ds_t (1, a_t), of shape
    (groups, I, n): rows are output maps, columns the homogeneous coordinate and J|D| weights, as
    far as they are trained. Its Fisher block is E[vec G vec Gᵀ]: the sum over draws, and the mean
    over examples.
    """

    name: str
    handler: KroneckerHandler
    calls: tuple[LayerCall, ...]
    examples: int

    @property
    def draws(self) -> int:
        return self.calls[0].derivatives.shape[0]

    @property
    def shape(self) -> tuple[int, int, int]:
        """(groups, I, n) of a gradient."""
        columns, rows = self.handler.sizes()
        return self.handler.groups, rows, columns

    @property
    def size(self) -> int:
        """How many parameters there are."""
        groups, rows, columns = self.shape
        return groups * rows * columns

    @property
    def dtype(self) -> torch.dtype:
        return self.handler.dtype

    @property
    def device(self) -> torch.device:
        return self.calls[0].inputs.device

    @property
    def rows_per_example(self) -> int:
        """|T|, over all calls."""
        return sum(
            self.handler.derivative_rows(call.outputs).shape[1] // self.examples
            for call in self.calls
        )

    def activation_rows(self, part: slice) -> Tensor:
        """(examples, groups, |T|, n) of some examples: what each location is multiplied with."""
        trained = self.handler.trained()
        rows = []
        for call in self.calls:
            source = self._source(call, part)
            columns = []
            if "weight" in trained:
                by_row = self.handler.activation_rows(source)
                columns.append(by_row.unflatten(1, (-1, self._rows_of(call))).transpose(0, 1))
            if "bias" in trained:
                shape = (_length(part, self.examples), self.shape[0], self._rows_of(call), 1)
                columns.insert(0, source.new_ones(shape))
            rows.append(torch.cat(columns, dim=-1))
        return torch.cat(rows, dim=2)

    def derivative_rows(self, part: slice) -> Tensor:
        """(draws, examples, groups, |T|, I) of some examples."""
        rows = []
        for call in self.calls:
            some = self._of_call(call.derivatives, part, dim=1).to(self.dtype)
            by_row = self.handler.derivative_rows(some.flatten(0, 1))
            # (groups, draws · examples · |T|, I)
            by_row = by_row.unflatten(1, (self.draws, -1, self._rows_of(call)))
            rows.append(by_row.permute(1, 2, 0, 3, 4))
        return torch.cat(rows, dim=3)

    def chunks(self, elements_per_example: int) -> Iterator[slice]:
        """Examples a few at a time, so that their arrays stay small."""
        step = max(1, CHUNK_ELEMENTS // max(1, elements_per_example))
        for start in range(0, self.examples, step):
            yield slice(start, min(start + step, self.examples))

    def row_chunks(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """(part, activation rows, derivative rows) a few examples at a time."""
        groups, rows, columns = self.shape
        per_example = groups * self.rows_per_example * (columns + self.draws * rows)
        for part in self.chunks(per_example):
            yield part, self.activation_rows(part), self.derivative_rows(part)

    def gradient_chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """(part, gradients (draws, examples, groups, I, n)) a few examples at a time."""
        groups, rows, columns = self.shape
        patches = groups * self.rows_per_example * (columns + self.draws * rows)
        for part in self.chunks(patches + self.draws * self.size):
            activations, derivatives = self.activation_rows(part), self.derivative_rows(part)
            yield part, derivatives.mT @ activations

    def matrix(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """(groups, I, n) from tensors by role, shaped like the layer's bias and weight."""
        parts = []
        if "bias" in gradients:
            parts.append(gradients["bias"].reshape(self.handler.groups, -1, 1))
        if "weight" in gradients:
            parts.append(self.handler.weight_to_matrix(gradients["weight"]))
        return torch.cat(parts, dim=2).to(self.dtype)

    def tensors(self, matrix: Tensor) -> dict[str, Tensor]:
        """The reverse of ``matrix``."""
        trained, result = self.handler.trained(), {}
        if "bias" in trained:
            result["bias"] = matrix[:, :, 0].reshape(-1)
            matrix = matrix[:, :, 1:]
        if "weight" in trained:
            result["weight"] = self.handler.weight_from_matrix(matrix)
        return result

    def _source(self, call: LayerCall, part: slice) -> Tensor:
        inputs = self._of_call(call.inputs, part, dim=0).to(self.dtype)
        return self.handler.row_source(inputs, self._of_call(call.outputs, part, dim=0))

    def _rows_of(self, call: LayerCall) -> int:
        return self.handler.derivative_rows(call.outputs).shape[1] // self.examples

    def _of_call(self, tensor: Tensor, part: slice, dim: int) -> Tensor:
        """Those of some examples; frames folded into the batch belong to their example."""
        frames = tensor.shape[dim] // self.examples
        start, length = part.start * frames, _length(part, self.examples) * frames
        return tensor.narrow(dim, start, length)


def _length(part: slice, examples: int) -> int:
    start, stop, _ = part.indices(examples)
    return stop - start


def factored_layers(model: nn.Module) -> dict[str, KroneckerHandler]:
    """The layers that can be analysed, by name: those with Kronecker factors."""
    plan = plan_layers(model, DEFAULT_MAX_FACTOR_SIZE)
    return {
        name: handler
        for name, handler in plan.handlers.items()
        if isinstance(handler, KroneckerHandler) and handler.trained()
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
    """Run the model once, and backward for every draw of the targets.

    Args:
        model: in the mode it is to be analysed in; parameters, buffers, gradients and the random
            state stay as they were.
        inputs: one batch: a tensor, a tuple of arguments, or a dict of them.
        layer: its name in ``model.named_modules()``.
        samples: how many targets to draw for every example; ``None`` enumerates them, exactly.
        output: picks the tensor of outputs from what the model returns.
        seed: of the drawn targets.
    """
    if samples is not None:
        require_whole("samples", samples)
    handler = _find_layer(model, layer)
    if mixes_examples(model):
        raise ValueError(
            "the model normalises with the statistics of its batch, so that no example has a "
            "gradient of its own; call model.eval() first"
        )
    with ExitStack() as stack:
        stack.callback(SavedBuffers(model).restore)
        stack.enter_context(suspended())
        stack.enter_context(forked_random_state(accelerators_of(model)))
        stack.enter_context(torch.enable_grad())
        heard = _Listener(handler, stack)
        outputs = select_output(run_model(model, inputs), output)
        heard.listening = False  # checkpointing runs layers again on the way back
        distribution = resolve_likelihood(likelihood)
        distribution.validate(outputs)
        columns = _output_derivatives(distribution, outputs.detach(), samples, seed)
        return LayerRecord(layer, handler, heard.calls(layer, outputs, columns), len(outputs))


def _find_layer(model: nn.Module, name: str) -> KroneckerHandler:
    layers = factored_layers(model)
    if name not in layers:
        raise ValueError(
            f"the model has no trained layer {name!r} with Kronecker factors; it has "
            f"{', '.join(map(repr, layers)) or 'none'}"
        )
    return layers[name]


def run_model(model: nn.Module, inputs: Any) -> Any:
    """As ``record_layer`` takes inputs."""
    if isinstance(inputs, tuple):
        return model(*inputs)
    return model(**inputs) if isinstance(inputs, dict) else model(inputs)


class _Listener:
    """Hooks on a layer's modules, which note every call."""

    def __init__(self, handler: KroneckerHandler, stack: ExitStack) -> None:
        self._handler = handler
        self.listening = True
        self._number = 0
        self._inputs: list[Tensor] = []
        self._outputs: list[Tensor] = []
        self._edges: list[GradientEdge] = []
        for module in handler.modules:
            stack.callback(module.register_forward_hook(self._note, with_kwargs=True).remove)

    def _note(self, module: nn.Module, args: Any, kwargs: Any, outputs: Tensor) -> None:
        if not self.listening:
            return
        inputs = args[0] if args else next(iter(kwargs.values()))
        self._inputs.append(self._with_batch(inputs.detach().clone()))
        self._outputs.append(self._with_batch(torch.empty_like(outputs, device="meta")))
        # The edge, not the tensor: an operation in place would change what its derivative is.
        self._edges.append(output_edge(outputs))

    def _with_batch(self, maps: Tensor) -> Tensor:
        if isinstance(self._handler, ConvolutionHandler):
            return self._handler.with_batch(maps)
        return maps

    def calls(
        self, layer: str, outputs: Tensor, columns: Iterable[Tensor]
    ) -> tuple[LayerCall, ...]:
        """Carry every derivative in the model's outputs back to the layer's pre-activations."""
        self._check(layer, len(outputs))
        found: list[list[Tensor]] = [[] for _ in self._edges]
        for column in columns:
            with without_autocast(outputs.device):
                passed = torch.autograd.grad(
                    outputs,
                    self._edges,
                    column.to(outputs.dtype),
                    retain_graph=True,
                    allow_unused=True,
                )
            for draws, shaped, derivative in zip(found, self._outputs, passed, strict=True):
                if derivative is None:
                    derivative = torch.zeros_like(shaped, device=outputs.device)
                draws.append(self._examples_first(derivative.detach().reshape(shaped.shape)))
        return tuple(
            LayerCall(self._examples_first(i), self._examples_first(o), torch.stack(draws))
            for i, o, draws in zip(self._inputs, self._outputs, found, strict=True)
        )

    def _check(self, layer: str, examples: int) -> None:
        """That every row belongs to one example, and that it can be told to which."""
        if not self._inputs:
            raise ValueError(f"layer {layer!r} did not run on these inputs")
        self._number = examples
        for tensor in (*self._inputs, *self._outputs):
            shape = tuple(tensor.shape)
            is_sequence = isinstance(self._handler, LinearHandler) and len(shape) > 2
            if is_sequence and shape[0] == shape[1] == examples > 1:
                raise ValueError(
                    f"layer {layer!r} runs on rows of shape {shape}: which of its first two "
                    f"dimensions is that of the {examples} examples cannot be told; give another "
                    "number of examples"
                )
            if self._examples_first(tensor).shape[0] % examples:
                raise ValueError(
                    f"layer {layer!r} runs on rows that do not belong to one of the {examples} "
                    f"examples each (shape {shape}), so that no example has a gradient of its own"
                )

    def _examples_first(self, values: Tensor) -> Tensor:
        """Some linear layers see sequences first, (length, N, ...)."""
        return self._handler.rows_first(values, self._number)


def _output_derivatives(
    likelihood: Likelihood, outputs: Tensor, samples: int | None, seed: int
) -> Iterator[Tensor]:
    """Derivatives in the outputs; sums over them of squares are expectations over targets."""
    if samples is None:
        columns = likelihood.columns_per_example(outputs)
        if columns > MAX_COLUMNS:
            raise ValueError(
                f"to enumerate the targets of an output of shape {tuple(outputs.shape)} takes "
                f"{columns} backward passes, more than {MAX_COLUMNS}; give samples= instead"
            )
        yield from likelihood.derivative_columns(outputs)
        return
    generator = OwnGenerator(seed).on(outputs.device)
    for _ in range(samples):
        yield likelihood.sample_derivative(outputs, generator) / math.sqrt(samples)
