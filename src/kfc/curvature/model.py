"""The approximate Fisher matrix of a model: one block per layer."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from kfc._helpers import inner_product, raise_differences, require_choice, require_keys, shown
from kfc.curvature.damping import Damping
from kfc.curvature.factor import trace
from kfc.curvature.kronecker import INVERSES, Inverse
from kfc.curvature.layer import Block, Columns, LayerCurvature, LayerState
from kfc.curvature.options import Approximation
from kfc.curvature.saved import check_kinds, check_values
from kfc.curvature.statistics import BatchStatistics
from kfc.curvature.whitening import WhiteningCurvature
from kfc.distributed.reducer import Reducer
from kfc.layers import Plan


class ModelCurvature:
    """The blocks of all layers of a model: running averages, inverses, natural gradients.

    Attributes:
        layers: the ``LayerCurvature`` of every layer, by name.
    """

    def __init__(self, plan: Plan, options: Approximation, reducer: Reducer) -> None:
        self.layers = {name: options.for_layer(layer) for name, layer in plan.layers.items()}
        self.options = options
        self._decay = float(options.factor_decay)
        self._plan = plan
        self._reducer = reducer

    def restrict(self, plan: Plan) -> None:
        """Use the blocks of a plan with a part of the layers; the others have no statistics."""
        for name in self.layers.keys() - plan.layers.keys():
            self.layers[name].restore(LayerState())
        self._plan = plan

    # Statistics

    def is_empty(self) -> bool:
        return all(layer.state.running is None for layer in self.layers.values())

    def trained_layers(self) -> list[str]:
        return [name for name in self._plan.layers if self.layers[name].trained_roles()]

    def layers_without_statistics(self) -> list[str]:
        return [name for name in self._plan.layers if self.layers[name].lacks_statistics()]

    def update_(self, batch: BatchStatistics, *, replace: bool = False) -> None:
        """Average the statistics of a batch into the running averages (eqn 33).

        The averages take the memory of the batch, which cannot be used again.

        Args:
            replace: give the old averages no weight.
        """
        for name, moments in batch.moments.items():
            means = tuple(moment.to_mean_() for moment in moments)
            decay, is_shared = 0.0 if replace else self._decay, self._reducer.is_everywhere(name)
            self.layers[name].average_in_(means, decay, may_round=is_shared)

    def replace_(self, batch: BatchStatistics) -> None:
        """Replace all that is known about the layers by the statistics of a batch."""
        for name in batch.moments:
            self.layers[name].restore(LayerState())
        self.update_(batch)

    def snapshot(self) -> dict[str, LayerState]:
        """Return the state of every layer, to be passed to ``restore()``."""
        return {name: layer.state for name, layer in self.layers.items()}

    def restore(self, states: Mapping[str, LayerState]) -> None:
        """Return the named layers to earlier states."""
        for name, state in states.items():
            self.layers[name].restore(state)

    # Inverses

    def lacks_inverses(self) -> bool:
        return any(layer.lacks_inverse() for layer in self.layers.values())

    def _known(self) -> dict[str, LayerCurvature]:
        """Return the layers with running averages for the parameters trained now."""
        return {
            name: layer
            for name, layer in self.layers.items()
            if layer.state.running is not None and layer.is_current()
        }

    def refresh_inverses(self, damping: Callable[[str], Damping], *, only_missing: bool) -> None:
        """Invert every known block, damped by δ of its layer, or only those without an inverse."""
        blocks = self.blocks(damping, only_missing=only_missing)
        previous = {name: self.layers[name].state.inverse for name in blocks}
        self.adopt_inverses(blocks, self.invert(blocks, previous))

    def blocks(
        self, damping: Callable[[str], Damping], *, only_missing: bool = False
    ) -> dict[str, Block]:
        """Return every known block with δ of its layer, or only those without an inverse.

        Averages that are not finite are dropped; the layer keeps its last inverse until new
        statistics arrive.
        """
        due = {
            name: layer
            for name, layer in self._known().items()
            if layer.state.inverse is None or not only_missing
        }
        if not due:
            return {}
        sums = [
            torch.stack([trace(r).sum() for r in layer.state.running or ()]).sum()
            for layer in due.values()
        ]
        home = sums[0].device
        finite = torch.stack([torch.isfinite(s).to(home) for s in sums]).tolist()
        for name, good in zip(list(due), finite, strict=True):
            if not good:
                self._drop_averages(name)
                del due[name]
        return {name: layer.block(damping(name)) for name, layer in due.items()}

    def _drop_averages(self, name: str) -> None:
        layer = self.layers[name]
        if layer.state.inverse is None:
            raise RuntimeError(
                f"the factors of layer {name!r} are not finite, and there is no earlier inverse; "
                "check the checkpoint they came from, or call estimate_factors"
            )
        layer.restore(layer.state._replace(running=None))
        warnings.warn(
            f"the factors of layer {name!r} are not finite and were dropped; its last inverse is "
            "used until new statistics arrive",
            stacklevel=2,
        )

    def invert(
        self,
        blocks: Mapping[str, Block],
        previous: Mapping[str, Inverse | None] = MappingProxyType({}),
    ) -> dict[str, Inverse]:
        """Return the inverses that are computed here; any thread may call this.

        Args:
            previous: earlier inverses of the blocks, to begin with.
        """

        def inverted(name: str) -> Inverse:
            running, damping, _ = blocks[name]
            return self.layers[name].invert(running, damping, previous.get(name))

        return self._reducer.compute(blocks, inverted)

    def adopt_inverses(self, blocks: Mapping[str, Block], own: Mapping[str, Inverse]) -> None:
        """Use the inverses of blocks whose trained parameters are still the same.

        Args:
            own: the inverses that were computed here.
        """
        current = [
            name
            for name, block in blocks.items()
            if self.layers[name].is_current() and self.layers[name].state.roles == block.roles
        ]
        for name, inverse in self._reducer.distribute(current, own).items():
            self.layers[name].adopt_inverse(inverse, blocks[name].damping)

    def limit_columns(self, columns: Mapping[str, Columns | None]) -> None:
        """Limit the ranks of the inverses of the named layers' factors; 0 for an exact inverse."""
        for name, own in columns.items():
            self.layers[name].limit_columns(own)

    def redamped(self, damping: float) -> dict[str, LayerState]:
        """Return the states of all layers with inverses for another damping of all parameters.

        Call it just after ``refresh_inverses()`` of all layers.
        """
        known = {n: layer for n, layer in self._known().items() if layer.state.inverse is not None}
        uniform = Damping.uniform(damping)

        def redamp(name: str) -> Inverse:
            return known[name].redamped(uniform)

        costly = [n for n, layer in known.items() if not layer.inverse_class.redamps_cheaply]
        found = {name: redamp(name) for name in known if name not in costly}
        found |= self._reducer.distribute(costly, self._reducer.compute(costly, redamp))
        return {
            name: layer.state._replace(inverse=found[name], damping=uniform)
            for name, layer in known.items()
        }

    # Natural gradients

    def solve_(
        self, vectors: dict[str, Tensor], diagonals: Mapping[str, Tensor] = MappingProxyType({})
    ) -> dict[str, Tensor]:
        """Replace vectors v in a dict by F̂_damped⁻¹ v (eqn 11) in new tensors, layer by layer.

        Vectors of parameters without a block are divided by their diagonal, or replaced by copies.

        Args:
            vectors: by parameter name.
            diagonals: what stands in for the blocks of parameters without one, by name.

        Returns:
            vᵀ F̂_damped⁻¹ v, summed over the entries of each parameter, by its name.
        """
        products: dict[str, Tensor] = {}
        for natural in self._solutions(vectors):
            products |= {name: inner_product(vectors[name], v) for name, v in natural.items()}
            vectors |= natural
        for name in vectors.keys() - products.keys():
            own = vectors[name]
            vectors[name] = own / diagonals[name] if name in diagonals else own.clone()
            products[name] = inner_product(own, vectors[name])
        return products

    def whiten(self, matrices: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return V Rᵀ for matrices V (groups, I, n), by layer name; see ``WhiteningRoot``."""
        found = ((layer, self._whitening(layer).whiten(v)) for layer, v in matrices.items())
        return self._completed(found)

    def unwhiten(self, matrices: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return V R for matrices V (groups, I, n), by layer name; see ``WhiteningRoot``."""
        found = ((layer, self._whitening(layer).unwhiten(v)) for layer, v in matrices.items())
        return self._completed(found)

    def _completed(self, matrices: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        result: dict[str, Tensor] = {}
        for found in self._reducer.completed((layer, {layer: v}) for layer, v in matrices):
            result |= found
        return result

    def _whitening(self, layer: str) -> WhiteningCurvature:
        curvature = self._inverted(layer)
        assert isinstance(curvature, WhiteningCurvature)
        return curvature

    def _solutions(self, vectors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """Yield F̂_damped⁻¹ v by parameter name, one layer at a time."""
        by_layer: dict[str, dict[str, str]] = {}
        for name in vectors:
            if name in self._plan.layer_of:
                layer, role = self._plan.layer_of[name]
                by_layer.setdefault(layer, {})[role] = name
        found = ((layer, self._solve_layer(layer, by_layer[layer], vectors)) for layer in by_layer)
        return self._reducer.completed(found)

    def _solve_layer(
        self, layer: str, names: Mapping[str, str], vectors: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        natural = self._inverted(layer).solve({role: vectors[n] for role, n in names.items()})
        return {name: _laid_out(natural[role], vectors[name]) for role, name in names.items()}

    def _inverted(self, layer: str) -> LayerCurvature:
        """Return the curvature of a layer, which must have an inverse that can be used now."""
        curvature = self.layers[layer]
        if curvature.state.inverse is None or not curvature.is_current():
            raise RuntimeError(f"layer {layer!r} has a gradient, but no statistics")
        return curvature

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return copies of all tensors, numbers and strings of the state."""
        return {
            "approximation": self.options.name,
            "inverse_kind": self.options.inverse_kind,
            "layers": {
                # Inverses that are not saved are computed again after loading.
                name: layer.state_dict(with_inverse=self._reducer.is_everywhere(name))
                for name, layer in self.layers.items()
            },
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ``ValueError``, listing the differences, if the state is of another model."""
        require_keys("curvature state", state, ("approximation", "inverse_kind", "layers"))
        saved_with = state["approximation"]
        if not isinstance(saved_with, str) or saved_with != self.options.name:
            raise ValueError(
                f"the state dict was saved with curvature={shown(saved_with)}, not "
                f"{self.options.name!r}, and their statistics differ"
            )
        kinds = (*INVERSES, self.options.inverse_kind)
        require_choice("the curvature state's inverse_kind", state["inverse_kind"], kinds)
        require_keys("curvature state's layers", state["layers"], ())
        for name, layer in self.layers.items():
            if name in state["layers"]:
                check_kinds(name, layer, state["layers"][name])
        saved: dict[str, object] = dict.fromkeys(state["layers"])
        expected: dict[str, object] = dict.fromkeys(self.layers)
        for name, entry in self._loadable(state).items():
            if name in self.layers:
                difference = self.layers[name].shapes_differ(entry)
                if difference is not None:
                    saved[name], expected[name] = difference
        raise_differences("layers", saved, expected)
        for name, entry in self._loadable(state).items():
            check_values(name, self.layers[name], entry)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that ``check_state()`` has accepted."""
        for name, entry in self._loadable(state).items():
            self.layers[name].load_state_dict(entry)

    def _loadable(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the saved layers, without their inverses if these are of another kind."""
        layers = dict(state["layers"])
        if state["inverse_kind"] != self.options.inverse_kind:
            for name in self.layers.keys() & layers.keys():
                saved, own = layers[name], self.layers[name].inverse_shapes()
                if saved["inverse"].keys() != own.keys():
                    layers[name] = {**saved, "inverse": {}}
        return layers


def _laid_out(values: Tensor, like: Tensor) -> Tensor:
    """Return values with the dtype and strides of another tensor of their shape."""
    if values.dtype == like.dtype and values.stride() == like.stride():
        return values
    if values.dtype != like.dtype or _strides(values) != _strides(like):
        return torch.empty_like(like).copy_(values)
    return values.as_strided_(*_layout(like))


def _strides(tensor: Tensor) -> list[int]:
    """Return the strides of the dimensions that matter."""
    return [s for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1]


def _layout(tensor: Tensor) -> tuple[torch.Size, tuple[int, ...]]:
    return tensor.shape, tensor.stride()
