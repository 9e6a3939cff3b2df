"""The processes that train one model together, and what they tell each other.

One process alone is a case of it: there, every method returns its argument and sends nothing.
"""

from __future__ import annotations

import io
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from kfc.distributed.watch import start_watch

# Large enough for few calls, small enough that the first is on its way while the next is packed.
BUCKET_BYTES = 25 * 2**20

# As text: torch may have been built without process groups.
GroupChoice: TypeAlias = "dist.ProcessGroup | Literal['auto'] | None"


class WorkerError(RuntimeError):
    """A collective failed; the message says which rank is the cause, as far as that is known."""


class Workers:
    """The ranks of a process group, all with the same model and each with its part of the batch.

    All ranks call the same methods in the same order.

    Args:
        group: ``None`` for one process alone.
        device: of the model; where numbers are sent from if the group's backend has no CPU tensors.
        wrapper: what averages the gradients, if that is known.

    Attributes:
        traffic: bytes of all messages so far, by what they were about. A message counts once,
            however many ranks it goes to: how often it is sent is the backend's affair.
        watch: which rank is the cause of a fault; ``None`` for one process, or if none can tell.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device | None = None,
        wrapper: DistributedDataParallel | None = None,
    ) -> None:
        self.group = group
        self.wrapper = wrapper
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        self.traffic: Counter[str] = Counter()
        self._home = _home_of_numbers(group, device)
        self.watch = None if group is None or self.size == 1 else start_watch(group)
        if self.watch is not None:
            # At the end of the process the watch knows more about the reason.
            weakref.finalize(self, self.watch.retire).atexit = False

    def are_accumulating(self) -> bool:
        """Whether the coming backward only adds to the gradients, without averaging them yet."""
        if self.wrapper is None:
            return False
        if self.wrapper._join_config.enable:
            raise RuntimeError(
                "kfc does not support DistributedDataParallel.join(): a rank without batches has "
                "no statistics to give; let all ranks have the same number of batches"
            )
        return not self.wrapper.require_backward_grad_sync

    # Tensors

    def start_sum(self, tensors: Sequence[Tensor], about: str) -> Arriving:
        """Begin to sum each of these over all ranks; the ranks go on meanwhile."""
        if self.size == 1:
            return Arrived(tensors)
        messages = self._pack(tensors, about)
        with self.explained():
            for flat in messages.buckets:
                messages.add(dist.all_reduce(flat, group=self.group, async_op=True))
        return messages

    def start_broadcast(self, tensors: Sequence[Tensor], source: int, about: str) -> Arriving:
        """Begin to give all ranks what these are on rank ``source``."""
        if self.size == 1:
            return Arrived(tensors)
        messages = self._pack(tensors, about)
        with self.explained():
            for flat in messages.buckets:
                work = dist.broadcast(flat, group_src=source, group=self.group, async_op=True)
                messages.add(work)
        return messages

    def _pack(self, tensors: Sequence[Tensor], about: str) -> Messages:
        messages = Messages(_in_buckets(tensors, self._home), tensors, self)
        self.traffic[about] += sum(flat.nbytes for flat in messages.buckets)
        return messages

    # Numbers, and whatever else is small

    def sum(self, numbers: Sequence[float], about: str = "numbers") -> list[float]:
        """Of each number over all ranks, in float64."""
        return self._reduce(numbers, dist.ReduceOp.SUM, about)

    def mean(self, numbers: Sequence[float], about: str = "numbers") -> list[float]:
        return [number / self.size for number in self.sum(numbers, about)]

    def largest(self, numbers: Sequence[float], about: str = "numbers") -> list[float]:
        return self._reduce(numbers, dist.ReduceOp.MAX, about)

    def any(self, flag: bool, about: str = "numbers") -> bool:
        """Whether it is true on any rank."""
        return bool(self.largest([float(flag)], about)[0])

    def _reduce(self, numbers: Sequence[float], how: Any, about: str) -> list[float]:
        if self.size == 1:
            return list(numbers)
        values = torch.tensor(numbers, dtype=torch.float64, device=self._home)
        self.traffic[about] += values.nbytes
        with self.explained():
            dist.all_reduce(values, how, group=self.group)
        result: list[float] = values.tolist()
        return result

    def gather(self, numbers: Sequence[float], about: str = "numbers") -> list[list[float]]:
        """The numbers of every rank."""
        if self.size == 1:
            return [list(numbers)]
        # Each rank in its own place of a sum: unlike all_gather, a case of what is there already.
        places = [[0.0] * len(numbers) for _ in range(self.size)]
        places[self.rank] = list(numbers)
        flat = self.sum([number for place in places for number in place], about)
        return [flat[i : i + len(numbers)] for i in range(0, len(flat), len(numbers))]

    def share(self, value: Any, about: str = "objects") -> Any:
        """What rank 0 has: numbers, strings, tensors, and containers of them."""
        if self.size == 1:
            return value
        content = io.BytesIO()
        if self.rank == 0:
            torch.save(value, content)
        length = int(self.sum([float(content.getbuffer().nbytes)], about)[0])
        data = torch.zeros(length, dtype=torch.uint8)
        if self.rank == 0:
            data.copy_(torch.frombuffer(content.getbuffer(), dtype=torch.uint8))
        data = data.to(self._home)
        self.traffic[about] += length
        with self.explained():
            dist.broadcast(data, group_src=0, group=self.group)
        if self.rank == 0:
            return value
        received = bytearray(length)
        torch.frombuffer(received, dtype=torch.uint8).copy_(data)
        return torch.load(io.BytesIO(received), map_location="cpu", weights_only=True)

    # Faults

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Let errors of collectives say which rank is the cause."""
        try:
            yield
        except RuntimeError as error:
            cause = "" if self.watch is None else f"{self.watch.explain()}\n"
            raise WorkerError(f"rank {self.rank} of {self.size}: {cause}{error}") from error

    def at(self, step: int) -> None:
        """Note the step that this rank is in, for ranks that wonder where it is."""
        if self.watch is not None:
            self.watch.at(step)

    def close(self) -> None:
        """Tell the other ranks that this one takes no further part."""
        if self.watch is not None:
            self.watch.close()


class Arriving(Protocol):
    """What :meth:`wait` will give."""

    def wait(self) -> list[Tensor]:
        """The tensors that have arrived, in the order in which they were given."""


class Arrived(NamedTuple):
    """What one process alone sends itself."""

    tensors: Sequence[Tensor]

    def wait(self) -> list[Tensor]:
        return list(self.tensors)


class Messages:
    """Tensors on their way to all ranks, in a few flat buckets.

    Attributes:
        buckets: one vector each, of one dtype and device.
    """

    def __init__(
        self,
        buckets: Sequence[tuple[Tensor, list[int]]],
        tensors: Sequence[Tensor],
        workers: Workers,
    ) -> None:
        self.buckets = [flat for flat, _ in buckets]
        self._places = [indices for _, indices in buckets]
        self._like = [(tensor.shape, tensor.device) for tensor in tensors]
        self._workers = workers
        self._works: list[dist.Work] = []

    def add(self, work: dist.Work | None) -> None:
        if work is not None:
            self._works.append(work)

    def wait(self) -> list[Tensor]:
        """The tensors that have arrived, as parts of the buckets."""
        with self._workers.explained():
            for work in self._works:
                work.wait()
        arrived: dict[int, Tensor] = {}
        for flat, indices in zip(self.buckets, self._places, strict=True):
            likes = [self._like[index] for index in indices]
            parts = flat.split([shape.numel() for shape, _ in likes])
            for index, part, (shape, device) in zip(indices, parts, likes, strict=True):
                arrived[index] = part.view(shape).to(device)
        return [arrived[index] for index in range(len(self._like))]


def _in_buckets(
    tensors: Sequence[Tensor], home: torch.device | None
) -> list[tuple[Tensor, list[int]]]:
    """(vector, which tensors it consists of): alike in dtype and device, of limited size.

    Args:
        home: where numbers on the CPU are sent from.
    """
    open_buckets: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    buckets: list[list[int]] = []
    bytes_in: dict[tuple[torch.dtype, torch.device], int] = {}
    for index, tensor in enumerate(tensors):
        kind = tensor.dtype, tensor.device
        if kind not in open_buckets or bytes_in[kind] + tensor.nbytes > BUCKET_BYTES:
            open_buckets[kind] = []
            buckets.append(open_buckets[kind])
            bytes_in[kind] = 0
        open_buckets[kind].append(index)
        bytes_in[kind] += tensor.nbytes
    flat = [torch.cat([tensors[i].flatten() for i in chosen]) for chosen in buckets]
    sent = [vector.to(home) if vector.device.type == "cpu" else vector for vector in flat]
    return list(zip(sent, buckets, strict=True))


def join_workers(model: nn.Module, choice: GroupChoice) -> tuple[nn.Module, Workers]:
    """The model itself, out of its wrapper, and the ranks that it is trained by.

    Args:
        choice: a process group; "auto": that of the wrapper, or torch's default group where
            torch.distributed is in use; ``None``: this process alone.
    """
    group: dist.ProcessGroup | None = None
    wrapper: DistributedDataParallel | None = None
    if isinstance(model, DistributedDataParallel):
        if choice is None:
            raise ValueError(
                "process_group=None, one process alone, but the model is wrapped in "
                "DistributedDataParallel; pass the module inside it, model.module"
            )
        wrapper, group, model = model, model.process_group, model.module
    if choice is not None and choice != "auto":
        if not (dist.is_available() and isinstance(choice, dist.ProcessGroup)):
            raise ValueError(
                f'process_group must be a torch.distributed group, "auto" or None, got {choice!r}'
            )
        group = choice
    elif choice == "auto" and group is None:
        group = _default_group()
    parameter = next(model.parameters(), None)
    device = None if parameter is None else parameter.device
    if group is None or group.size() == 1:
        return model, Workers(None)
    return model, Workers(group, device, wrapper)


def _default_group() -> dist.ProcessGroup | None:
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def refuse_later_group(workers: Workers, choice: GroupChoice) -> None:
    """Raise if a process group has come into being since the ranks were asked for.

    Gradients may now be averaged over its ranks, while each has a curvature of its own.
    """
    group = _default_group() if choice == "auto" and workers.size == 1 else None
    if group is not None and group.size() > 1:
        raise RuntimeError(
            "torch.distributed was initialised after the optimizer was made, which knows of one "
            "process only; make it afterwards, or with process_group=None to train alone"
        )


def _home_of_numbers(
    group: dist.ProcessGroup | None, device: torch.device | None
) -> torch.device | None:
    """The CPU, if the group's backend sends from there; else the model's device."""
    if group is None or "cpu" in str(dist.get_backend_config(group)):
        return torch.device("cpu")
    return device
