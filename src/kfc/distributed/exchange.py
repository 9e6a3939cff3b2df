"""Batch statistics of all ranks, added up while the ranks go on with their backward passes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from kfc.checks import widest
from kfc.distributed.packing import from_wire, is_folded, to_wire, wire_numbers
from kfc.distributed.workers import Workers
from kfc.layers import Handler, Moment

ABOUT = "statistics"

Shapes = tuple[tuple[int, ...], ...]


class Gathered(NamedTuple):
    """What all ranks gathered.

    Attributes:
        moments: by layer; sums over all ranks of totals and of weights.
        examples: of all ranks.
        bad_ranks: those whose own part was not finite.
    """

    moments: dict[str, tuple[Moment, ...]]
    examples: int
    bad_ranks: list[int]


class Exchange:
    """One exchange, under way from the moment it is made.

    A layer that did not run on this rank counts as zero here, with weight zero.

    Args:
        pending: this rank's moments by layer.
        shapes: of the moments of every layer that any rank may have; the same on all ranks.
        handlers: of these layers.
        examples: of this rank.
        bad: whether this rank's moments are not finite, a boolean scalar on the device.
    """

    def __init__(
        self,
        workers: Workers,
        pending: Mapping[str, tuple[Moment, ...]],
        shapes: Mapping[str, Shapes],
        handlers: Mapping[str, Handler],
        examples: int,
        bad: Tensor,
    ) -> None:
        self._size = workers.size
        self._shapes = shapes
        header = [float(examples), *(0.0 for _ in range(workers.size))]
        tensors: list[Tensor] = []
        for name, of_layer in shapes.items():
            moments = pending.get(name, ())
            handler = handlers[name]
            for index, shape in enumerate(of_layer):
                moment = moments[index] if moments else None
                header += _describe(moment)
                tensors.append(_on_wire(moment, shape, handler))
        home = next(iter(handlers.values())).weight.device
        first = torch.tensor(header, dtype=widest(home), device=home)
        first[1 + workers.rank] = bad.to(first)
        self._messages = workers.start_sum([first, *tensors], ABOUT)

    def wait(self) -> Gathered:
        first, *tensors = self._messages.wait()
        examples, *numbers = first.tolist()
        bad, described = numbers[: self._size], numbers[self._size :]
        moments: dict[str, tuple[Moment, ...]] = {}
        index = 0
        for name, of_layer in self._shapes.items():
            sums = []
            for shape in of_layer:
                weight, derivatives = described[2 * index : 2 * index + 2]
                total = from_wire(tensors[index], shape, symmetric=is_folded(shape))
                sums.append(Moment(total, weight, of_derivatives=derivatives > 0))
                index += 1
            if any(moment.weight for moment in sums):
                moments[name] = tuple(sums)
        ranks = [rank for rank, flag in enumerate(bad) if flag != 0]
        return Gathered(moments, int(examples), ranks)


def statistics_bytes(shapes: Mapping[str, Shapes], numbers: Mapping[str, int], ranks: int) -> int:
    """What one exchange sends.

    Args:
        numbers: bytes of a number, by layer.
    """
    header = 1 + ranks + 2 * sum(map(len, shapes.values()))
    return 8 * header + sum(
        numbers[name] * wire_numbers(shape, symmetric=is_folded(shape))
        for name, of_layer in shapes.items()
        for shape in of_layer
    )


def _describe(moment: Moment | None) -> tuple[float, float]:
    """Its weight, and whether it is quadratic in derivatives."""
    return (0.0, 0.0) if moment is None else (moment.weight, float(moment.of_derivatives))


def _on_wire(moment: Moment | None, shape: tuple[int, ...], handler: Handler) -> Tensor:
    symmetric = is_folded(shape)
    if moment is not None:
        return to_wire(moment.total, symmetric=symmetric)
    numbers = wire_numbers(shape, symmetric=symmetric)
    return torch.zeros(numbers, dtype=handler.dtype, device=handler.weight.device)
