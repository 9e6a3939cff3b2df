"""Products with the exact Fisher matrix of the batch of a step."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kfc._helpers import tree_map
from kfc.fisher.calls import ModelCall
from kfc.fisher.likelihoods import Weights
from kfc.fisher.products import ForwardModeError, products_of_call
from kfc.layers import mixes_examples
from kfc.optimizers.engine import Engine
from kfc.statistics.observation import Observation


def fisher_products(
    engine: Engine, vectors: Sequence[Mapping[str, Tensor]], fraction: float = 1.0
) -> Tensor:
    """Return all vᵢᵀFvⱼ, (k, k), with the exact F of a step; float64, on the CPU.

    Args:
        fraction: the part of the step's examples that F is computed on, over all micro-batches.
    """
    observations, losses = engine.collector.observations, engine.collector.losses
    examples = sum(observation.examples for observation in observations)
    # Batch normalisation has no statistics of a single example.
    fewest = 2 if mixes_examples(engine.model) else 1
    parts = _first_part(observations, math.ceil(examples * fraction), fewest)
    products = [_products_of_part(engine, part, vectors) for part in parts]
    covered = sum(count for _, count in products)
    total = torch.zeros(len(vectors), len(vectors)).double()
    for values, count in products:
        # On the scale of the loss on all examples; parts are weighted by their examples.
        share = losses.growth(count, examples) * count / covered
        total += share * values.cpu().double()
    mean = 0.5 * (total + total.mT)
    return engine.reducer.mean_product(mean, examples, is_summed=losses.is_summed)


class _Part:
    """The first examples of a forward pass."""

    def __init__(self, observation: Observation, count: int) -> None:
        self.observation = observation
        self.examples = observation.examples
        self.count = count
        self.call = observation.call
        if count < observation.examples:
            self.call = first_examples(observation.call, observation.examples, count)


def _first_part(observations: Sequence[Observation], count: int, fewest: int) -> list[_Part]:
    """Return the passes that contain the first examples of a step, the last one cut.

    Args:
        fewest: the smallest number of examples the model can run on.
    """
    parts = []
    for observation in observations:
        if count <= 0:
            break
        parts.append(_Part(observation, min(observation.examples, max(count, fewest))))
        count -= observation.examples
    return parts


def _products_of_part(
    engine: Engine, part: _Part, vectors: Sequence[Mapping[str, Tensor]]
) -> tuple[Tensor, int]:
    """Return the products on a part, and the number of examples they cover."""
    collector, losses = engine.collector, engine.collector.losses
    weights = collector.weights(part.observation)

    def weights_of(name: str, outputs: Tensor) -> Weights:
        own = weights.get(name, 0.0)  # an output that the loss did not use
        if isinstance(own, Tensor) and own.dim():
            own = own[: len(outputs)]
        # On the scale of the examples that are left.
        return own if losses.is_summed else own * part.examples / len(outputs)

    try:
        return products_of_call(
            engine.model, part.call, vectors, losses.likelihoods, losses.output, weights_of
        )
    except ForwardModeError:
        raise
    except Exception as error:
        if part.count == part.examples:
            raise
        raise RuntimeError(
            f"while clipping, running the model on the first {part.count} of {part.examples} "
            f"examples failed: {error}. Every tensor argument of that length was cut; if one of "
            "them is not a batch, use clip=kfc.FisherClip(fraction=1) or kfc.FisherClip(None)"
        ) from error


def first_examples(call: ModelCall, examples: int, count: int) -> ModelCall:
    """Return the call with every tensor argument of that many examples cut to the first few."""

    def cut(value: Any) -> Any:
        batched = isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == examples
        return value[:count].detach() if batched else value

    return ModelCall(tree_map(cut, call.args), tree_map(cut, call.kwargs), call.autocast)
