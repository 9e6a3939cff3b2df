"""The work of several ranks joined by collectives: the reducer of distributed training."""

import hashlib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kfc._helpers import all_finite
from kfc.curvature.layer import LayerCurvature
from kfc.curvature.model import MomentLayout
from kfc.curvature.statistics import BatchStatistics
from kfc.distributed.consistency import require_equal_ranks
from kfc.distributed.exchange import Exchange, statistics_bytes
from kfc.distributed.inverses import InverseReducer, layer_size
from kfc.distributed.options import Parallel
from kfc.distributed.ranks import Ranks, join_ranks
from kfc.distributed.reducer import Reducer
from kfc.fisher.likelihoods import Likelihood
from kfc.schedule import is_due
from kfc.statistics.generator import OwnGenerator


def make_reducer(model: nn.Module, parallel: Parallel) -> tuple[nn.Module, Reducer]:
    """Return the model without its DDP wrapper, and the reducer of the ranks that train it."""
    model, ranks = join_ranks(model, parallel.group)
    if ranks.size == 1:
        return model, Reducer(expects_group=parallel.group == "auto")
    return model, RankReducer(ranks, parallel)


class RankReducer(InverseReducer):
    """Joins the work of the ranks of a process group; each has its part of the batch."""

    def __init__(self, ranks: Ranks, parallel: Parallel) -> None:
        super().__init__(ranks, parallel)
        self._exchanges: list[Exchange] = []
        self._output_is_bad: Tensor | None = None
        self._known_bad: set[int] = set()

    # Setup and steps

    def check_model(self, model: nn.Module) -> None:
        pass

    def begin_step(self, step: int) -> None:
        self.ranks.at(step)

    # Statistics

    def generator(self, shared: OwnGenerator, device: torch.device) -> torch.Generator:
        """Return a new generator that depends on the rank.

        The shared generator advances equally on all ranks, so that its state is the same on all.
        """
        number = torch.randint(2**62, (), generator=shared.on(torch.device("cpu"))).item()
        digest = hashlib.sha256(f"{number} {self.rank}".encode()).digest()
        return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)

    def turns(self, count: int, *, joint: bool) -> list[tuple[int, int]]:
        if not joint:
            return [(self.rank, count)]
        return [(rank, int(n)) for rank, (n,) in enumerate(self.gather([count]))]

    def watch(self, output: Tensor) -> None:
        # Averaged gradients do not tell which rank's loss was not finite.
        self._note_bad(output.detach())
        if output.requires_grad:
            output.register_hook(self._note_bad)

    def _note_bad(self, values: Tensor) -> None:
        bad = ~torch.isfinite(torch.linalg.vector_norm(values.detach(), math.inf))
        before = self._output_is_bad
        self._output_is_bad = bad if before is None else before | bad.to(before.device)

    def bad_ranks(self) -> list[int]:
        own = self._output_is_bad is not None and bool(self._output_is_bad)
        flags = self.gather([float(own)])
        return sorted(self._known_bad | {rank for rank, (flag,) in enumerate(flags) if flag})

    def send(
        self, batch: BatchStatistics, layouts: Callable[[], Mapping[str, MomentLayout]]
    ) -> None:
        if not self.ranks.are_accumulating():
            self._start(batch, layouts())

    def _start(self, batch: BatchStatistics, layouts: Mapping[str, MomentLayout]) -> None:
        bad = ~all_finite(batch.traces())
        self._exchanges.append(Exchange(self.ranks, batch, layouts, bad))
        batch.clear()

    def receive(
        self,
        batch: BatchStatistics,
        layouts: Callable[[Collection[str]], Mapping[str, MomentLayout]],
        required: Collection[str],
        optional: Collection[str],
    ) -> BatchStatistics:
        names = [*required, *self._gathered_anywhere(batch, optional)]
        if names and (batch.moments or not self._exchanges):
            self._start(batch, layouts(names))
        for exchange in self._exchanges:
            received = exchange.wait()
            batch.add(received.moments, received.examples)
            self._known_bad.update(received.bad_ranks)
        self._exchanges.clear()
        return batch

    def _gathered_anywhere(self, batch: BatchStatistics, names: Collection[str]) -> list[str]:
        if not names:
            return []
        flags = self.ranks.largest([float(name in batch.moments) for name in names])
        return [name for name, flag in zip(names, flags, strict=True) if flag]

    def drop(self) -> None:
        for exchange in self._exchanges:
            exchange.wait()  # the other ranks would wait for this one
        self._exchanges.clear()
        self._output_is_bad = None
        self._known_bad.clear()

    def mean_product(self, value: Tensor, examples: int, likelihood: Likelihood) -> Tensor:
        own = value * (examples * likelihood.growth(examples, 1))
        both = self.ranks.start_sum([own, own.new_tensor(float(examples))], "norms").wait()
        total, count = both
        return total * (likelihood.growth(1, count.item() / self.size) / count)

    # Numbers

    def share(self, value: Any) -> Any:
        return self.ranks.share(value)

    def mean(self, numbers: Sequence[float]) -> list[float]:
        return self.ranks.mean(numbers)

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        return self.ranks.gather(numbers)

    def check_equal(
        self,
        model: nn.Module,
        gradients: Mapping[str, Tensor],
        layers: Mapping[str, LayerCurvature],
        step: int,
        *,
        first: bool,
    ) -> None:
        period = self.parallel.consistency_period
        if first or (period is not None and is_due(period, step)):
            held = {n: layer for n, layer in layers.items() if self.is_everywhere(n)}
            require_equal_ranks(self.ranks, model, gradients, layers, held, step)

    def describe(self, layers: Mapping[str, LayerCurvature]) -> dict[str, Any] | None:
        return {
            "rank": self.rank,
            "size": self.size,
            "placement": {name: p._asdict() for name, p in self.placements.items()},
            "sent": dict(self.ranks.traffic),
            "expected": self._expected_traffic(layers),
        }

    def _expected_traffic(self, layers: Mapping[str, LayerCurvature]) -> dict[str, int]:
        """Return the bytes that one gathering of statistics, one refresh and one step send."""
        placements = self.placements
        sizes = {name: layer_size(layer) for name, layer in layers.items()}
        layouts = [
            MomentLayout(c.moment_shapes(fresh=False), c.layer.dtype, c.layer.weight.device)
            for c in layers.values()
            if c.trained_roles()
        ]
        sent = [name for name in layers if placements[name].owner is not None]
        return {
            "statistics": statistics_bytes(layouts, self.size),
            "inverses": sum(sizes[n].inverse_bytes for n in sent if not placements[n].kept),
            "natural gradients": sum(sizes[n].gradient_bytes for n in sent if placements[n].kept),
        }
