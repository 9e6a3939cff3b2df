"""The Fisher blocks of all layers: their running averages, inverses and natural gradients."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kfc.checks import raise_differences, require_choice, require_keys
from kfc.distributed.inverter import Inverter, RemoteInverse
from kfc.kronecker import INVERSES, trace
from kfc.layers import Handler, Moment, Plan, Statistics
from kfc.layers.base import Inverse


@dataclass
class LayerCurvature:
    """What is known of one layer's block.

    Attributes:
        roles: the parameters that were trained when ``running`` was gathered.
        running: the moving averages of its statistics.
        inverse: of the block damped by ``damping``; older than ``running`` unless just renewed,
            but for what statistics measured for the inverse itself.
    """

    roles: tuple[str, ...] = ()
    running: tuple[Tensor, ...] | None = None
    inverse: Inverse | None = None
    damping: float = math.nan


class LayerInverse(NamedTuple):
    """An inverse, and of which block: its damping, and the parameters that it is of."""

    inverse: Inverse
    damping: float
    roles: tuple[str, ...]


class Block(NamedTuple):
    """What a layer's inverse is made of.

    Attributes:
        running: the averages of its statistics.
        roles: the parameters that they are of.
    """

    running: tuple[Tensor, ...]
    damping: float
    roles: tuple[str, ...]


class Curvature:
    """One :class:`LayerCurvature` per handler of a plan, and the batch statistics on their way in.

    Args:
        inverter: who computes inverses, and of which kind.
    """

    def __init__(self, plan: Plan, inverter: Inverter) -> None:
        self.handlers = plan.handlers
        self.layer_of = plan.layer_of
        self.structure_name = plan.curvature
        self.inverter = inverter
        self.inverse_kind = inverter.kind
        self.layers = {name: LayerCurvature() for name in plan.handlers}
        self.pending: dict[str, tuple[Moment, ...]] = {}

    # Statistics

    def statistics_of(self, name: str, *, afresh: bool) -> Statistics:
        """A new, empty gathering for a layer, whose inverse may have a say in it.

        Args:
            afresh: the inverse will be gone when the statistics are taken up.
        """
        layer, handler = self.layers[name], self.handlers[name]
        fits = layer.roles == tuple(handler.trained()) and not afresh
        return handler.statistics(layer.inverse if fits else None)

    def moment_shapes(self, name: str, *, afresh: bool) -> tuple[tuple[int, ...], ...]:
        """Of what ``statistics_of`` a layer will have gathered."""
        layer, handler = self.layers[name], self.handlers[name]
        fits = layer.roles == tuple(handler.trained()) and not afresh
        measured = handler.measured_shapes() if fits and layer.inverse is not None else ()
        return handler.shapes() + measured

    def add(self, moments: Mapping[str, tuple[Moment, ...]], scale: float = 1.0) -> None:
        """Micro-batches add up: each moment is weighted by what it is a mean over.

        Args:
            moments: by layer; empty for layers that no derivative reached.
            scale: what the squares of derivatives are to be multiplied by.
        """
        for name, new in moments.items():
            if not new:
                continue
            new = tuple(moment.scaled(scale) for moment in new)
            old = self.pending.get(name)
            if old is not None:
                new = tuple(a.plus(b) for a, b in zip(old, new, strict=True))
            self.pending[name] = new

    def scale_pending(self, scale: float) -> None:
        """Multiply the squares of the pending derivatives."""
        self.pending = {
            name: tuple(moment.scaled(scale) for moment in moments)
            for name, moments in self.pending.items()
        }

    def pending_traces(self) -> list[Tensor]:
        """Scalars that are finite just if the pending statistics are."""
        # If any entry of a second moment is not finite, nor is its diagonal.
        return [trace(moment.total).sum() for many in self.pending.values() for moment in many]

    def take_up(self, decay: float) -> None:
        """Moving averages (eqn 24) of the pending statistics; a layer's first ones set them."""
        running: list[Tensor] = []
        means: list[Tensor] = []
        for name, moments in self.pending.items():
            layer = self._layer_as_trained(name)
            new = tuple(moment.to_mean_() for moment in moments)
            new = self._give_to_inverse(name, new, decay)
            if layer.running is None:
                layer.running = new
                continue
            # The model's dtype may have changed.
            layer.running = tuple(
                old.to(mean.dtype) for old, mean in zip(layer.running, new, strict=True)
            )
            running += layer.running
            means += new
        if running:
            torch._foreach_lerp_(running, means, 1 - decay)
        self.pending.clear()

    def _layer_as_trained(self, name: str) -> LayerCurvature:
        """What is known of a layer: nothing, if other parameters of it are trained now."""
        roles = tuple(self.handlers[name].trained())
        if self.layers[name].roles != roles:
            self.layers[name] = LayerCurvature(roles, damping=self.layers[name].damping)
        return self.layers[name]

    def _give_to_inverse(
        self, name: str, means: tuple[Tensor, ...], decay: float
    ) -> tuple[Tensor, ...]:
        """Let a layer's inverse have what was measured for it; the rest is for the averages."""
        layer, handler = self.layers[name], self.handlers[name]
        count = len(layer.running or handler.shapes())
        if len(means) > count and layer.inverse is not None:
            layer.inverse = handler.updated(layer.inverse, means[count:], decay)
        return means[:count]

    def replace_by_pending(self) -> None:
        """Forget what was known of the layers that have pending statistics; take these."""
        for name in self.pending:
            self.layers[name] = LayerCurvature()
        self.take_up(decay=0.0)

    def is_known(self, name: str) -> bool:
        """Whether there are statistics for all that is trained of a layer."""
        layer, trained = self.layers[name], self.handlers[name].trained()
        return not trained or (layer.running is not None and layer.roles == tuple(trained))

    def common_tensors(self) -> dict[str, Tensor]:
        """What all ranks must have the same of, by what to call it."""
        found = {}
        for name, layer in self.layers.items():
            for index, tensor in enumerate(layer.running or ()):
                found[f"statistic {index} of layer {name!r}"] = tensor
            if layer.inverse is not None and not self.inverter.placement_of(name).kept:
                for key, tensor in layer.inverse.tensors.items():
                    found[f"the inverse ({key}) of layer {name!r}"] = tensor
        return found

    def _is_as_trained(self, name: str) -> bool:
        """Whether what is known of a layer is of just the parameters that are trained now."""
        trained = tuple(self.handlers[name].trained())
        return bool(trained) and self.layers[name].roles == trained

    def running(self) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
        """(name, running averages) of every layer that has some."""
        for name, layer in self.layers.items():
            if layer.running is not None:
                yield name, layer.running

    # Inverses

    def refresh_inverses(self, damping: Callable[[str], float], *, only_missing: bool) -> None:
        """Invert every known block, damped by δ of its layer, or only those not inverted yet."""
        blocks = self.blocks_to_invert(damping, only_missing=only_missing)
        self.take_inverses(blocks, self.invert(blocks))

    def blocks_to_invert(
        self, damping: Callable[[str], float], *, only_missing: bool = False
    ) -> dict[str, Block]:
        """Every known block, damped by δ of its layer, or only those not inverted yet."""
        due = {
            name: running
            for name, running in self.running()
            if self._is_as_trained(name)
            and not (only_missing and self.layers[name].inverse is not None)
        }
        if not due:
            return {}
        sums = [torch.stack([trace(r).sum() for r in running]).sum() for running in due.values()]
        home = sums[0].device
        finite = torch.stack([torch.isfinite(s).to(home) for s in sums]).tolist()
        blocks = {}
        for (name, running), good in zip(due.items(), finite, strict=True):
            if good:
                blocks[name] = Block(running, damping(name), self.layers[name].roles)
            else:
                self._refuse_factors(name)
        return blocks

    def invert(self, blocks: Mapping[str, Block]) -> dict[str, Inverse]:
        """This rank's share of the blocks; any thread may do it."""
        return self.inverter.compute(
            blocks,
            lambda name: self.handlers[name].invert(
                blocks[name].running, blocks[name].damping, self.inverse_kind
            ),
        )

    def take_inverses(self, blocks: Mapping[str, Block], own: Mapping[str, Inverse]) -> None:
        """Use the inverses of these blocks, where those are still of what is known.

        Args:
            own: this rank's share of them.
        """
        current = [
            name
            for name, block in blocks.items()
            if self.layers[name].roles == block.roles and self._is_as_trained(name)
        ]
        for name, inverse in self.inverter.distribute(current, own).items():
            layer, handler, block = self.layers[name], self.handlers[name], blocks[name]
            inverse = self._at_home(handler, inverse)
            if layer.inverse is not None:
                inverse = handler.continued(inverse, layer.inverse)
            layer.inverse, layer.damping = inverse, block.damping

    def _at_home(self, handler: Handler, inverse: Inverse) -> Inverse:
        """On the layer's device, if it was made elsewhere."""
        home = handler.weight.device
        # Flags and numbers stay on the host, which has to look at them.
        away = {k: t for k, t in inverse.tensors.items() if t.dim() > 1 and t.device != home}
        if not away:
            return inverse
        here = {key: tensor.to(home) for key, tensor in away.items()}
        return handler.restore_inverse({**inverse.tensors, **here}, self.inverse_kind)

    def inverses(self) -> dict[str, LayerInverse]:
        """Those in use."""
        return {
            name: LayerInverse(layer.inverse, layer.damping, layer.roles)
            for name, layer in self.layers.items()
            if layer.inverse is not None
        }

    def redamped_inverses(self, damping: float) -> dict[str, LayerInverse]:
        """Those of all layers with another damping; just after ``refresh_inverses`` of all."""
        known = [
            name
            for name, layer in self.layers.items()
            if layer.inverse is not None and layer.running is not None and self._is_as_trained(name)
        ]

        def redamped(name: str) -> Inverse:
            layer, handler = self.layers[name], self.handlers[name]
            assert layer.inverse is not None
            assert layer.running is not None
            return handler.redamp(layer.inverse, layer.running, damping, self.inverse_kind)

        if self.inverse_kind == "eigen" or self.structure_name == "ekfac":
            # Eigenvectors stay as they are: whoever has an inverse has all it takes.
            found = {n: redamped(n) for n in known if not self._is_remote(n)}
            found |= {n: RemoteInverse() for n in known if self._is_remote(n)}
        else:
            found = self.inverter.distribute(known, self.inverter.compute(known, redamped))
        return {n: LayerInverse(found[n], damping, self.layers[n].roles) for n in known}

    def _is_remote(self, name: str) -> bool:
        return isinstance(self.layers[name].inverse, RemoteInverse)

    def use_inverses(self, inverses: Mapping[str, LayerInverse]) -> dict[str, LayerInverse]:
        """Take these instead, where they are still of what is known; returns those in use before.

        A layer of which other parameters have come to be trained keeps what it has.
        """
        before = self.inverses()
        for name, new in inverses.items():
            layer = self.layers[name]
            if layer.roles == new.roles:
                layer.inverse, layer.damping = new.inverse, new.damping
        return before

    def _refuse_factors(self, name: str) -> None:
        """Not finite: keep the last good inverse, and let the next statistics set the factors."""
        if self.layers[name].inverse is None:
            raise RuntimeError(
                f"the factors of layer {name!r} are not finite, and there is no earlier inverse; "
                "check the checkpoint they came from, or call estimate_factors"
            )
        self.layers[name].running = None
        warnings.warn(
            f"the factors of layer {name!r} have become non-finite and were dropped; its last good "
            "inverse is used until new statistics arrive",
            stacklevel=2,
        )

    def lacks_inverses(self) -> bool:
        """Whether a layer is known, but not inverted yet."""
        return any(
            self.layers[name].inverse is None and self._is_as_trained(name)
            for name, _ in self.running()
        )

    def precondition(self, vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Replace vectors v by F̂_damped⁻¹ v (eqn 10), in place; v stays where no handler is.

        Args:
            vectors: by parameter name.

        Returns:
            Each parameter's part of vᵀ F̂_damped⁻¹ v, a scalar.
        """
        by_layer: dict[str, dict[str, str]] = {}
        for name in vectors:
            if name in self.layer_of:
                layer, role = self.layer_of[name]
                by_layer.setdefault(layer, {})[role] = name
        products: dict[str, Tensor] = {}
        to_arrive = {}
        for layer, names in by_layer.items():
            natural = self._natural_gradient_of(layer, names, vectors)
            if self.inverter.placement_of(layer).kept:
                to_arrive[layer] = natural
            else:
                products.update(_replace(vectors, natural))
        self.inverter.complete(to_arrive)
        for natural in to_arrive.values():
            products.update(_replace(vectors, natural))
        for name, vector in vectors.items():
            if name not in products:
                products[name] = _inner_product(vector, vector)
        return products

    def _natural_gradient_of(
        self, layer: str, names: Mapping[str, str], vectors: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        handler, inverse = self.handlers[layer], self._inverse_of(layer)
        trained = handler.trained()
        if inverse is None or self.layers[layer].roles != tuple(trained):
            raise RuntimeError(
                f"layer {layer!r} has a gradient, but no statistics: it did not run, or did not "
                "reach the output, in a training-mode forward pass of the model itself. Call the "
                "model rather than its parts, have output= return every tensor that the loss is "
                "computed from, or freeze the layer"
            )
        if self._is_remote(layer):
            return {name: vectors[name].to(handler.dtype, copy=True) for name in names.values()}
        # A trained parameter without a gradient stays where it is; its gradient counts as zero.
        by_role = {
            role: vectors[names[role]].to(handler.dtype)
            if role in names
            else torch.zeros_like(parameter, dtype=handler.dtype)
            for role, parameter in trained.items()
        }
        natural = handler.natural_gradient(inverse, by_role)
        return {name: natural[role] for role, name in names.items()}

    def _inverse_of(self, name: str) -> Inverse | None:
        """In the dtype of the model, which may have changed since the inverse was made."""
        layer, handler = self.layers[name], self.handlers[name]
        tensors = {} if layer.inverse is None else layer.inverse.tensors
        if any(t.is_floating_point() and t.dtype != handler.dtype for t in tensors.values()):
            cast = {key: tensor.to(handler.dtype) for key, tensor in tensors.items()}
            layer.inverse = handler.restore_inverse(cast, self.inverse_kind)
        return layer.inverse

    # State

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers and strings only; the tensors are copies."""
        return {
            "structure": self.structure_name,
            "inverse_kind": self.inverse_kind,
            "layers": {name: self._save(name) for name in self.layers},
        }

    def _save(self, name: str) -> dict[str, Any]:
        layer = self.layers[name]
        inverse = {} if layer.inverse is None else layer.inverse.tensors
        if self.inverter.placement_of(name).kept:
            inverse = {}  # some ranks have it, some not; all of them make it anew
        return {
            "roles": list(layer.roles),
            "running": [tensor.clone() for tensor in layer.running or ()],
            "inverse": {key: tensor.clone() for key, tensor in inverse.items()},
            "damping": layer.damping,
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ``ValueError``, listing the differences, if the state is not this model's."""
        require_keys("curvature state", state, ("inverse_kind", "layers"))
        saved_structure = state.get("structure", "kfc")  # all there was before there was a choice
        if saved_structure != self.structure_name:
            raise ValueError(
                f"the state dict was saved with curvature={saved_structure!r}, here it is "
                f"{self.structure_name!r}: the statistics of one are not those of the other"
            )
        require_choice("the state's inverse_kind", state["inverse_kind"], tuple(INVERSES))
        require_keys("curvature state's layers", state["layers"], ())
        saved: dict[str, object] = {}
        expected: dict[str, object] = {name: {} for name in self.handlers}
        for name, entry in state["layers"].items():
            require_keys(f"state of layer {name!r}", entry, LAYER_KEYS)
            saved[name] = {}
            # Statistics of a layer that was frozen or thawed since have another shape, and no use.
            handler = self.handlers.get(name)
            if handler is not None and tuple(entry["roles"]) == tuple(handler.trained()):
                saved[name] = _saved_shapes(entry)
                expected[name] = self._expected_shapes(handler, entry, state["inverse_kind"])
        raise_differences("layers", saved, expected)

    def _expected_shapes(
        self, handler: Handler, entry: Mapping[str, Any], kind: str
    ) -> dict[str, Any]:
        return {
            "running": list(handler.shapes()) if entry["running"] else [],
            "inverse": handler.inverse_shapes(kind) if entry["inverse"] else {},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Call ``check_state`` first."""
        self.pending.clear()
        for name, entry in state["layers"].items():
            self.layers[name] = self._restore(self.handlers[name], entry, state["inverse_kind"])

    def _restore(
        self, handler: Handler, entry: Mapping[str, Any], saved_kind: str
    ) -> LayerCurvature:
        def own(tensor: Tensor) -> Tensor:
            return tensor.to(handler.weight.device, handler.dtype, copy=True)

        inverse = None
        saved, wanted = (handler.inverse_shapes(kind) for kind in (saved_kind, self.inverse_kind))
        if entry["inverse"] and saved == wanted:
            tensors = {key: own(tensor) for key, tensor in entry["inverse"].items()}
            inverse = handler.restore_inverse(tensors, self.inverse_kind)
        running = tuple(own(tensor) for tensor in entry["running"]) or None
        return LayerCurvature(tuple(entry["roles"]), running, inverse, entry["damping"])


LAYER_KEYS = ("roles", "running", "inverse", "damping")


def _replace(vectors: Mapping[str, Tensor], natural: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Put natural gradients where the gradients were; returns their inner products."""
    products = {}
    for name, new in natural.items():
        products[name] = _inner_product(vectors[name], new)
        vectors[name].copy_(new)
    return products


def _inner_product(vector: Tensor, other: Tensor) -> Tensor:
    wide = torch.promote_types(torch.promote_types(vector.dtype, other.dtype), torch.float32)
    return torch.dot(vector.flatten().to(wide), other.flatten().to(wide))


def _saved_shapes(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "running": [tuple(tensor.shape) for tensor in entry["running"]],
        "inverse": {key: tuple(tensor.shape) for key, tensor in entry["inverse"].items()},
    }
