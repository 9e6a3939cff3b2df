"""Derivatives along a direction by two backward passes, for operations without forward mode.

Jᵀu is linear in u, and the derivative of (Jᵀu)ᵀv in u is Jv.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


class SecondDerivativeError(RuntimeError):
    """Raised if an operation has neither a forward-mode nor a second derivative."""


def changes_along(
    outputs: Mapping[str, Tensor],
    leaves: Mapping[str, Tensor],
    vectors: Sequence[Mapping[str, Tensor]],
) -> list[dict[str, Tensor]]:
    """Return Jv of every vector v, by output.

    Args:
        outputs: the outputs by name, with their graph, which is kept.
        leaves: the parameters by name.
        vectors: by the names of parameters.
    """
    dependent = {name: output for name, output in outputs.items() if output.requires_grad}
    zeros = {name: torch.zeros_like(output) for name, output in outputs.items()}
    if not dependent:
        return [zeros for _ in vectors]
    with torch.enable_grad():
        seeds = [torch.zeros_like(output, requires_grad=True) for output in dependent.values()]
        try:
            pulled = torch.autograd.grad(
                list(dependent.values()),
                list(leaves.values()),
                seeds,
                create_graph=True,
                allow_unused=True,
            )
            found = [
                _derivatives(dict(zip(leaves, pulled, strict=True)), vector, seeds)
                for vector in vectors
            ]
        except (NotImplementedError, RuntimeError) as error:
            raise SecondDerivativeError(str(error).splitlines()[0]) from error
    return [zeros | dict(zip(dependent, changes, strict=True)) for changes in found]


def _derivatives(
    pulled: Mapping[str, Tensor | None], vector: Mapping[str, Tensor], seeds: list[Tensor]
) -> tuple[Tensor, ...]:
    products = [
        (gradient * vector[name].to(gradient)).sum()
        for name, gradient in pulled.items()
        if gradient is not None and name in vector
    ]
    if not products:
        return tuple(torch.zeros_like(seed) for seed in seeds)
    total = torch.stack([product.to(seeds[0].device) for product in products]).sum()
    return torch.autograd.grad(total, seeds, retain_graph=True, materialize_grads=True)
