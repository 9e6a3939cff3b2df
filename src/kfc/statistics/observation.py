"""What is known of one forward pass: its outputs, and what its backward pass brings."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Protocol

from torch import Size, Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from kfc.fisher.calls import ModelCall
from kfc.statistics.backward import RecordedPass, viewed


class Observation:
    """One forward pass in training mode, and the derivatives that its backward pass brings.

    Attributes:
        call: the forward pass.
        outputs: the outputs by name, as they were before the loss was computed.
        derivatives: the derivatives of the loss in the outputs, one per backward pass; ``None`` if
            unknown.
        was_dropped: whether statistics were wanted, but the graph was released.
        is_complete: whether a backward pass came to its end.
        recorded: the calls of the layers; ``None`` if they are not needed, or no longer.
        edges: where the derivatives arrive, and the shape that they have there.
        output_layers: the recorded layers that compute each output.
        elements: the number of elements of the outputs of layers, if the pass is to be replayed.
        before: what was before its last backward pass.
        task: a number of that backward pass.
        has_gradients: whether that backward pass adds to the gradients of parameters.
    """

    def __init__(
        self,
        call: ModelCall,
        outputs: Mapping[str, Tensor],
        recorded: RecordedPass | None,
        elements: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self.call = call
        self.outputs = {name: tensor.detach().clone() for name, tensor in outputs.items()}
        self.derivatives: dict[str, list[Tensor | None]] = {}
        self.is_complete = self.was_dropped = False
        self.elements = elements
        self.before: Any = None
        self.task: int | None = None
        self.has_gradients = False
        self._arrivals: list[weakref.ref[Arrival]] = []
        self.recorded = recorded
        self.edges: dict[str, tuple[GradientEdge, Size]] = {}
        self.output_layers: dict[str, set[str]] = {}
        if recorded is not None:
            whole = {name: viewed(t) for name, t in outputs.items() if t.requires_grad}
            self.edges = {name: (get_gradient_edge(t), t.shape) for name, t in whole.items()}
            self.output_layers = {
                n: recorded.layers_at(edge) for n, (edge, _) in self.edges.items()
            }

    @property
    def examples(self) -> int:
        return len(next(iter(self.outputs.values())))

    @property
    def is_abandoned(self) -> bool:
        """Whether no backward pass has used the pass, and none can: its graph has been freed."""
        return not self.derivatives and all(arrival() is None for arrival in self._arrivals)

    def new_arrival(self, listener: Callable[[], Listener | None], name: str) -> Arrival:
        """Return what reports the derivatives in an output, to be kept by the graph alone."""
        arrival = Arrival(listener, weakref.ref(self), name)
        self._arrivals.append(weakref.ref(arrival))
        return arrival

    def add_derivative(self, name: str, derivative: Tensor | None) -> None:
        self.derivatives.setdefault(name, []).append(derivative)

    def begin_backward(self, before: Any, task: int | None) -> None:
        """Record what was before a backward pass, and a number of it, if it has begun."""
        if self.before is None or task != self.task:
            self.before, self.task = before, task

    def note_gradients(self) -> None:
        """Record that a backward pass adds to the gradients of parameters."""
        self.has_gradients = True

    def ignore_backward(self) -> None:
        """Gather nothing in the running backward pass, which is not that of a training step."""
        if self.recorded is not None:
            self.recorded.ignore_backward()

    def fail(self) -> None:
        """Forget a backward pass that failed; no statistics can be gathered from this pass."""
        self.derivatives = {}
        self.before = None
        if self.recorded is not None:
            self.drop_graph()

    def complete(self) -> None:
        """Record that a backward pass came to its end."""
        self.is_complete = True

    def forget_graph(self) -> None:
        """Release the graph; no statistics can be gathered from this pass any more."""
        self.recorded = None
        self.edges = {}
        self.was_dropped = False

    def drop_graph(self) -> None:
        """Release the graph although statistics were wanted."""
        self.forget_graph()
        self.was_dropped = True


def count_examples(observations: Iterable[Observation]) -> int:
    return sum(observation.examples for observation in observations)


def share_of_dropped(observations: Collection[Observation]) -> float:
    """Return the examples of all passes over those of passes whose graph was not dropped.

    Sums over the examples have to be multiplied by it; means do not.
    """
    kept = count_examples(each for each in observations if not each.was_dropped)
    return count_examples(observations) / kept if kept else 1.0


class Listener(Protocol):
    """What derivatives are reported to."""

    def on_derivative(self, observation: Observation, name: str, derivative: Tensor | None) -> None:
        """Process the derivative of the loss in an output of a pass."""


class Arrival:
    """Reports a derivative to the listener, unless the pass is forgotten.

    It must not keep the pass alive: the graph, which holds it, would never be freed.
    """

    def __init__(
        self,
        listener: Callable[[], Listener | None],
        observation: Callable[[], Observation | None],
        name: str,
    ) -> None:
        self._listener = listener
        self._observation = observation
        self._name = name

    def __call__(self, derivative: Tensor | None) -> None:
        listener, observation = self._listener(), self._observation()
        if listener is not None and observation is not None:
            listener.on_derivative(observation, self._name, derivative)
