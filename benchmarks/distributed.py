"""Time several ranks and asynchronous inverses: `python benchmarks/distributed.py --help`.

There are three tables. "ranks": images per second of one process with all cores, and of one process
per core, which share the batch. "asynchronous": the time that inverses add to a step if they are
refreshed in the step, and if a thread computes them. "traffic": bytes sent per step, by placement.
All settings of a table take turns in one run, and ratios are computed within each round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from machine import machine
from networks import NETWORKS
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import kfc
from kfc.distributed.ranks import leave_group
from kfc.schedule import longest

SECTIONS = ("ranks", "asynchronous", "traffic")
# So small that parameters hardly change: some settings never refresh their inverses.
LR = 1e-9
NEVER = 10**9
# The default periods at the end of a long run, and as many steps as the longer one.
STEPS = longest(kfc.Periods().inverse)
SETTLED = kfc.Periods(longest(kfc.Periods().statistics), STEPS)
PERIODS = (1, 2, 5, 10, 20)
PLACEMENTS = ("replicated", "shared", "gradients", "auto")

Run = Callable[[], None]


def training(
    run: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor
) -> Run:
    """Return a function that trains one step on a batch."""

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(run(images), labels).backward()
        optimizer.step()

    return step


def seconds_of(step: Run, steps: int, threads: int) -> float:
    """Return the mean time of some steps."""
    torch.set_num_threads(threads)
    step()  # starts the threads
    start = perf_counter()
    for _ in range(steps):
        step()
    return (perf_counter() - start) / steps


# Ranks


def run_ranks(function: Callable[..., Any], options: argparse.Namespace) -> Any:
    """Run a function on every rank; return what it returns on rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, (function, options, folder), options.ranks)
        return json.loads(Path(folder, "found.json").read_text())


def run_rank(
    rank: int, function: Callable[..., Any], options: argparse.Namespace, folder: str
) -> None:
    """Run a function in a process group, and leave the group when nothing uses it any more."""
    size, store = options.ranks, f"file://{folder}/store"
    dist.init_process_group("gloo", store, rank=rank, world_size=size)
    found = function(rank, size, options)
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    leave_group()


def optimizer_of(name: str, model: nn.Module, **options: Any) -> Any:
    """Return SGD, or KFC with options."""
    if name == "SGD":
        return torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    return kfc.KFC(model, lr=LR, schedule=SETTLED, **options)


def time_ranks(rank: int, size: int, options: argparse.Namespace) -> dict[str, list[float]]:
    """Time all ranks together, and in turn rank 0 alone while the others wait."""
    network = NETWORKS[options.network]
    torch.manual_seed(0)
    images, labels = network.data(options.batch, torch.device("cpu"))
    mine = slice(rank * options.batch // size, (rank + 1) * options.batch // size)
    seconds: dict[str, list[float]] = {}
    together, alone = {}, {}
    for name in ("SGD", "KFC"):
        run = DistributedDataParallel(network.model(torch.device("cpu")))
        together[name] = training(run, optimizer_of(name, run), images[mine], labels[mine])
        model = network.model(torch.device("cpu"))
        group = {"parallel": kfc.Parallel(group=None)} if name == "KFC" else {}
        alone[name] = training(model, optimizer_of(name, model, **group), images, labels)
    cores = os.cpu_count() or 1
    for turn in range(options.rounds + 1):
        for name in together:
            parallel = seconds_of(together[name], STEPS, max(1, cores // size))
            single = seconds_of(alone[name], STEPS, cores) if rank == 0 else 0.0
            dist.barrier()
            if turn:  # the first round warms up
                seconds.setdefault(f"{name}, {size} processes", []).append(parallel)
                seconds.setdefault(f"{name}, one process", []).append(single)
    return seconds


def measure_ranks(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return images per second of one process and of several ranks."""
    seconds = run_ranks(time_ranks, options)
    rows = []
    for name in ("SGD", "KFC"):
        one = seconds[f"{name}, one process"]
        many = seconds[f"{name}, {options.ranks} processes"]
        ratios = [a / b for a, b in zip(one, many, strict=True)]
        rows.append(
            {
                "optimizer": name,
                "one process": options.batch / statistics.median(one),
                f"{options.ranks} processes": options.batch / statistics.median(many),
                "ratio": statistics.median(ratios),
                "lowest": min(ratios),
                "highest": max(ratios),
            }
        )
    return rows


# Asynchronous inverses


def measure_asynchronous(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the time that inverses add to a step, by period, relative to a step without."""
    network = NETWORKS[options.network]
    torch.manual_seed(0)
    images, labels = network.data(options.batch, torch.device("cpu"))
    cores = options.threads or os.cpu_count() or 1

    def step_of(period: int, asynchronous: bool) -> Run:
        model = network.model(torch.device("cpu"))
        optimizer = kfc.KFC(
            model,
            lr=LR,
            clip=None,
            schedule=kfc.Periods(SETTLED.statistics, period),
            curvature=kfc.Kronecker(inverse=options.inverse),
            parallel=kfc.Parallel(asynchronous=asynchronous),
        )
        return training(model, optimizer, images, labels)

    never = step_of(NEVER, False)
    steps = {(p, a): step_of(p, a) for p in PERIODS for a in (False, True)}
    ratios: dict[tuple[int, bool], list[float]] = {key: [] for key in steps}
    for turn in range(options.rounds + 1):
        for key, step in steps.items():
            # Compare with steps before and after, because the load of the machine changes.
            before = seconds_of(never, STEPS // 2, cores)
            taken = seconds_of(step, STEPS, cores)
            after = seconds_of(never, STEPS // 2, cores)
            if turn:
                ratios[key].append(2 * taken / (before + after))
    return [
        {
            "inverse period": period,
            "in the step": statistics.median(ratios[period, False]) - 1,
            "asynchronous": statistics.median(ratios[period, True]) - 1,
        }
        for period in PERIODS
    ]


# Traffic


def count_traffic(rank: int, size: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Count the bytes per step that each placement sends."""
    network = NETWORKS[options.network]
    torch.set_num_threads(1)
    images, labels = network.data(8, torch.device("cpu"))
    rows = []
    for placement in PLACEMENTS:
        run = DistributedDataParallel(network.model(torch.device("cpu")))
        optimizer = optimizer_of("KFC", run, parallel=kfc.Parallel(placement=placement))
        step = training(run, optimizer, images, labels)
        step()
        before = optimizer.diagnostics["ranks"]["sent"]
        for _ in range(STEPS):
            step()
        after = optimizer.diagnostics["ranks"]["sent"]
        sent = {about: (after[about] - before.get(about, 0)) / STEPS for about in after}
        gradients = sum(p.numel() * p.element_size() for p in run.parameters())
        placed = optimizer.diagnostics["ranks"]["placement"].values()
        rows.append(
            {
                "placement": placement,
                "gradients (DDP)": gradients,
                "statistics": sent["statistics"],
                "inverses": sent.get("inverses", 0),
                "natural gradients": sent.get("natural gradients", 0),
                "layers: everywhere, sent, kept": [
                    sum(p["owner"] is None for p in placed),
                    sum(p["owner"] is not None and not p["kept"] for p in placed),
                    sum(p["kept"] for p in placed),
                ],
            }
        )
        optimizer.close()
    return rows


def measure_traffic(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the bytes per step that each placement sends."""
    rows: list[dict[str, Any]] = run_ranks(count_traffic, options)
    return rows


# The command


def show(title: str, rows: list[dict[str, Any]]) -> None:
    """Print a table as markdown."""
    print(f"\n{title}\n")
    print("| " + " | ".join(rows[0]) + " |")
    print("|" + "---|" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(_cell(value) for value in row.values()) + " |")


def _cell(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) and abs(value) < 1000 else f"{value}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--network", choices=NETWORKS, default="cifar10")
    parser.add_argument("--batch", type=int, default=512, help="of all ranks together")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--inverse", choices=("factored", "eigen"), default="factored")
    parser.add_argument(
        "--threads", type=int, help="threads of training with asynchronous inverses; default: all"
    )
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    options = parser.parse_args()
    measures = {
        "ranks": measure_ranks,
        "asynchronous": measure_asynchronous,
        "traffic": measure_traffic,
    }
    found: dict[str, Any] = {"machine": machine(torch.device("cpu")), "options": str(options)}
    for section in options.sections:
        found[section] = measures[section](options)
        show(section, found[section])
    if options.out:
        options.out.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
