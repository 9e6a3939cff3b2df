"""Time and memory of steps as networks grow: `python benchmarks/scaling.py --help`.

The network is a stack of 3x3 convolutions between a stem and a linear layer. Its width, depth,
batch and resolution grow one at a time. All methods take turns in one process, and medians are
shown. SOAP and Shampoo refresh every tenth step and are timed over such cycles. KFC is timed with
nothing due, and in steps that refresh statistics and inverses; its time in the long run follows
from these and from how often its default settings refresh. Slopes are those of log time against
log size, over all sizes and over the larger half.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
from machine import machine, peak_bytes
from methods import AMORTISED, LR, NEVER, Step, pytorch_optimizer, sgd, usual
from second_moment import slope
from torch import Tensor, nn

import kfc
from kfc.schedule import longest


class Size(NamedTuple):
    """The size of a network and of its batch."""

    width: int = 128
    depth: int = 2
    batch: int = 32
    resolution: int = 8

    def model(self) -> nn.Module:
        layers: list[nn.Module] = [nn.Conv2d(3, self.width, 3, padding=1), nn.ReLU()]
        for _ in range(self.depth):
            layers += [nn.Conv2d(self.width, self.width, 3, padding=1), nn.ReLU()]
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(self.width, 10)]
        return nn.Sequential(*layers).to(memory_format=torch.channels_last)

    def data(self) -> tuple[Tensor, Tensor]:
        images = torch.randn(self.batch, 3, self.resolution, self.resolution)
        labels = torch.randint(10, (self.batch,))
        return images.to(memory_format=torch.channels_last), labels


GROWTH: dict[str, list[Any]] = {
    "width": [64, 128, 256, 512, 1024],
    "depth": [2, 4, 8, 16],
    "batch": [16, 32, 64, 128, 256],
    "resolution": [4, 8, 16, 32],
}
RIVALS = {
    "SOAP": pytorch_optimizer("SOAP", precondition_frequency=AMORTISED),
    "Shampoo": pytorch_optimizer("Shampoo", preconditioning_compute_steps=AMORTISED),
}


class Method(NamedTuple):
    """How a method is built, and the steps after which its work repeats."""

    build: Callable[[nn.Module], Step]
    cycle: int = 1


def our_step(period: int) -> Callable[[nn.Module], Step]:
    """Return KFC whose statistics and inverses have a period, without exact norms."""
    schedule = kfc.Periods(period, period)
    return lambda model: usual(model, kfc.KFC(model, lr=LR, schedule=schedule, clip=None))


METHODS = {
    "SGD": Method(lambda model: usual(model, sgd(model))),
    "KFC, nothing due": Method(our_step(NEVER)),
    "KFC, refresh": Method(our_step(1)),
    **{name: Method(build, AMORTISED) for name, build in RIVALS.items()},
}


def seconds_by_method(size: Size, repeats: int) -> dict[str, float]:
    """Return the median time of a step of every method that can be imported."""
    images, labels = size.data()
    steps: dict[str, Step] = {}
    for name, method in METHODS.items():
        try:
            steps[name] = method.build(size.model())
        except ImportError as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(1 + repeats):
        for name, step in steps.items():
            cycle = METHODS[name].cycle
            start = perf_counter()
            for _ in range(cycle):
                step(images, labels)
            if turn:  # the first round warms up
                times[name].append((perf_counter() - start) / cycle)
    return {name: statistics.median(values) for name, values in times.items()}


def refreshes_per_step(size: Size) -> float:
    """Return how often the default settings refresh in the long run."""
    optimizer = kfc.KFC(size.model())
    usual(optimizer.model, optimizer)(*size.data())
    rate = optimizer.engine.allowance.rate()
    assert rate is not None
    return min(rate, 1 / longest(kfc.Periods().statistics))


def mebibytes(build: Callable[[nn.Module], Step], size: Size) -> float:
    """Return the peak of memory in three steps."""

    def three_steps() -> None:
        step, batch = build(size.model()), size.data()
        for _ in range(3):
            step(*batch)

    return peak_bytes(three_steps) / 2**20


def measure(what: str, repeats: int, largest: float) -> dict[str, Any]:
    """Return times and memory as one size grows, up to a largest one."""
    times: dict[str, list[float]] = {}
    memory: dict[str, list[float]] = {}
    sizes = [value for value in GROWTH[what] if value <= largest]
    for value in sizes:
        size = Size(**{what: value})
        found = seconds_by_method(size, repeats)
        idle, refresh = found["KFC, nothing due"], found["KFC, refresh"]
        found["KFC"] = idle + refreshes_per_step(size) * max(0.0, refresh - idle)
        for name, seconds in found.items():
            times.setdefault(name, []).append(1000 * seconds)
        builds = {"SGD": METHODS["SGD"].build, "KFC": our_step(1)}
        builds |= {name: RIVALS[name] for name in RIVALS if name in found}
        for name, build in builds.items():
            memory.setdefault(name, []).append(mebibytes(build, size))
        print(f"{what} {value}", file=sys.stderr, flush=True)
    return {"what": what, "sizes": sizes, "milliseconds": times, "mebibytes": memory}


def show(found: dict[str, Any]) -> None:
    """Print times, memory and slopes as markdown."""
    sizes, half = found["sizes"], len(found["sizes"]) // 2
    for unit in ("milliseconds", "mebibytes"):
        head = [f"{found['what']}: {unit}", *map(str, sizes), "slope", f"from {sizes[half]}"]
        print("", f"| {' | '.join(head)} |", "|---" * len(head) + "|", sep="\n")
        for name, values in found[unit].items():
            cells = [f"{value:.3g}" for value in values]
            slopes = [slope(sizes, values), slope(sizes[half:], values[half:])]
            print(f"| {' | '.join([name, *cells, *(f'{s:.2f}' for s in slopes)])} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--growth", nargs="+", choices=GROWTH, default=list(GROWTH))
    parser.add_argument("--repeats", type=int, default=3, help="the number of timed rounds")
    parser.add_argument("--largest", type=float, default=math.inf, help="leave out larger sizes")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(", ".join(f"{k} {v}" for k, v in machine(torch.device("cpu")).items()))
    found = []
    for what in options.growth:
        found.append(measure(what, options.repeats, options.largest))
        show(found[-1])
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
