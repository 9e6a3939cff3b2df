"""Hooks on the outputs of a model, which the user's backward pass fires."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from kfc._helpers import graph_task, tree_leaves, tree_map
from kfc.fisher.compiled import outside_of_compiled_graphs
from kfc.fisher.heads import Output
from kfc.statistics.backward import viewed

# Receives the derivative of the loss in an output; ``None`` if unknown.
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
    # An object that is no pytree, such as a dataclass, hides its tensors; take the selected one.
    if not leaves or any(leaf is selected for leaf in leaves):
        _register([selected], act)
        return
    sources = _sources(selected, [leaf for leaf in leaves if leaf.requires_grad])
    if len(sources) == 1:
        _register(sources, _Selection(result, sources[0], selected, output, name, act))
    else:
        # The derivatives in the others are not known yet when the first one arrives, and when the
        # last one does, autograd may have freed a part of the graph.
        _register(sources, lambda _: act(None))


def _register(tensors: list[Tensor], act: OnDerivative) -> None:
    """Call ``act`` once per backward pass, when the first derivative in the tensors arrives.

    In-place operations on a view bypass its hooks, but not those of the tensor that it views.
    """
    if not tensors:
        return
    hook = _OncePerBackward(act, tensors[0].shape)
    for tensor in tensors:
        tensor.register_hook(hook)
        if viewed(tensor) is not tensor:
            viewed(tensor).register_hook(hook)


class _OncePerBackward:
    """Reports the first derivative that arrives in each backward pass."""

    def __init__(self, act: OnDerivative, shape: torch.Size) -> None:
        self._act = act
        self._shape = shape
        self._last: int | None = None

    @outside_of_compiled_graphs(callees=True)
    def __call__(self, derivative: Tensor) -> None:
        current = graph_task()
        if current is None or current != self._last:
            same = derivative.numel() == self._shape.numel()
            self._act(derivative.detach().reshape(self._shape) if same else None)
            self._last = current  # afterwards: the statistics take backward passes of their own


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

    def __call__(self, derivative: Tensor | None) -> None:
        assert derivative is not None
        selected = self._select(derivative)
        # A selection keeps all that is not zero; anything else adds, drops or scales.
        kept = selected is not None and torch.isclose(
            selected.double().square().sum(),
            derivative.double().square().sum(),
            rtol=1e-3,
            equal_nan=True,
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


def _sources(selected: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """Return the leaves that a tensor was made from, without those that others were made from."""
    by_edge = {_key(get_gradient_edge(leaf)): leaf for leaf in leaves}
    found: list[Tensor] = []
    seen: set[tuple[Node, int]] = set()
    pending = [_key(get_gradient_edge(selected))]
    while pending:
        key = pending.pop()
        if key in seen:
            continue
        seen.add(key)
        if key in by_edge:
            found.append(by_edge[key])
        else:
            pending += [(node, index) for node, index in key[0].next_functions if node is not None]
    return found


def _key(edge: GradientEdge) -> tuple[Node, int]:
    return edge.node, edge.output_nr
