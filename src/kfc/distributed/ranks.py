"""Collectives of the processes that train one model together.

A *rank* is one of these processes. With a single process, every method returns its argument and
sends nothing.
"""

from __future__ import annotations

import gc
import io
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from kfc._helpers import group_timeout, is_in_join
from kfc.distributed.options import Group

if dist.is_available():
    # If torch imports this module while there is a group, as the first wrapper makes it do, the
    # defaults of its functions refer to the group for ever, and threads of gloo do not end.
    import torch.distributed.nn.functional

# Large enough for few calls, small enough to send one bucket while the next is packed.
BUCKET_BYTES = 25 * 2**20


class CollectiveError(RuntimeError):
    """A collective that failed, or found that the ranks have diverged.

    The message names the collective, the step and this rank, and quotes the backend, whose own
    error is the cause of this one.
    """


class Ranks:
    """The ranks of a process group, which share a model and each have a part of the batch.

    All ranks create it, and call its methods, in the same order. A collective fails after the
    timeout of the process group; gloo groups check on creation that all ranks are there.

    Args:
        group: the process group; ``None`` for a single process.
        device: the model's device, from which numbers are sent if the group's backend does not
            support CPU tensors.
        wrapper: the module that averages the gradients, if known.

    Attributes:
        rank: the rank of this process in the group.
        size: the number of ranks.
        traffic: bytes of all messages so far, by subject. A message counts once, however many
            ranks receive it.
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
        self._step: int | None = None
        # From the CPU where the group's backend supports it.
        cpu = group is None or "cpu" in str(dist.get_backend_config(group))
        self._number_device = torch.device("cpu") if cpu else device
        if group is not None and self.size > 1 and dist.get_backend(group) == dist.Backend.GLOO:
            # Wait for every rank; on rank 0, the error names those that do not come.
            with self.naming_errors("monitored_barrier"):
                dist.monitored_barrier(group, timeout=group_timeout(group), wait_all_ranks=True)

    def are_accumulating(self) -> bool:
        """Return whether the next backward pass only accumulates gradients, without averaging."""
        if self.wrapper is None:
            return False
        if is_in_join(self.wrapper):
            raise RuntimeError(
                "kfc does not support DistributedDataParallel.join(): a rank without batches has "
                "no statistics to contribute; give all ranks the same number of batches"
            )
        return not self.wrapper.require_backward_grad_sync

    # Tensors

    def start_sum(self, tensors: Sequence[Tensor], about: str) -> Messages | Arrived:
        """Start to sum each tensor over all ranks, without waiting for the result."""
        return self._start("all_reduce", tensors, about)

    def start_broadcast(
        self, tensors: Sequence[Tensor], source: int, about: str
    ) -> Messages | Arrived:
        """Start to send the tensors of rank ``source`` to all ranks, without waiting."""
        return self._start("broadcast", tensors, about, group_src=source)

    def _start(
        self, collective: str, tensors: Sequence[Tensor], about: str, **options: int
    ) -> Messages | Arrived:
        if self.size == 1:
            return Arrived(tensors)
        buckets = _in_buckets(tensors, self._number_device)
        self.traffic[about] += sum(flat.nbytes for flat, _ in buckets)
        naming_errors = partial(self.naming_errors, f"{collective} of {about}")
        with naming_errors():
            start = partial(getattr(dist, collective), group=self.group, async_op=True, **options)
            works = [start(flat) for flat, _ in buckets]
        likes = [(tensor.shape, tensor.device) for tensor in tensors]
        return Messages(buckets, likes, works, naming_errors)

    # Numbers and small objects

    def sum(self, numbers: Sequence[float], about: str = "numbers") -> list[float]:
        """Return the sum of each number over all ranks, in float64."""
        return self._reduce(numbers, dist.ReduceOp.SUM, about)

    def mean(self, numbers: Sequence[float], about: str = "numbers") -> list[float]:
        """Return the mean of each number over all ranks."""
        return [number / self.size for number in self.sum(numbers, about)]

    def largest(self, numbers: Sequence[float], about: str = "numbers") -> list[float]:
        """Return the maximum of each number over all ranks."""
        return self._reduce(numbers, dist.ReduceOp.MAX, about)

    def any(self, flag: bool, about: str = "numbers") -> bool:
        """Return whether the flag is true on any rank."""
        return bool(self.largest([float(flag)], about)[0])

    def _reduce(self, numbers: Sequence[float], operation: Any, about: str) -> list[float]:
        if self.size == 1:
            return list(numbers)
        values = torch.tensor(numbers, dtype=torch.float64, device=self._number_device)
        self.traffic[about] += values.nbytes
        with self.naming_errors(f"all_reduce of {about}"):
            dist.all_reduce(values, operation, group=self.group)
        result: list[float] = values.tolist()
        return result

    def gather(self, numbers: Sequence[float], about: str = "numbers") -> list[list[float]]:
        """Return the numbers of every rank, in the order of the ranks."""
        if self.size == 1:
            return [list(numbers)]
        # A sum in which each rank fills its own row: needs no other collective.
        rows = [[0.0] * len(numbers) for _ in range(self.size)]
        rows[self.rank] = list(numbers)
        flat = self.sum([number for row in rows for number in row], about)
        return [flat[i : i + len(numbers)] for i in range(0, len(flat), len(numbers))]

    def gather_text(self, text: str, about: str = "checks") -> list[str]:
        """Return the texts of every rank, in the order of the ranks."""
        data = text.encode()
        lengths = [int(length) for (length,) in self.gather([float(len(data))], about)]
        rows = torch.zeros(self.size, max(lengths), dtype=torch.uint8)
        rows[self.rank, : len(data)] = torch.tensor(list(data), dtype=torch.uint8)
        [rows] = self.start_sum([rows], about).wait()
        pairs = zip(rows.tolist(), lengths, strict=True)
        return [bytes(row[:length]).decode() for row, length in pairs]

    def share(self, value: Any, about: str = "objects") -> Any:
        """Return rank 0's value: numbers, strings, tensors, and containers of them."""
        if self.size == 1:
            return value
        content = io.BytesIO()
        if self.rank == 0:
            torch.save(value, content)
        length = int(self.sum([float(content.getbuffer().nbytes)], about)[0])
        data = torch.zeros(length, dtype=torch.uint8)
        if self.rank == 0:
            data.copy_(torch.frombuffer(content.getbuffer(), dtype=torch.uint8))
        [data] = self.start_broadcast([data], 0, about).wait()
        if self.rank == 0:
            return value
        received = bytearray(length)
        torch.frombuffer(received, dtype=torch.uint8).copy_(data)
        return torch.load(io.BytesIO(received), map_location="cpu", weights_only=True)

    def leave(self) -> None:
        """Leave the default process group, after all ranks have come to their end."""
        self.any(False)
        self.group = self.wrapper = None
        leave_group(together=False)

    # Errors

    def at(self, step: int) -> None:
        """Set the step that errors of collectives name."""
        self._step = step

    @contextmanager
    def naming_errors(self, collective: str) -> Iterator[None]:
        """Raise a ``CollectiveError`` that names the collective in place of a RuntimeError."""
        try:
            yield
        except RuntimeError as error:
            where, hint = "before the first step", "The output of the other ranks may say why."
            if self._step is not None:
                where = f"at step {self._step}"
                hint += " If it does not, check that all ranks have the same number of batches."
            reason = str(error).strip().partition("\n")[0].rstrip(".")
            raise CollectiveError(
                f"rank {self.rank} of {self.size}: {collective} failed {where}: {reason}. {hint}"
            ) from error


class Arrived(NamedTuple):
    """Tensors of a single process, which sends nothing."""

    tensors: Sequence[Tensor]

    def wait(self) -> list[Tensor]:
        return list(self.tensors)


class Messages(NamedTuple):
    """Tensors on their way to all ranks, packed into a few flat buckets.

    Attributes:
        buckets: vectors, each with the indices of the tensors that it concatenates.
        likes: the shape and device of every tensor.
        works: the collectives in progress.
        naming_errors: returns the context in which to wait for them.
    """

    buckets: Sequence[tuple[Tensor, list[int]]]
    likes: Sequence[tuple[torch.Size, torch.device]]
    works: Sequence[dist.Work | None]
    naming_errors: Callable[[], AbstractContextManager[None]]

    def wait(self) -> list[Tensor]:
        """Return the received tensors, as views of the buckets where devices allow it."""
        with self.naming_errors():
            for work in self.works:
                if work is not None:
                    work.wait()
        arrived: dict[int, Tensor] = {}
        for flat, indices in self.buckets:
            parts = flat.split([self.likes[index][0].numel() for index in indices])
            for index, part in zip(indices, parts, strict=True):
                shape, device = self.likes[index]
                arrived[index] = part.view(shape).to(device)
        return [arrived[index] for index in range(len(self.likes))]


def _in_buckets(
    tensors: Sequence[Tensor], number_device: torch.device | None
) -> list[tuple[Tensor, list[int]]]:
    """Return vectors, each with the indices of the tensors that it concatenates.

    The tensors of a vector have one dtype and device. Its size is at most ``BUCKET_BYTES``, unless
    a single tensor is larger.

    Args:
        number_device: the device from which CPU tensors are sent.
    """
    open_buckets: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    buckets: list[list[int]] = []
    bytes_in: Counter[tuple[torch.dtype, torch.device]] = Counter()
    for index, tensor in enumerate(tensors):
        kind = tensor.dtype, tensor.device
        if kind not in open_buckets or bytes_in[kind] + tensor.nbytes > BUCKET_BYTES:
            open_buckets[kind] = []
            buckets.append(open_buckets[kind])
            bytes_in[kind] = 0
        open_buckets[kind].append(index)
        bytes_in[kind] += tensor.nbytes
    flat = [torch.cat([tensors[i].flatten() for i in chosen]) for chosen in buckets]
    sent = [vector.to(number_device) if vector.device.type == "cpu" else vector for vector in flat]
    return list(zip(sent, buckets, strict=True))


def join_ranks(model: nn.Module, choice: Group) -> tuple[nn.Module, Ranks]:
    """Return the model without its DistributedDataParallel wrapper, and its ranks.

    Args:
        choice: the ``group`` of ``kfc.Parallel``.
    """
    group = None if choice == "auto" else choice
    wrapper: DistributedDataParallel | None = None
    if isinstance(model, DistributedDataParallel):
        if choice is None:
            raise ValueError(
                "group=None means a single process, but the model is wrapped in "
                "DistributedDataParallel; pass the module inside it, model.module"
            )
        group, wrapper, model = group or model.process_group, model, model.module
    elif choice == "auto" and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    if group is None or group.size() == 1:
        return model, Ranks(None)
    parameter = next(model.parameters(), None)
    return model, Ranks(group, None if parameter is None else parameter.device, wrapper)


def leave_group(*, together: bool = True) -> None:
    """Leave the default process group, and end its threads.

    The threads of gloo end with the last reference to the group. If they still run when the
    interpreter ends, one that releases a Python object then aborts the process ("terminate called
    without an active exception"). Therefore, call this when no variable refers any more to what
    uses the group, such as a wrapper or an optimizer.

    Args:
        together: wait for all ranks first, so that none finds its connections closed.
    """
    gc.collect()  # wrappers and optimizers are in cycles of references
    if together:
        dist.barrier()
    dist.destroy_process_group()
