"""Products with the exact Fisher matrix of the batch of a step."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kfc.fisher.likelihoods import Weights
from kfc.fisher.products import ForwardModeError, products_of_call
from kfc.layers import mixes_examples
from kfc.optimizers.engine import Engine
from kfc.statistics.parts import Part, first_part


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
    parts = first_part(observations, math.ceil(examples * fraction), fewest)
    products = [_products_of_part(engine, part, vectors) for part in parts]
    covered = sum(count for _, count in products)
    total = torch.zeros(len(vectors), len(vectors)).double()
    for values, count in products:
        # On the scale of the loss on all examples; parts are weighted by their examples.
        share = losses.growth(count, examples) * count / covered
        total += share * values.cpu().double()
    mean = 0.5 * (total + total.mT)
    return engine.reducer.mean_product(mean, examples, is_summed=losses.is_summed)


def _products_of_part(
    engine: Engine, part: Part, vectors: Sequence[Mapping[str, Tensor]]
) -> tuple[Tensor, int]:
    """Return the products on a part, and the number of examples they cover."""
    collector, losses = engine.collector, engine.collector.losses
    weights = collector.weights(part.observation)

    def weights_of(name: str, outputs: Tensor) -> Weights:
        whole = weights.get(name, 0.0)  # 0 for an output that the loss did not use
        return part.weights(whole, len(outputs), is_summed=losses.is_summed)

    try:
        return products_of_call(
            engine.model, part.call, vectors, losses.likelihoods, losses.output, weights_of
        )
    except ForwardModeError:
        raise
    except Exception as error:
        if part.is_whole:
            raise
        of = part.observation.examples
        raise RuntimeError(
            f"while clipping, running the model on the first {part.count} of {of} "
            f"examples failed: {error}. Every tensor argument of that length was cut; if one of "
            "them is not a batch, use clip=kfc.FisherClip(fraction=1) or kfc.FisherClip(None)"
        ) from error
