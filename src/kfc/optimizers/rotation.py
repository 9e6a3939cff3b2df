"""Bases of the outputs of layers, in which adaptive moments are kept.

For whitened gradients G' (groups, I, n) of a layer, U are the eigenvectors of the moving average
of G' G'ᵀ (groups, I, I). In the rotated gradient Uᵀ G', different outputs are uncorrelated, so that
the second moments of single entries describe it better. This is what SOAP (Vyas et al. 2024) does
on the side of the outputs.
"""

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kfc._helpers import moved
from kfc.curvature.kronecker import eigendecompose
from kfc.layers import MatrixLayer, Plan
from kfc.optimizers.adam import kept_share

# The parts of a weight's state: the moving average of G' G'ᵀ, and U.
GRAM, BASIS = "gram", "basis"
# The weight of the old value in the moving average.
GRAM_DECAY = 0.95

States = MutableMapping[Tensor, dict[str, Any]]


class _Part(NamedTuple):
    """A parameter of a layer that is rotated."""

    layer: MatrixLayer
    role: str
    name: str


class OutputRotation:
    """Rotates vectors, by parameter name, to the bases of their layers' outputs.

    Bases belong to the layers whose weight is trained and has at most ``max_size`` rows (in each
    group). They are kept in the state of the weight.

    Args:
        period: the number of steps between refreshes of the bases.
    """

    def __init__(self, plan: Plan, period: int, max_size: int) -> None:
        self._period = period
        self._max_size = max_size
        self._parts_by_name: dict[str, _Part] = {}
        for name, (owner, role) in plan.layer_of.items():
            layer = plan.layers[owner]
            if isinstance(layer, MatrixLayer) and layer.factor_sizes()[1] <= max_size:
                self._parts_by_name[name] = _Part(layer, role, name)

    def update_(
        self, gradients: Mapping[str, Tensor], states: States, step: int, bad: Tensor | None
    ) -> None:
        """Average in whitened gradients, and refresh the bases if this is due at the step.

        Args:
            bad: a boolean scalar; if true, nothing changes; the gradients are then zero.
        """
        products: dict[MatrixLayer, Tensor] = {}
        for part in self._parts(gradients):
            matrix = part.layer.to_matrix({part.role: gradients[part.name]})
            product = matrix @ matrix.mT
            before = products.get(part.layer)
            products[part.layer] = product if before is None else before + product
        for layer, product in products.items():
            state = states[layer.weight]
            here = None if bad is None else moved(bad, product.device)
            gram = state.get(GRAM, torch.zeros_like(product)).to(product)
            gram = gram * kept_share(GRAM_DECAY, [gram], here) + (1 - GRAM_DECAY) * product
            state[GRAM] = gram
            if BASIS not in state:
                state[BASIS] = _eigenvectors(gram)
            elif step % self._period == 0:
                state[BASIS] = _refreshed(state[BASIS].to(gram), gram, here)

    def apply_(self, vectors: Mapping[str, Tensor], states: States) -> None:
        """Replace vectors V by Uᵀ V, in place."""
        for part in self._parts(vectors):
            self._multiply_(part, vectors[part.name], states[part.layer.weight][BASIS].mT)

    def undo_(self, vectors: Mapping[str, Tensor], states: States) -> None:
        """Replace vectors V by U V, in place."""
        for part in self._parts(vectors):
            self._multiply_(part, vectors[part.name], states[part.layer.weight][BASIS])

    def describe(self) -> str:
        """Return a sentence about what is rotated."""
        return (
            "second moments of whitened gradients: in the eigenbasis of the layer's outputs, "
            f"refreshed every {self._period} steps, for layers with at most {self._max_size}"
        )

    @staticmethod
    def state_shape(plan: Plan, name: str) -> list[int]:
        """Return the shape of the basis of a weight, given its parameter's name."""
        layer = plan.layers[plan.layer_of[name][0]]
        assert isinstance(layer, MatrixLayer)
        rows = layer.factor_sizes()[1]
        return [layer.groups, rows, rows]

    def _parts(self, vectors: Mapping[str, Tensor]) -> Iterator[_Part]:
        """Yield the parameters that are rotated, of those given."""
        for name in vectors:
            part = self._parts_by_name.get(name)
            if part is not None and part.layer.weight.requires_grad:
                yield part

    @staticmethod
    def _multiply_(part: _Part, vector: Tensor, left: Tensor) -> None:
        matrix = left.to(vector) @ part.layer.to_matrix({part.role: vector})
        is_weight = part.role == "weight"
        rotated = part.layer.weight_from_matrix(matrix) if is_weight else matrix
        vector.copy_(rotated.reshape(vector.shape))


def _eigenvectors(gram: Tensor) -> Tensor:
    """Return the eigenvectors, those of the largest eigenvalues first.

    In this order, orthogonal iteration leaves to the last columns what the first have not taken;
    in the other, it would begin with directions that are nothing but rounding errors.
    """
    _, basis = eigendecompose(gram)
    assert basis is not None
    return basis.flip(-1)


def _refreshed(basis: Tensor, gram: Tensor, bad: Tensor | None) -> Tensor:
    """Return the basis after one step of orthogonal iteration towards the eigenvectors."""
    new: Tensor = torch.linalg.qr(gram @ basis)[0]
    return new if bad is None else torch.where(bad, basis, new)
