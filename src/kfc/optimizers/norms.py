"""Products with the exact Fisher matrix of the batch of a step."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from kfc.fisher.likelihoods import Weights
from kfc.fisher.products import ProductError, products_of_call
from kfc.layers import mixes_examples
from kfc.optimizers.engine import Engine
from kfc.statistics.parts import Part, first_part


def fisher_products(
    engine: Engine,
    vectors: Sequence[Mapping[str, Tensor]],
    examples_used: Callable[[int], int] = lambda examples: examples,
) -> Tensor:
    """Return all vᵢᵀFvⱼ, (k, k), with the exact F of a step; float64, on the CPU.

    Args:
        examples_used: returns how many of the step's examples F is computed on, given the number
            of those of all micro-batches of this rank.

    Raises:
        ProductError: on all ranks, if the products cannot be computed on one of them.
    """
    found = _own_products(engine, vectors, examples_used)
    failure = found if isinstance(found, ProductError) else None
    flags = engine.reducer.gather([float(failure is not None)])
    if isinstance(found, ProductError) or any(flag for (flag,) in flags):
        raise failure or ProductError("exact Fisher products failed on another rank")
    total, examples = found
    is_summed = engine.collector.losses.is_summed
    return engine.reducer.mean_product(total, examples, is_summed=is_summed)


def _own_products(
    engine: Engine, vectors: Sequence[Mapping[str, Tensor]], examples_used: Callable[[int], int]
) -> tuple[Tensor, int] | ProductError:
    """Return the products on this rank's examples, and their number; or why there are none."""
    observations, losses = engine.collector.observations, engine.collector.losses
    examples = sum(observation.examples for observation in observations)
    # Batch normalisation has no statistics of a single example.
    fewest = 2 if mixes_examples(engine.model) else 1
    parts = first_part(observations, examples_used(examples), fewest)
    try:
        products = [_products_of_part(engine, part, vectors) for part in parts]
    except ProductError as error:
        return error
    covered = sum(count for _, count in products)
    total = torch.zeros(len(vectors), len(vectors)).double()
    for values, count in products:
        # On the scale of the loss on all examples; parts are weighted by their examples.
        share = losses.growth(count, examples) * count / covered
        total += share * values.cpu().double()
    return 0.5 * (total + total.mT), examples


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
    except ProductError:
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
