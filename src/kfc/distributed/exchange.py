"""Statistics summed over all ranks while the ranks continue with their backward passes."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from kfc._helpers import widest
from kfc.curvature.statistics import BatchStatistics, Moment, MomentLayout
from kfc.distributed.packing import Packing
from kfc.distributed.ranks import Ranks
from kfc.moments.folding import is_symmetric


class Exchange:
    """One sum over all ranks, in progress from its construction until ``add_to_()``.

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
        self._packings = {name: _packings(layout) for name, layout in layouts.items()}
        header = [float(batch.examples), *(0.0 for _ in range(ranks.size))]
        tensors: list[Tensor] = []
        for name, packings in self._packings.items():
            dtype, device = layouts[name].dtype, layouts[name].device
            moments = batch.moments.get(name) or [None] * len(packings)
            for moment, packing in zip(moments, packings, strict=True):
                if moment is None:
                    header += (0.0, 0.0)
                    tensors.append(torch.zeros(packing.numbers, dtype=dtype, device=device))
                else:
                    header += (moment.weight, float(moment.of_derivatives))
                    tensors.append(packing.pack(moment.total))
        home = next(iter(layouts.values())).device
        first = torch.tensor(header, dtype=widest(home), device=home)
        first[1 + ranks.rank] = bad.to(first)
        self._messages = ranks.start_sum([first, *tensors], "statistics")

    def add_to_(self, batch: BatchStatistics) -> list[int]:
        """Add the sums to a batch, and return the ranks whose statistics were not finite."""
        first, *tensors = self._messages.wait()
        examples, *numbers = first.tolist()
        bad, described = numbers[: self._size], iter(numbers[self._size :])
        received = iter(tensors)
        moments: dict[str, tuple[Moment, ...]] = {}
        for name, packings in self._packings.items():
            sums = [
                Moment(
                    packing.unpack(next(received)),
                    next(described),
                    of_derivatives=next(described) > 0,
                )
                for packing in packings
            ]
            if any(moment.weight for moment in sums):
                moments[name] = tuple(sums)
        batch.add(moments, int(examples))
        return [rank for rank, flag in enumerate(bad) if flag != 0]


def statistics_bytes(layouts: Iterable[MomentLayout], ranks: int) -> int:
    """Return the bytes that one exchange sends."""
    count, size = 0, 0
    for layout in layouts:
        count += len(layout.shapes)
        size += layout.dtype.itemsize * sum(packing.numbers for packing in _packings(layout))
    return 8 * (1 + ranks + 2 * count) + size


def _packings(layout: MomentLayout) -> list[Packing]:
    return [Packing(shape, is_symmetric(shape)) for shape in layout.shapes]
