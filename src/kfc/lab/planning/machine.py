"""Measured constants of a machine: how fast it multiplies, decomposes, copies and sends."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from kfc.distributed.ranks import leave_group

# The width of measured matrices, and the entries of measured messages.
WIDTH, ENTRIES = 1024, 4 * 2**20
REPEATS = 5
# The small operations that are measured together.
OPERATIONS = 1000


@dataclass(frozen=True)
class Machine:
    """What one rank can do, and how fast ranks exchange messages.

    Attributes:
        products: multiply-adds per second of large matrix products.
        decompositions: multiply-adds per second of Cholesky decompositions, n³ / 3 each.
        memory: bytes per second that are copied.
        network: bytes per second that a rank sends.
        latency: seconds until a short message arrives.
        start: seconds to start an operation, which a small one takes.
    """

    products: float
    decompositions: float
    memory: float
    network: float
    latency: float
    start: float


def seconds_of(function: Callable[[], object], repeats: int = REPEATS) -> float:
    """Return the median time of a function after a first call."""
    function()
    times = []
    for _ in range(repeats):
        start = perf_counter()
        function()
        times.append(perf_counter() - start)
    return median(times)


def measure_machine(network: float | None = None, latency: float | None = None) -> Machine:
    """Measure this machine with torch's current number of threads.

    Args:
        network, latency: what is known of the network between ranks; by default that between two
            processes on this machine is measured.
    """
    matrix = torch.randn(WIDTH, WIDTH)
    definite = matrix @ matrix.mT + WIDTH * torch.eye(WIDTH)
    target, source, small = torch.empty(ENTRIES), torch.ones(ENTRIES), torch.ones(8)
    if network is None or latency is None:
        found = measure_network()
        network, latency = network or found[0], found[1] if latency is None else latency
    return Machine(
        products=WIDTH**3 / seconds_of(lambda: matrix @ matrix),
        decompositions=WIDTH**3 / 3 / seconds_of(lambda: torch.linalg.cholesky(definite)),
        memory=source.nbytes / seconds_of(lambda: target.copy_(source)),
        network=network,
        latency=latency,
        start=seconds_of(lambda: [small.add(1) for _ in range(OPERATIONS)]) / OPERATIONS,
    )


def measure_network() -> tuple[float, float]:
    """Return bytes per second and the latency of sums over two processes on this machine."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_time_messages, (folder,), nprocs=2)
        large, small = map(float, Path(folder, "seconds").read_text().split())
    # A sum of two ranks sends every entry once in each direction.
    return 4 * ENTRIES / max(1e-9, large - small), small / 2


def _time_messages(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    torch.set_num_threads(1)
    large, small = torch.ones(ENTRIES), torch.ones(1)
    seconds = [seconds_of(partial(dist.all_reduce, each)) for each in (large, small)]
    if rank == 0:
        Path(folder, "seconds").write_text(" ".join(map(str, seconds)))
    leave_group()
