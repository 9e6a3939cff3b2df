"""Statistics summed over all ranks while the ranks continue with their backward passes."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from kfc._helpers import widest
from kfc.curvature.model import MomentLayout
from kfc.curvature.statistics import BatchStatistics, Moment
from kfc.distributed.packing import from_wire, is_folded, to_wire, wire_numbers
from kfc.distributed.ranks import Ranks

ABOUT = "statistics"


class Received(NamedTuple):
    """The sums over all ranks.

    Attributes:
        moments: the sums of totals and of weights, by layer.
        examples: the number of examples of all ranks.
        bad_ranks: the ranks whose own statistics were not finite.
    """

    moments: dict[str, tuple[Moment, ...]]
    examples: int
    bad_ranks: list[int]


class Exchange:
    """One sum over all ranks, in progress from its construction until :meth:`wait`.

    A layer that did not run on this rank counts as zero, with weight zero.

    Args:
        batch: what this rank gathered.
        layouts: the moments of every layer that any rank may have; the same on all ranks.
        bad: whether this rank's moments are not finite, a boolean scalar.
    """

    def __init__(
        self,
        ranks: Ranks,
        batch: BatchStatistics,
        layouts: Mapping[str, MomentLayout],
        bad: Tensor,
    ) -> None:
        self._size = ranks.size
        self._layouts = layouts
        header = [float(batch.examples), *(0.0 for _ in range(ranks.size))]
        tensors: list[Tensor] = []
        for name, layout in layouts.items():
            moments = batch.moments.get(name, ())
            for index, shape in enumerate(layout.shapes):
                moment = moments[index] if moments else None
                header += (moment.weight, float(moment.of_derivatives)) if moment else (0.0, 0.0)
                tensors.append(_to_wire(moment, shape, layout))
        home = next(iter(layouts.values())).device
        first = torch.tensor(header, dtype=widest(home), device=home)
        first[1 + ranks.rank] = bad.to(first)
        self._messages = ranks.start_sum([first, *tensors], ABOUT)

    def wait(self) -> Received:
        first, *tensors = self._messages.wait()
        examples, *numbers = first.tolist()
        bad, described = numbers[: self._size], numbers[self._size :]
        moments: dict[str, tuple[Moment, ...]] = {}
        index = 0
        for name, layout in self._layouts.items():
            sums = []
            for shape in layout.shapes:
                weight, derivatives = described[2 * index : 2 * index + 2]
                total = from_wire(tensors[index], shape, symmetric=is_folded(shape))
                sums.append(Moment(total, weight, of_derivatives=derivatives > 0))
                index += 1
            if any(moment.weight for moment in sums):
                moments[name] = tuple(sums)
        ranks = [rank for rank, flag in enumerate(bad) if flag != 0]
        return Received(moments, int(examples), ranks)


def statistics_bytes(layouts: Iterable[MomentLayout], ranks: int) -> int:
    """Return the bytes that one exchange sends."""
    layouts = list(layouts)
    header = 1 + ranks + 2 * sum(len(layout.shapes) for layout in layouts)
    return 8 * header + sum(
        layout.dtype.itemsize * wire_numbers(shape, symmetric=is_folded(shape))
        for layout in layouts
        for shape in layout.shapes
    )


def _to_wire(moment: Moment | None, shape: tuple[int, ...], layout: MomentLayout) -> Tensor:
    symmetric = is_folded(shape)
    if moment is not None:
        return to_wire(moment.total, symmetric=symmetric)
    numbers = wire_numbers(shape, symmetric=symmetric)
    return torch.zeros(numbers, dtype=layout.dtype, device=layout.device)
