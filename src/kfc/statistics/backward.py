"""One recorded forward pass, and the backward pass from its output to its layers."""

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from kfc._helpers import graph_task, keeps_elements, keeps_graph, view_base
from kfc.curvature.statistics import LayerStatistics, Moment
from kfc.fisher.calls import without_autocast
from kfc.fisher.compiled import outside_of_compiled_graphs
from kfc.schedule import now


class LayerCall(NamedTuple):
    """One call of one layer.

    Attributes:
        layer: the layer's name.
        kept: what the layer's statistics need to know about the inputs.
        shape: the shape of the output.
    """

    layer: str
    statistics: LayerStatistics
    kept: Any
    shape: torch.Size

    def add(self, derivative: Tensor | None, examples: int) -> None:
        """Add the derivative with respect to the call's output to the statistics."""
        if derivative is not None:
            with torch.no_grad(), without_autocast(derivative.device):
                self.statistics.backward(self.kept, derivative.reshape(self.shape), examples)


# A call, and where the derivative with respect to its output arrives. The edge, not the tensor:
# after an in-place ReLU the tensor's derivative is silently another one.
EdgeAndCall = tuple[GradientEdge, LayerCall]


class RecordedPass:
    """The calls of all layers in one forward pass, and the statistics gathered from them.

    Args:
        wanted: the layers to record.
        new_statistics: returns the empty statistics of a layer.
        during_backward: gather derivatives in the user's own backward pass.
        clock_device: the device to wait for when reading the clock.

    Attributes:
        calls: the recorded calls.
        without_gradient: the layers that ran without a graph.
        examples: the number of examples, once the model's output is known.
        seconds: the time spent on layers.
    """

    def __init__(
        self,
        wanted: Collection[str],
        new_statistics: Callable[[str], LayerStatistics],
        *,
        during_backward: bool,
        clock_device: torch.device | None,
    ) -> None:
        self.wanted = wanted
        self.calls: list[EdgeAndCall] = []
        self.without_gradient: set[str] = set()
        self.examples = 0
        self.seconds = 0.0
        self._new_statistics = new_statistics
        self._statistics: dict[str, LayerStatistics] = {}
        self._during_backward = during_backward
        # The calls whose derivatives the user's backward pass brings, by number.
        self._hooked: dict[int, LayerCall] = {}
        self._clock_device = clock_device
        self._split: tuple[list[EdgeAndCall], list[EdgeAndCall]] | None = None
        self._outputs: list[weakref.ref[Tensor]] = []
        self._ignored: int | None = None

    # While the model runs

    def record(
        self, layer: str, inputs: Tensor, output: Any, edge: GradientEdge | None = None
    ) -> None:
        """Add one call of a layer.

        Args:
            edge: where the derivative arrives; by default that of the output as it is now.
        """
        if isinstance(output, Tensor) and output.numel() == 0:
            return  # an empty batch; the model's output will be refused
        if not (isinstance(output, Tensor) and output.requires_grad):
            self.without_gradient.add(layer)
            return
        if layer not in self._statistics:
            self._statistics[layer] = self._new_statistics(layer)
        statistics = self._statistics[layer]
        with self._timed(), torch.no_grad(), without_autocast(output.device):
            kept = statistics.forward(inputs, output)
        edge = edge or output_edge(output)
        call = LayerCall(layer, statistics, kept, output.shape)
        self.calls.append((edge, call))
        self._outputs.append(weakref.ref(output))
        if self._during_backward:
            # The graph must not keep this pass alive, which may keep the graph alive.
            self._hooked[len(self.calls)] = call
            hook = partial(_on_user_backward, weakref.ref(self), len(self.calls), edge.output_nr)
            edge.node.register_prehook(hook)

    def end_forward(self, examples: int, outputs: Iterable[Tensor]) -> None:
        """Record the outputs of the model, and the number of examples, which they determine."""
        self.examples = examples
        self._outputs += [weakref.ref(output) for output in outputs]
        if self._during_backward:
            self.calls.clear()  # the hooks gather the derivatives

    def layers_at(self, edge: GradientEdge) -> set[str]:
        """Return the names of the layers whose output has this gradient edge.

        A tensor that an operation only reshapes, transposes, copies or casts counts as the same.
        """
        by_edge: dict[tuple[Node | None, int], set[str]] = {}
        for own, call in self.calls:
            by_edge.setdefault((own.node, own.output_nr), set()).add(call.layer)
        node: Node | None = edge.node
        number = edge.output_nr
        while node is not None and (node, number) not in by_edge and keeps_elements(node):
            node, number = node.next_functions[0]
        return by_edge.get((node, number), set())

    # Derivatives

    def backward(self, output: GradientEdge, dtype: torch.dtype, derivative: Tensor) -> None:
        """Carry one draw of the derivative from the output to the pre-activations of every call.

        The user's graph stays intact, and no weight gradients are computed. Derivatives are
        processed as they arrive, so that they are not all in memory at once.
        """
        final, passing = self._final_and_passing()
        if not final:  # none of the wanted layers has run
            return
        handles = [
            edge.node.register_prehook(partial(self._on_passing, call, edge.output_nr))
            for edge, call in passing
        ]
        try:
            with self._retained_gradients():
                derivatives = torch.autograd.grad(
                    [output],
                    [edge for edge, _ in final],
                    [derivative.to(dtype)],
                    retain_graph=True,
                    allow_unused=True,
                )
        finally:
            for handle in handles:
                handle.remove()
        for (_, call), at_output in zip(final, derivatives, strict=True):
            call.add(at_output, self.examples)
        self.end_draw()

    @contextmanager
    def _retained_gradients(self) -> Iterator[None]:
        """Restore the gradients of outputs for which the user called ``retain_grad()``.

        Autograd would add to them. Other tensors than outputs of layers or of the model are not
        known.
        """
        alive = [output for output in (each() for each in self._outputs) if output is not None]
        before = [(output, output.grad) for output in alive if output.retains_grad]
        try:
            yield
        finally:
            for output, gradient in before:
                output.grad = gradient

    def end_draw(self) -> None:
        for statistics in self._statistics.values():
            statistics.end_draw()

    def moments(self) -> dict[str, tuple[Moment, ...]]:
        """Return the moments by layer; empty for a layer that no derivative reached."""
        return {layer: s.moments(self.examples) for layer, s in self._statistics.items()}

    def _final_and_passing(self) -> tuple[list[EdgeAndCall], list[EdgeAndCall]]:
        """Return the calls at which the backward pass ends, and those it passes through."""
        if self._split is None:
            passed = nodes_with_descendants([edge.node for edge, _ in self.calls])
            passing = [pair for pair in self.calls if pair[0].node in passed]
            final = [pair for pair in self.calls if pair[0].node not in passed]
            self._split = final, passing
        return self._split

    def _on_passing(
        self, call: LayerCall, output_nr: int, derivatives: tuple[Tensor | None, ...]
    ) -> None:
        call.add(derivatives[output_nr], self.examples)

    def ignore_backward(self) -> None:
        """Gather nothing in the running backward pass, which is not that of a training step."""
        self._ignored = graph_task()

    def gather(self, number: int, derivative: Tensor | None) -> None:
        """Gather the derivative of a call in the user's own backward pass."""
        call = self._hooked.get(number)
        if self._ignored is not None and self._ignored == graph_task():
            return
        if self.examples and derivative is not None and call is not None:
            with self._timed():
                call.add(derivative, self.examples)
            if not keeps_graph():  # autograd frees its buffers, too
                del self._hooked[number]

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = now(self._clock_device)
        yield
        self.seconds += now(self._clock_device) - start


@outside_of_compiled_graphs(callees=True)
def _on_user_backward(
    owner: Callable[[], RecordedPass | None],
    number: int,
    output_nr: int,
    derivatives: tuple[Tensor | None, ...],
) -> None:
    """Report a derivative to a recorded pass, unless the pass is forgotten."""
    recorded = owner()
    if recorded is not None:
        recorded.gather(number, derivatives[output_nr])


def nodes_with_descendants(nodes: Collection[Node]) -> set[Node]:
    """Return the nodes from which, towards the inputs, another of the nodes can be reached."""
    wanted = set(nodes)
    reaches: dict[Node, bool] = {}
    for root in nodes:
        # Depth first: a node is settled when all its parents are.
        pending = [root]
        while pending:
            node = pending[-1]
            parents = [parent for parent, _ in node.next_functions if parent is not None]
            if node not in reaches:
                reaches[node] = False
                pending += [parent for parent in parents if parent not in reaches]
                continue
            pending.pop()
            reaches[node] = any(parent in wanted or reaches[parent] for parent in parents)
    return {node for node in wanted if reaches[node]}


def output_edge(output: Tensor) -> GradientEdge:
    """Return where the derivative with respect to a layer's output arrives."""
    return get_gradient_edge(viewed(output))


def viewed(output: Tensor) -> Tensor:
    """Return the tensor that an output is a view of, if it has the same elements in this order.

    Otherwise return the output. In-place operations replace the edge of a view (as the output of a
    linear layer with several leading dimensions is), but not that of the tensor it views.
    """
    base = view_base(output)
    if base is not None and base.requires_grad and base.numel() == output.numel():
        same = base.is_contiguous() and output.is_contiguous()
        if same and base.storage_offset() == output.storage_offset():
            return base
    return output
