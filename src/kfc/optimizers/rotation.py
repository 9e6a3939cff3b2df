"""Bases of the outputs of layers, in which adaptive moments are kept.

For whitened gradients G' (groups, I, n) of a layer, U are the eigenvectors of the moving average
of G' G'ᵀ (groups, I, I). In the rotated gradient Uᵀ G', different outputs are uncorrelated, so that
the second moments of single entries describe it better. This is what SOAP (Vyas et al. 2024) does
on the side of the outputs.

A layer that computes independent outputs of the model is not rotated. The Fisher matrix in these
outputs is already diagonal, whereas the eigenbasis of G' G'ᵀ would mix outputs whose errors are
correlated, such as neighbouring pixels.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from kfc._helpers import moved, require_keys
from kfc.curvature.factor import eigendecompose
from kfc.curvature.saved import require_names
from kfc.distributed.reducer import Reducer
from kfc.fisher.losses import Losses
from kfc.layers import MatrixLayer, Plan

# The parts of a weight's state: the moving average of G' G'ᵀ, and U.
GRAM, BASIS = "gram", "basis"
# The weight of the old value in the moving average, to the power of the steps since then.
GRAM_DECAY = 0.95

Vector = dict[str, Tensor]
States = Mapping[str, dict[str, Any]]


class OutputRotation:
    """Rotates matrices (groups, I, n), by the name of a layer's weight, to bases of the outputs.

    Bases belong to layers with at most ``max_size`` rows (in each group), except layers of
    independent outputs. They are kept in the state of the weight. Other vectors stay as they are.

    Args:
        period: the number of steps between refreshes of the bases.
    """

    def __init__(self, plan: Plan, period: int, max_size: int) -> None:
        self._period = period
        self._max_size = max_size
        layers = {n: plan.layers[layer] for n, (layer, r) in plan.layer_of.items() if r == "weight"}
        self._names = {
            name
            for name, layer in layers.items()
            if isinstance(layer, MatrixLayer) and layer.factor_sizes()[1] <= max_size
        }
        self._layer_of = {name: plan.layer_of[name][0] for name in sorted(self._names)}
        # The weights of layers of independent outputs; None until they are known.
        self._excluded: set[str] | None = None
        self._forgotten: frozenset[str] = frozenset()

    def exclude_(self, losses: Losses, reducer: Reducer) -> None:
        """Exclude the layers of independent outputs, as soon as a rank knows them.

        The ranks decide this together and once, because their losses may look different: one that
        has no targets in the first step, for instance, cannot tell its likelihood.
        """
        if self._excluded is not None or not self._names:
            return
        own = losses.independent_layers()
        flags = [layer in (own or ()) for layer in self._layer_of.values()]
        numbers = reducer.gather([float(flag) for flag in (own is not None, *flags)])
        known = [found for is_known, *found in numbers if is_known]
        if known:
            columns = zip(*known, strict=True)
            self._excluded = {n for n, c in zip(self._layer_of, columns, strict=True) if any(c)}

    def forget_(self, states: States, names: Collection[str]) -> None:
        """Do not rotate the layers of these parameters, which have lost their curvature."""
        for name in names:
            for part in (GRAM, BASIS):
                states.get(name, {}).pop(part, None)
        self._forgotten = frozenset(names)

    @property
    def _interval(self) -> int:
        """The number of steps between updates of the moving average, one or two per refresh."""
        return self._period if self._period % 2 else self._period // 2

    def update_(self, gradients: Vector, states: States, step: int, bad: Tensor | None) -> None:
        """Average in whitened gradients and refresh the bases, if this is due at the step.

        Args:
            bad: a boolean scalar; if true, nothing changes. ``None``: the step is known to be good.
        """
        if self._excluded is None:
            return
        for name in (self._names & gradients.keys()) - self._excluded - self._forgotten:
            state, matrix = states[name], gradients[name]
            if BASIS in state and step % self._interval:
                continue
            product, decay = matrix @ matrix.mT, GRAM_DECAY**self._interval
            here = None if bad is None else moved(bad, product.device)
            old = state.get(GRAM, torch.zeros_like(product)).to(product)
            new = decay * old + (1 - decay) * product
            state[GRAM] = gram = new if here is None else torch.where(here, old, new)
            if BASIS not in state:
                state[BASIS] = _eigenvectors(gram)
            elif step % self._period == 0:
                _refresh_(state, here)

    def rotated(self, vectors: Vector, states: States) -> Vector:
        """Return Uᵀ V for vectors V."""
        return self._times(vectors, {name: u.mT for name, u in self._bases(vectors, states)})

    def rotated_back(self, vectors: Vector, states: States) -> Vector:
        """Return U V for vectors V."""
        return self._times(vectors, dict(self._bases(vectors, states)))

    def _bases(self, vectors: Vector, states: States) -> Iterator[tuple[str, Tensor]]:
        for name in self._names & vectors.keys():
            if BASIS in states[name]:
                yield name, states[name][BASIS]

    @staticmethod
    def _times(vectors: Vector, bases: Vector) -> Vector:
        products = {n: torch.bmm(basis.to(vectors[n]), vectors[n]) for n, basis in bases.items()}
        return {**vectors, **products}

    def describe(self) -> str:
        """Return a sentence about what is rotated."""
        layers = sorted(self._layer_of[name] for name in self._excluded or ())
        excluded = ": " + ", ".join(layers) if layers else ""
        return (
            "second moments of whitened gradients: in the eigenbasis of the layer's outputs, "
            f"refreshed every {self._period} steps, for layers with at most {self._max_size} "
            f"outputs, except layers of independent model outputs{excluded}"
        )

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        return {"excluded": None if self._excluded is None else sorted(self._excluded)}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` unless the state is one that ``state_dict()`` returns."""
        require_keys("state of the rotation", state, self.state_dict())
        if state["excluded"] is not None:
            what = "the weights that the state excludes from the rotation"
            require_names(what, state["excluded"], sorted(self._names))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        excluded = state["excluded"]
        self._excluded = None if excluded is None else set(excluded)


def _eigenvectors(gram: Tensor) -> Tensor:
    """Return the eigenvectors, those of the largest eigenvalues first.

    Orthogonal iteration orthogonalises later columns against earlier ones, so the largest
    eigenvectors come first; in ascending order it would start from rounding errors.
    """
    _, basis = eigendecompose(gram)
    assert basis is not None
    return basis.flip(-1)


def _refresh_(state: dict[str, Any], bad: Tensor | None) -> None:
    """Make one step of orthogonal iteration towards the eigenvectors."""
    gram = state[GRAM]
    old = state[BASIS].to(gram)
    new: Tensor = torch.linalg.qr(gram @ old)[0]
    state[BASIS] = new if bad is None else torch.where(bad, old, new)
