"""Hooks on the outputs of a model, which the user's backward pass fires."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from kfc.fisher.heads import Output

# Receives the derivative of the loss in an output; ``None`` if it cannot be told.
OnDerivative = Callable[[Tensor | None], None]


def on_derivative(
    result: Any, selected: Tensor, output: Output | None, name: str, act: OnDerivative
) -> None:
    """Call ``act`` in the user's backward pass, when the derivative in an output is complete.

    The user computes the loss from what the model returned. If ``output`` selects a part of it or
    changes its shape, the derivative in the selected tensor is the same selection of derivatives.

    Args:
        result: what the model returned.
        selected: the output, which ``output`` made from it.
        name: the name of the output, if there are several.
    """
    leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    if any(leaf is selected for leaf in leaves):
        selected.register_hook(lambda derivative: act(derivative.detach()))
        return
    for leaf in leaves:
        if leaf.requires_grad and _depends_on(selected, leaf):
            leaf.register_hook(_Selection(result, leaf, selected, output, name, act))
            return


class _Selection:
    """Selects the derivative in an output from the derivative in what the model returned."""

    def __init__(
        self,
        result: Any,
        leaf: Tensor,
        selected: Tensor,
        output: Output | None,
        name: str,
        act: OnDerivative,
    ) -> None:
        # Zeros of the same structure: the tensors themselves would keep the graph in a cycle.
        self._index = [each is leaf for each in tree_leaves(result)].index(True)
        self._zeros = tree_map(_zeros_like, result)
        self._shape = selected.shape
        self._output, self._name, self._act = output, name, act

    def __call__(self, derivative: Tensor) -> None:
        derivative = derivative.detach()
        selected = self._select(derivative)
        # A selection keeps all that is not zero; anything else adds, drops or scales.
        kept = selected is not None and torch.isclose(
            selected.double().square().sum(), derivative.double().square().sum(), rtol=1e-3
        )
        self._act(selected if bool(kept) else None)

    def _select(self, derivative: Tensor) -> Tensor | None:
        position = iter(range(len(tree_leaves(self._zeros))))
        replaced = tree_map(
            lambda leaf: derivative if next(position) == self._index else leaf, self._zeros
        )
        with torch.no_grad():
            found = replaced if self._output is None else self._output(replaced)
        found = found[self._name] if self._name else found
        return found if isinstance(found, Tensor) and found.shape == self._shape else None


def _zeros_like(leaf: Any) -> Any:
    return leaf.new_zeros(()).expand(leaf.shape) if isinstance(leaf, Tensor) else leaf


def _depends_on(selected: Tensor, leaf: Tensor) -> bool:
    (found,) = torch.autograd.grad(
        selected,
        [torch.autograd.graph.get_gradient_edge(leaf)],
        torch.zeros_like(selected),
        retain_graph=True,
        allow_unused=True,
    )
    return found is not None
