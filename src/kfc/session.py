"""One forward pass that gives statistics: its layers' calls, and the way back to them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from kfc.budget import now
from kfc.layers import Moment, Statistics


@dataclass(frozen=True)
class Call:
    """One call of one layer.

    Attributes:
        edge: where the derivative with respect to the call's output arrives. The edge, not the
            tensor: after an in-place ReLU the tensor's derivative is silently another one.
        kept: what the layer's statistics keep of the inputs until then.
        shape: of the output.
    """

    layer: str
    edge: GradientEdge
    kept: Any
    shape: torch.Size


@dataclass
class Session:
    """What one forward pass leaves behind, and the statistics it is turned into.

    Attributes:
        seconds: what the hooks on layers took.
    """

    wanted: Collection[str]
    statistics: dict[str, Statistics] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    without_gradient: set[str] = field(default_factory=set)
    examples: int = 0
    seconds: float = 0.0
    clock_device: torch.device | None = None
    _split: tuple[list[Call], list[Call]] | None = None

    def backward(self, output: Tensor, derivative: Tensor) -> None:
        """One draw: carry a derivative from the output to every call's pre-activations.

        The user's graph stays intact, and no weight gradients are computed. Derivatives that are
        only passing are taken up as they pass, so that they need not all be held until the end.
        """
        final, passing = self._final_and_passing()
        handles = [
            call.edge.node.register_prehook(partial(self._take_passing, call)) for call in passing
        ]
        try:
            derivatives = torch.autograd.grad(
                output,
                [call.edge for call in final],
                derivative.to(output.dtype),
                retain_graph=True,
                allow_unused=True,
            )
        finally:
            for handle in handles:
                handle.remove()
        for call, at_output in zip(final, derivatives, strict=True):
            self._take(call, at_output)
        self.end_draw()

    def _final_and_passing(self) -> tuple[list[Call], list[Call]]:
        """The calls at which the way back ends, and those that have another one behind them."""
        if self._split is None:
            behind = nodes_with_one_behind([call.edge.node for call in self.calls])
            passing = [call for call in self.calls if call.edge.node in behind]
            final = [call for call in self.calls if call.edge.node not in behind]
            self._split = final, passing
        return self._split

    def _take_passing(self, call: Call, derivatives: tuple[Tensor | None, ...]) -> None:
        self._take(call, derivatives[call.edge.output_nr])

    def _take(self, call: Call, derivative: Tensor | None) -> None:
        if derivative is not None:
            take_derivative(self, self.statistics[call.layer], call.kept, call.shape, derivative)

    @contextmanager
    def timed(self) -> Iterator[None]:
        start = now(self.clock_device)
        yield
        self.seconds += now(self.clock_device) - start

    def end_draw(self) -> None:
        for statistics in self.statistics.values():
            statistics.end_draw()

    def shares_rows(self) -> bool:
        """Whether a layer ran on rows that do not belong to one example each."""
        return any(call.shape[0] % self.examples for call in self.calls)

    def moments(self) -> dict[str, tuple[Moment, ...]]:
        """By layer; empty for a layer that no derivative reached."""
        return {layer: s.moments(self.examples) for layer, s in self.statistics.items()}


def nodes_with_one_behind(nodes: Collection[Node]) -> set[Node]:
    """Those of the graph's nodes from which, towards the inputs, another one of them is reached."""
    wanted = set(nodes)
    reaches: dict[Node, bool] = {}
    for root in nodes:
        # Depth first: a node is settled when all that lie behind it are.
        pending = [root]
        while pending:
            node = pending[-1]
            behind = [parent for parent, _ in node.next_functions if parent is not None]
            if node not in reaches:
                reaches[node] = False
                pending += [parent for parent in behind if parent not in reaches]
                continue
            pending.pop()
            reaches[node] = any(parent in wanted or reaches[parent] for parent in behind)
    return {node for node in wanted if reaches[node]}


def output_edge(output: Tensor) -> GradientEdge:
    """Where the derivative with respect to a layer's output arrives, come what may after it.

    Of a view of all of another tensor (as a linear layer's output for several leading dimensions)
    that of the other tensor: an operation in place replaces the view's own.
    """
    base = output._base
    if base is not None and base.requires_grad and base.numel() == output.numel():
        same = base.is_contiguous() and output.is_contiguous()
        if same and base.storage_offset() == output.storage_offset():
            return get_gradient_edge(base)
    return get_gradient_edge(output)


def take_derivative(
    session: Session, statistics: Statistics, kept: Any, shape: torch.Size, value: Tensor
) -> None:
    with torch.no_grad(), without_autocast(value.device):
        statistics.backward(kept, value.reshape(shape), session.examples)


def take_in_user_backward(
    session: Session,
    statistics: Statistics,
    kept: list[Any],
    shape: torch.Size,
    output_nr: int,
    derivatives: tuple[Tensor | None, ...],
) -> None:
    """
    Args:
        kept: what the statistics keep of the inputs, in a list that is emptied when autograd lets
            go of them too: the graph lives for as long as the user holds the loss.
    """
    value = derivatives[output_nr]
    if session.examples and value is not None and kept:
        with session.timed():
            take_derivative(session, statistics, kept[0], shape, value)
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            kept.clear()


def without_autocast(device: torch.device) -> torch.autocast:
    """Statistics are full-precision mathematics: inside autocast their products would not be."""
    return torch.autocast(device.type, enabled=False)
