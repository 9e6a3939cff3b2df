"""The interface through which the rest of the library sees several ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kfc._helpers import after_backward
from kfc.distributed.synchronised import mixes_ranks

if TYPE_CHECKING:
    from kfc.curvature.kronecker import Inverse
    from kfc.curvature.layer import LayerCurvature
    from kfc.curvature.statistics import BatchStatistics
    from kfc.statistics.generator import OwnGenerator

# Gradients of a layer, by parameter name.
Gradients = dict[str, Tensor]


def named_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 1" or "ranks 1 and 2", or "a rank" if it is unknown which."""
    if not ranks:
        return "a rank"
    return f"rank{'s' if len(ranks) > 1 else ''} {' and '.join(map(str, ranks))}"


class Reducer:
    """Joins the work of all ranks.

    This class is the case of one process: every method returns its argument and sends nothing.
    ``kfc.distributed.ranked.RankReducer`` is the case of several ranks; all of them call the
    same methods in the same order.

    Args:
        expects_group: a default process group that exists by the first step is an error.
    """

    rank = 0
    size = 1
    #: Whether only forward passes and the user change the model's buffers.
    owns_buffers = True
    #: Suffix of error messages about a quantity that is divided between ranks.
    among_ranks = ""

    def __init__(self, *, expects_group: bool = False) -> None:
        self._expects_group = expects_group

    # Setup and steps

    def check_model(self, model: nn.Module) -> None:
        """Raise ``ValueError`` if the model joins examples of ranks that are not known here."""
        if self.mixes_examples(model):
            raise ValueError(
                "the model's SyncBatchNorm joins the examples of several ranks, but the optimizer "
                "was made for one process; pass the ranks' group: parallel=kfc.Parallel(group=...)"
            )

    def mixes_examples(self, model: nn.Module) -> bool:
        """Return whether an example's output depends on examples of other ranks."""
        return mixes_ranks(model)

    def place(self, layers: Mapping[str, LayerCurvature], period: int) -> None:
        """Set the layers of the model, and decide which rank computes which inverse.

        Args:
            period: the number of steps that an inverse is used for.
        """

    def begin_step(self, step: int) -> None:
        """Record the step in progress, which errors of collectives report."""

    def agree_on(self, fixed: Mapping[str, str], current: Callable[[], Mapping[str, str]]) -> None:
        """Compare the model and the options of all ranks, now and before each step.

        Args:
            fixed: what does not change, by a name that errors use.
            current: returns what may change.
        """

    def prepare(self, step: int, passes: int, *, training: bool) -> None:
        """Record what must be the same on all ranks before the first message of a step.

        Args:
            passes: the number of passes since the last step.
            training: whether the model is in training mode.
        """

    def fail(self, problem: str) -> NoReturn:
        """Raise an error on all ranks, because this one cannot continue with the step."""
        raise RuntimeError(problem)

    def check_equal(
        self, model: nn.Module, gradients: Mapping[str, Tensor], step: int, *, first: bool
    ) -> None:
        """Raise an error that names the first difference between ranks, when a check is due.

        Args:
            first: whether this is the first step since the start or since a state was loaded.
        """
        late = first and self._expects_group and dist.is_available() and dist.is_initialized()
        if late and dist.get_world_size() > 1:
            raise RuntimeError(
                "torch.distributed was initialised after the optimizer, which was made for one "
                "process; make the optimizer afterwards, or with "
                "parallel=kfc.Parallel(group=None) to train in this process alone"
            )

    def skip_step(self, step: int, cause: str) -> None:
        """Count a skipped step. Several ranks stop after ten in a row."""

    def end_step(self) -> None:
        """Record that a step was not skipped."""

    def describe(self) -> dict[str, Any] | None:
        """Return who computes what and how much was sent, for ``diagnostics``."""
        return None

    # Statistics

    def generator(self, shared: OwnGenerator, device: torch.device) -> torch.Generator:
        """Return the generator that draws this rank's targets."""
        return shared.on(device)

    def turns(self, count: int, *, joint: bool) -> list[tuple[bool, int]]:
        """Return the number of backward passes of each turn, and whether they are this rank's.

        Args:
            count: the number of passes that this rank needs.
            joint: whether a pass of one rank needs the others, as with SyncBatchNorm.
        """
        return [(True, count)]

    def once_gathered(self, act: Callable[[], None]) -> None:
        """Call ``act``, which adds gathered statistics, unless the running backward fails."""
        after_backward(act)

    def watch(self, output: Tensor) -> None:
        """Record whether this rank's output and its derivative are finite."""

    def cause_of_bad_step(self) -> str:
        """Return the ranks with values that are not finite in this step; empty in one process."""
        return ""

    def where(self, ranks: Sequence[int] | None) -> str:
        """Return " on rank 1" for error messages, or nothing in a single process.

        Args:
            ranks: ``None``: those with values that are not finite in this step.
        """
        return ""

    def send_(self, batch: BatchStatistics, names: Collection[str]) -> None:
        """Start to sum the statistics of a batch over all ranks, unless more passes will follow.

        The statistics sent are removed from the batch. ``receive_()`` adds their sums.

        Args:
            names: the layers that any rank may have gathered.
        """

    def receive_(
        self, batch: BatchStatistics, names: Collection[str], *, due: bool, fresh: bool
    ) -> None:
        """Add what other ranks gathered, and what was sent, to the statistics of a batch.

        Args:
            batch: what this rank gathered and has not sent.
            names: the layers that any rank may have gathered.
            due: whether every rank gathers all of them in this step.
            fresh: see ``kfc.curvature.layer.LayerCurvature.statistics()``.
        """

    def drop(self) -> None:
        """Discard what is known about the step in progress."""

    def drop_sent(self) -> None:
        """Discard statistics that were sent, and whether values were finite."""

    def mean_product(self, value: Tensor, examples: int, *, is_summed: bool) -> Tensor:
        """Return a product with the Fisher matrix of the whole batch from that of each part.

        Args:
            value: the product for the loss on this rank's examples.
            is_summed: whether the weights of terms do not depend on the number of examples.
        """
        return value

    # Numbers

    def share(self, value: Any) -> Any:
        """Return what rank 0 passes."""
        return value

    def mean(self, numbers: Sequence[float]) -> list[float]:
        """Return the mean over ranks of each number."""
        return list(numbers)

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return the numbers of every rank."""
        return [list(numbers)]

    def largest(self, numbers: Sequence[float]) -> list[float]:
        """Return the largest of every number over the ranks."""
        return [max(each) for each in zip(*self.gather(numbers), strict=True)]

    # Inverses

    def compute(self, names: Iterable[str], make: Callable[[str], Inverse]) -> dict[str, Inverse]:
        """Return the inverses that this rank computes."""
        return {name: make(name) for name in names}

    def distribute(self, names: Iterable[str], own: Mapping[str, Inverse]) -> dict[str, Inverse]:
        """Return the inverses of all named layers from every rank's share."""
        return {name: own[name] for name in names}

    def is_everywhere(self, name: str) -> bool:
        """Return whether every rank has the layer's inverse."""
        return True

    def completed(self, natural: Iterable[tuple[str, Gradients]]) -> Iterator[Gradients]:
        """Yield natural gradients, those of layers whose inverse another rank holds last.

        Args:
            natural: pairs of a layer's name and its natural gradients, by parameter name.
        """
        for _, gradients in natural:
            yield gradients
