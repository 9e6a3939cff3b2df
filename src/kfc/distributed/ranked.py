"""The work of several ranks joined by collectives: the reducer of distributed training."""

import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from kfc._helpers import all_finite
from kfc.curvature.kronecker import Inverse
from kfc.curvature.layer import LayerCurvature
from kfc.curvature.statistics import BatchStatistics
from kfc.distributed.agreement import MOST_NUMBERS, Agreement
from kfc.distributed.consistency import require_equal_ranks
from kfc.distributed.exchange import Exchange, statistics_bytes
from kfc.distributed.inverses import RemoteInverse, layer_size, pack_inverse, unpack_inverse
from kfc.distributed.options import Parallel
from kfc.distributed.placement import Placement, place
from kfc.distributed.ranks import Ranks, join_ranks
from kfc.distributed.reducer import Gradients, Reducer, named_ranks
from kfc.schedule import is_due
from kfc.statistics.generator import OwnGenerator

# Ranks stop after this many skipped steps in a row.
MOST_SKIPPED_IN_A_ROW = 10


def make_reducer(model: nn.Module, parallel: Parallel) -> tuple[nn.Module, Reducer]:
    """Return the model without its DDP wrapper, and the reducer of the ranks that train it."""
    model, ranks = join_ranks(model, parallel.group)
    if ranks.size == 1:
        return model, Reducer(expects_group=parallel.group == "auto")
    return model, RankReducer(ranks, parallel)


class RankReducer(Reducer):
    """Joins the work of the ranks of a process group; each has its part of the batch."""

    def __init__(self, ranks: Ranks, parallel: Parallel) -> None:
        super().__init__()
        self.rank, self.size = ranks.rank, ranks.size
        self.owns_buffers = False  # DistributedDataParallel broadcasts them
        self.among_ranks = f" of {ranks.size} ranks"
        self._ranks = ranks
        self._parallel = parallel
        self._layers: Mapping[str, LayerCurvature] = {}
        self._placements: Mapping[str, Placement] = {}
        self._exchanges: list[Exchange] = []
        self._output_is_bad: Tensor | None = None
        self._known_bad: set[int] = set()
        self._skipped_in_a_row = 0
        self._agreement = Agreement(ranks)
        # Whether the ranks agree on the step in progress; and what this rank does in it.
        self._is_agreed = True
        self._doing: dict[str, str] = {}

    # Setup and steps

    def check_model(self, model: nn.Module) -> None:
        pass

    def place(self, layers: Mapping[str, LayerCurvature], period: int) -> None:
        self._layers = layers
        sizes = {name: layer_size(layer) for name, layer in layers.items()}
        self._placements = place(sizes, self.size, self._parallel.placement, period)

    def begin_step(self, step: int) -> None:
        self._ranks.at(step)

    def agree_on(self, fixed: Mapping[str, str], current: Callable[[], Mapping[str, str]]) -> None:
        self._agreement.set_up(fixed, current)
        self._agreement.reach({"next": "the first step"})

    def prepare(self, step: int, passes: int, *, training: bool) -> None:
        self._doing = {
            "step": str(step),
            "the number of forward and backward passes since the last step": str(passes),
            "the model's mode": "training" if training else "evaluation",
        }

    def fail(self, problem: str) -> NoReturn:
        self._agree("nothing", problem=problem)
        raise RuntimeError(problem)

    def _agree(
        self,
        following: str,
        numbers: Sequence[float] = (),
        layouts: object = None,
        problem: str = "",
    ) -> list[list[float]]:
        """Raise an error on all ranks unless they are about to send the same.

        Args:
            following: what this rank sends next.
            numbers: numbers to be sent to all ranks; they are returned for each rank.
            layouts: the layout of the next message.
            problem: why this rank cannot continue.
        """
        self._is_agreed = True
        doing = {**self._doing, "the next message": following}
        if layouts is not None:
            doing["its layout"] = str(layouts)
        return self._agreement.reach(doing, numbers, problem)

    def _agree_once(self, following: str) -> None:
        """Check that ranks agree before the first message of a step."""
        if not self._is_agreed:
            self._agree(following)

    def check_equal(
        self, model: nn.Module, gradients: Mapping[str, Tensor], step: int, *, first: bool
    ) -> None:
        period = self._parallel.consistency_period
        if first or (period is not None and is_due(period, step)):
            self._agree_once("a comparison of parameters")
            held = {n: layer for n, layer in self._layers.items() if self.is_everywhere(n)}
            require_equal_ranks(self._ranks, model, gradients, self._layers, held, step)

    def skip_step(self, step: int, cause: str) -> None:
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row >= MOST_SKIPPED_IN_A_ROW:
            # The users of the other ranks see nothing wrong and would continue for ever.
            raise FloatingPointError(
                f"step {step} was skipped {self._skipped_in_a_row} times: {cause} gave values that "
                "are not finite. The parameters are unchanged; look at the batch and the loss there"
            )

    def end_step(self) -> None:
        self._skipped_in_a_row = 0

    def describe(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "size": self.size,
            "placement": {name: p._asdict() for name, p in self._placements.items()},
            "sent": dict(self._ranks.traffic),
            "expected": self._expected_traffic(),
        }

    def _expected_traffic(self) -> dict[str, int]:
        """Return the bytes that one gathering of statistics, one refresh and one step send."""
        trained = [layer for layer in self._layers.values() if layer.trained_roles()]
        layouts = [layer.moment_layout(fresh=False) for layer in trained]
        inverses, gradients = 0, 0
        for name, (owner, kept) in self._placements.items():
            size = layer_size(self._layers[name])
            if owner is not None:
                inverses += 0 if kept else size.inverse_bytes
                gradients += size.gradient_bytes if kept else 0
        return {
            "statistics": statistics_bytes(layouts, self.size),
            "inverses": inverses,
            "natural gradients": gradients,
        }

    # Statistics

    def generator(self, shared: OwnGenerator, device: torch.device) -> torch.Generator:
        """Return a new generator that depends on the rank.

        The shared generator advances equally on all ranks, so that its state is the same on all.
        """
        number = torch.randint(2**62, (), generator=shared.on(torch.device("cpu"))).item()
        digest = hashlib.sha256(f"{number} {self.rank}".encode()).digest()
        return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)

    def turns(self, count: int, *, joint: bool) -> list[tuple[bool, int]]:
        if not joint:
            return [(True, count)]
        return [(rank == self.rank, int(n)) for rank, (n,) in enumerate(self.gather([count]))]

    def once_gathered(self, act: Callable[[], None]) -> None:
        act()  # at once: the exchange takes place during the rest of the backward pass

    def watch(self, output: Tensor) -> None:
        # Averaged gradients do not tell which rank's loss was not finite.
        self._note_bad(output.detach())
        if output.requires_grad:
            output.register_hook(self._note_bad)

    def _note_bad(self, values: Tensor) -> None:
        bad = ~torch.isfinite(torch.linalg.vector_norm(values.detach(), math.inf))
        before = self._output_is_bad
        self._output_is_bad = bad if before is None else before | bad.to(before.device)

    def cause_of_bad_step(self) -> str:
        return named_ranks(self._bad_ranks())

    def where(self, ranks: Sequence[int] | None) -> str:
        return f" on {named_ranks(self._bad_ranks() if ranks is None else ranks)}"

    def _bad_ranks(self) -> list[int]:
        own = self._output_is_bad is not None and bool(self._output_is_bad)
        flags = self.gather([float(own)])
        return sorted(self._known_bad | {rank for rank, (flag,) in enumerate(flags) if flag})

    def send_(self, batch: BatchStatistics, names: Collection[str]) -> None:
        if not self._ranks.are_accumulating():
            self._start_(batch, names, fresh=False)

    def _start_(self, batch: BatchStatistics, names: Collection[str], *, fresh: bool) -> None:
        layouts = {name: self._layers[name].moment_layout(fresh=fresh) for name in names}
        shapes = {name: layout.shapes for name, layout in layouts.items()}
        self._agree(f"statistics of {len(names)} layers", layouts=shapes)
        bad = ~all_finite(batch.traces())
        self._exchanges.append(Exchange(self._ranks, batch, layouts, bad))
        batch.clear()

    def receive_(
        self, batch: BatchStatistics, names: Collection[str], *, due: bool, fresh: bool
    ) -> None:
        if self._exchanges:  # which were sent in the backward pass
            self._agree("the step after the backward pass")
        if names and not due:
            self._agree_once(f"which of {len(names)} layers have statistics for the first time")
            flags = self._ranks.largest([float(name in batch.moments) for name in names])
            names = [name for name, flag in zip(names, flags, strict=True) if flag]
        if names and (batch.moments or not self._exchanges):
            self._start_(batch, names, fresh=fresh)
        for exchange in self._exchanges:
            self._known_bad.update(exchange.add_to_(batch))
        self._exchanges.clear()

    def drop(self) -> None:
        self.drop_sent()
        self._is_agreed, self._doing = False, {}

    def drop_sent(self) -> None:
        for exchange in self._exchanges:
            exchange.add_to_(BatchStatistics())  # the other ranks would wait for this one
        self._exchanges.clear()
        self._output_is_bad = None
        self._known_bad.clear()

    def mean_product(self, value: Tensor, examples: int, *, is_summed: bool) -> Tensor:
        own = value if is_summed else value * examples
        if not self._is_agreed and not own.dim() and own.device.type == "cpu":
            rows = self._agree("the excess of the loss", [own.item(), float(examples)])
            total, count = (own.new_tensor(sum(column)) for column in zip(*rows, strict=True))
            return total / self.size if is_summed else total / count
        self._agree_once("products with the Fisher matrix")
        both = self._ranks.start_sum([own, own.new_tensor(float(examples))], "norms").wait()
        total, count = both
        return total / self.size if is_summed else total / count

    # Numbers

    def share(self, value: Any) -> Any:
        self._agree_once("an object of rank 0")
        return self._ranks.share(value)

    def mean(self, numbers: Sequence[float]) -> list[float]:
        self._agree_once(f"{len(numbers)} numbers")
        return self._ranks.mean(numbers)

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        if not self._is_agreed and len(numbers) <= MOST_NUMBERS:
            return self._agree(f"{len(numbers)} numbers", numbers)
        self._agree_once(f"{len(numbers)} numbers")
        return self._ranks.gather(numbers)

    # Inverses

    def compute(self, names: Iterable[str], make: Callable[[str], Inverse]) -> dict[str, Inverse]:
        mine = (None, self.rank)
        return {name: make(name) for name in names if self._placements[name].owner in mine}

    def distribute(self, names: Iterable[str], own: Mapping[str, Inverse]) -> dict[str, Inverse]:
        found: dict[str, Inverse] = {}
        sent: dict[int, list[str]] = {}
        for name in names:
            owner, kept = self._placements[name]
            if owner is not None and not kept:
                sent.setdefault(owner, []).append(name)
            else:
                found[name] = own.get(name) or RemoteInverse()
        if sent:
            self._agree_once("inverses")
        widths = self._widths([name for theirs in sent.values() for name in theirs], own)
        messages = {
            owner: self._ranks.start_broadcast(
                [pack_inverse(self._layers[n], own.get(n), widths[n]) for n in theirs],
                owner,
                "inverses",
            )
            for owner, theirs in sent.items()
        }
        for owner, theirs in sent.items():
            for name, numbers in zip(theirs, messages[owner].wait(), strict=True):
                found[name] = unpack_inverse(self._layers[name], numbers, widths[name])
        return found

    def _widths(
        self, names: Sequence[str], own: Mapping[str, Inverse]
    ) -> dict[str, tuple[int, ...]]:
        """Return the sizes of inverses that only their owners know, by layer."""
        unknown = [name for name in names if self._layers[name].has_variable_inverse()]
        found: dict[str, tuple[int, ...]] = dict.fromkeys(names, ())
        if unknown:
            mine = [
                inverse.widths_of(inverse.tensors) if (inverse := own.get(name)) else (0, 0)
                for name in unknown
            ]
            widths = iter(self._ranks.largest([float(width) for pair in mine for width in pair]))
            found |= {name: (int(next(widths)), int(next(widths))) for name in unknown}
        return found

    def is_everywhere(self, name: str) -> bool:
        return not self._placements[name].kept

    def completed(self, natural: Iterable[tuple[str, Gradients]]) -> Iterator[Gradients]:
        held: list[Gradients] = []
        theirs: dict[int, list[Tensor]] = {}
        for name, gradients in natural:
            owner, kept = self._placements[name]
            if owner is None or not kept:
                yield gradients
                continue
            held.append(gradients)
            theirs.setdefault(owner, []).extend(gradients.values())
        if theirs:
            self._agree_once("natural gradients")
        messages = [
            (tensors, self._ranks.start_broadcast(tensors, owner, "natural gradients"))
            for owner, tensors in theirs.items()
        ]
        for tensors, message in messages:
            for tensor, arrived in zip(tensors, message.wait(), strict=True):
                tensor.copy_(arrived)
        yield from held
