"""Derivatives in the outputs for the exact and the empirical Fisher matrix."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from kfc.distributed.reducer import Reducer
from kfc.fisher.likelihoods import Likelihood, Weights

# The exact Fisher matrix takes one backward pass per column.
MAX_EXACT_COLUMNS = 1024


def exact_columns(
    likelihood: Likelihood,
    outputs: Tensor,
    weights: Weights,
    together: bool,
    joint: bool,
    reducer: Reducer,
) -> Iterator[Tensor]:
    """Yield derivatives in the outputs whose second moments add up to the expectation.

    Args:
        together: whether one column can serve all examples, because no layer mixes them.
        joint: whether a backward pass of one rank needs the others, as with SyncBatchNorm.
    """
    own = likelihood.columns_per_example(outputs) * (1 if together else len(outputs))
    turns = reducer.turns(own, joint=joint)
    columns = sum(count for _, count in turns)
    if columns > MAX_EXACT_COLUMNS:
        where = "" if together else " behind batch normalisation or rows that examples share"
        where += reducer.among_ranks if joint else ""
        raise ValueError(
            f'fisher="exact" takes one backward pass for each of the {columns} columns of an '
            f"output of shape {tuple(outputs.shape)}{where}, more than {MAX_EXACT_COLUMNS}; "
            'use fisher="sampled"'
        )
    for is_own, count in turns:
        if is_own:
            yield from _own_columns(likelihood, outputs, weights, together)
        else:
            yield from (torch.zeros_like(outputs) for _ in range(count))


def _own_columns(
    likelihood: Likelihood, outputs: Tensor, weights: Weights, together: bool
) -> Iterator[Tensor]:
    for column in likelihood.derivative_columns(outputs, weights):
        if together:
            yield column
            continue
        for example in range(len(outputs)):
            alone = torch.zeros_like(column)
            alone[example] = column[example]
            yield alone


def scale_of_squares(weights: Iterable[Weights]) -> float:
    """Return Σ c / Σ c² over terms: 1/c, if all weights are equal."""
    squares = sums = torch.zeros(())
    for each in weights:
        terms = torch.as_tensor(each)
        squares, sums = squares + terms.square().mean(), sums + terms.mean()
    return float(sums / squares)
