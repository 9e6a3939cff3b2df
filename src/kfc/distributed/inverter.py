"""Inverses of many layers: computed by their owners, then where they are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NoReturn

import torch
from torch import Tensor

from kfc.distributed.packing import from_wire, is_folded, to_wire, wire_numbers
from kfc.distributed.placement import EVERYWHERE, Placement
from kfc.distributed.workers import Arriving, Workers
from kfc.layers import Handler
from kfc.layers.base import Inverse

ABOUT_INVERSES, ABOUT_GRADIENTS = "inverses", "natural gradients"


class RemoteInverse:
    """Stands for an inverse that its owner, another rank, keeps for itself."""

    tensors: dict[str, Tensor]

    def __init__(self) -> None:
        self.tensors = {}

    def apply(self, gradient: Tensor) -> NoReturn:
        raise AssertionError("another rank has this inverse")


class Inverter:
    """Who computes which inverse, and how the others come by it.

    Args:
        kind: a key of ``kfc.kronecker.INVERSES``.
        placements: of the layers; one that is not in it is computed by every rank.
    """

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        kind: str,
        workers: Workers,
        placements: Mapping[str, Placement] | None = None,
    ) -> None:
        self.handlers = handlers
        self.kind = kind
        self.workers = workers
        self.placements = placements or {}

    def placement_of(self, name: str) -> Placement:
        return self.placements.get(name, EVERYWHERE)

    def computes(self, name: str) -> bool:
        """Whether this rank computes a layer's inverse."""
        return self.placement_of(name).owner in (None, self.workers.rank)

    # Inverses

    def compute(self, names: Iterable[str], make: Callable[[str], Inverse]) -> dict[str, Inverse]:
        """This rank's share of the inverses; sends nothing."""
        return {name: make(name) for name in names if self.computes(name)}

    def distribute(self, names: Iterable[str], own: Mapping[str, Inverse]) -> dict[str, Inverse]:
        """All of the named layers' inverses, from every rank's share."""
        found: dict[str, Inverse] = {}
        sent: dict[int, list[str]] = {}
        for name in names:
            owner, kept = self.placement_of(name)
            if owner is not None and not kept:
                sent.setdefault(owner, []).append(name)
            else:
                found[name] = own.get(name) or RemoteInverse()
        messages = {
            owner: self.workers.start_broadcast(
                [self._to_wire(name, own.get(name)) for name in theirs], owner, ABOUT_INVERSES
            )
            for owner, theirs in sent.items()
        }
        for owner, theirs in sent.items():
            for name, numbers in zip(theirs, messages[owner].wait(), strict=True):
                found[name] = self._from_wire(name, numbers)
        return found

    def _to_wire(self, name: str, inverse: Inverse | None) -> Tensor:
        """An inverse as a vector; of one that is to come, its place."""
        handler = self.handlers[name]
        parts = []
        for key, shape in handler.inverse_shapes(self.kind).items():
            symmetric = self._is_triangle(handler, key, shape)
            if inverse is None:
                numbers = wire_numbers(shape, symmetric=symmetric)
                parts.append(torch.empty(numbers, device=handler.weight.device))
            else:
                parts.append(to_wire(inverse.tensors[key], symmetric=symmetric))
        home = handler.weight.device
        return torch.cat([part.to(home, handler.dtype) for part in parts])

    def _from_wire(self, name: str, numbers: Tensor) -> Inverse:
        # Also by the owner: what it computed need not be symmetric to the last bit.
        handler = self.handlers[name]
        tensors, start = {}, 0
        for key, shape in handler.inverse_shapes(self.kind).items():
            symmetric = self._is_triangle(handler, key, shape)
            end = start + wire_numbers(shape, symmetric=symmetric)
            tensors[key] = from_wire(numbers[start:end], shape, symmetric=symmetric)
            start = end
        return handler.restore_inverse(tensors, self.kind)

    def _is_triangle(self, handler: Handler, key: str, shape: tuple[int, ...]) -> bool:
        return key in handler.inverse_triangles(self.kind) and is_folded(shape)

    # Natural gradients

    def complete(self, gradients: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Fill in, in place, the natural gradients of layers whose inverses their owners keep.

        Args:
            gradients: by layer and parameter; right where this rank has the layer's inverse.
        """
        theirs: dict[int, list[Tensor]] = {}
        for name, by_parameter in gradients.items():
            owner, kept = self.placement_of(name)
            if kept and owner is not None:
                theirs.setdefault(owner, []).extend(by_parameter.values())
        messages: list[tuple[list[Tensor], Arriving]] = [
            (tensors, self.workers.start_broadcast(tensors, owner, ABOUT_GRADIENTS))
            for owner, tensors in theirs.items()
        ]
        for tensors, message in messages:
            for tensor, arrived in zip(tensors, message.wait(), strict=True):
                tensor.copy_(arrived)
