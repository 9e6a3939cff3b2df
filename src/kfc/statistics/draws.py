"""Derivatives with targets from the model, carried from its outputs to its layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Size, Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from kfc.distributed.reducer import Reducer
from kfc.fisher.calls import (
    ModelCall,
    SavedBuffers,
    accelerators_of,
    forked_random_state,
    without_autocast,
)
from kfc.fisher.compiled import eagerly
from kfc.fisher.likelihoods import Likelihood, Weights
from kfc.fisher.losses import Losses
from kfc.layers import mixes_examples
from kfc.statistics.backward import RecordedPass, viewed
from kfc.statistics.columns import exact_columns
from kfc.statistics.generator import OwnGenerator

# Where the derivative in an output arrives, and the shape that it has there.
OutputEdge = tuple[GradientEdge, Size]


def output_edges(outputs: Mapping[str, Tensor]) -> dict[str, OutputEdge]:
    """Return the edges of the outputs that depend on parameters, by name."""
    whole = {name: viewed(t) for name, t in outputs.items() if t.requires_grad}
    return {name: (get_gradient_edge(t), t.shape) for name, t in whole.items()}


class Draws:
    """Draws targets for the outputs of passes, and gathers the derivatives of their layers.

    Args:
        exact: take the expectation over all targets instead of one draw.
        seed: the seed of the targets.

    Attributes:
        replayed: the recorder of the pass that is being replayed.
    """

    def __init__(
        self, model: nn.Module, losses: Losses, reducer: Reducer, *, exact: bool, seed: int
    ) -> None:
        self.generator = OwnGenerator(seed)
        self.replayed: RecordedPass | None = None
        self._model, self._losses, self._reducer = model, losses, reducer
        self._exact = exact

    def backward(
        self,
        recorded: RecordedPass,
        edge: OutputEdge,
        likelihood: Likelihood,
        outputs: Tensor,
        weights: Weights,
        scale: float,
    ) -> None:
        """Carry derivatives from one output to the layers of a recorded pass.

        Args:
            scale: the factor of the derivatives.
        """
        node, shape = edge
        with torch.no_grad(), without_autocast(outputs.device):
            # A layer may also run on rows that do not belong to one example each.
            mixes_rows = any(c.shape[0] % len(outputs) for _, c in recorded.calls)
            together = not (mixes_examples(self._model) or mixes_rows)
            for column in self._columns(likelihood, outputs, weights, together):
                recorded.backward(node, outputs.dtype, (scale * column).reshape(shape))

    def _columns(
        self, likelihood: Likelihood, outputs: Tensor, weights: Weights, together: bool
    ) -> Iterator[Tensor]:
        if not self._exact:
            generator = self._reducer.generator(self.generator, outputs.device)
            return iter([likelihood.sample_derivative(outputs, generator, weights)])
        joint = self._reducer.mixes_examples(self._model)
        return exact_columns(likelihood, outputs, weights, together, joint, self._reducer)

    def replay(
        self,
        call: ModelCall,
        recorded: RecordedPass,
        examples: int,
        weights: Mapping[str, Weights],
        scale: float,
    ) -> None:
        """Run the model on a call, and gather the statistics of its layers.

        Buffers, gradients and the global random state are left unchanged.

        Args:
            examples: the number of examples in the call.
            weights: the weights of the terms of every output, by name.
            scale: the factor of the derivatives.
        """
        model, buffers = self._model, SavedBuffers(self._model)
        device = next(model.parameters()).device.type
        self.replayed = recorded
        try:
            with (
                forked_random_state(accelerators_of(model)),
                eagerly(),
                torch.enable_grad(),
                # As in the recorded pass, whether autocast is on or off now
                torch.autocast(device, call.autocast, enabled=call.autocast is not None),
            ):
                outputs = self._losses.select(model(*call.args, **call.kwargs))
                edges = output_edges(outputs)
            sizes = {len(each) for each in outputs.values()}
            if sizes != {examples}:
                raise ValueError(f"the outputs have {sizes} rows instead of {examples}")
            recorded.end_forward(examples, outputs.values())
            for name, edge in edges.items():
                likelihood = self._losses.by_name[name].likelihood
                if likelihood is not None and name in weights:
                    values = outputs[name].detach()
                    self.backward(recorded, edge, likelihood, values, weights[name], scale)
        finally:
            self.replayed = None
            buffers.restore()
