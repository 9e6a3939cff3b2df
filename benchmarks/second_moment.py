"""Times of patch moments, compared with unfold-and-multiply."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import Tensor

import kfc


@dataclass(frozen=True)
class Case:
    """A convolution with "same" padding on square maps."""

    batch: int
    channels: int
    size: int
    kernel: int

    def __str__(self) -> str:
        return f"{self.channels}x{self.size}x{self.size} k{self.kernel}, batch {self.batch}"

    def inputs(self) -> Tensor:
        maps = torch.randn(self.batch, self.channels, self.size, self.size)
        return maps.to(memory_format=torch.channels_last)


CASES = [
    Case(512, 3, 32, 5),
    Case(512, 32, 16, 5),
    Case(512, 32, 8, 5),
    Case(512, 16, 14, 7),
    Case(128, 48, 27, 5),
    Case(512, 64, 8, 3),
    Case(512, 128, 16, 3),
]

GROWTH = {
    "batch": [Case(n, 32, 16, 3) for n in (1024, 2048, 4096, 8192)],
    "channels": [Case(32, c, 16, 3) for c in (64, 128, 256, 512)],
    "map size (pixels)": [Case(64, 32, s, 3) for s in (16, 32, 64, 128)],
}


def unfold_and_multiply(inputs: Tensor, kernel: int) -> Tensor:
    """Return the second moment as other libraries do, without the homogeneous coordinate."""
    columns = F.unfold(inputs, kernel, padding=kernel // 2)
    rows = columns.transpose(1, 2).reshape(-1, columns.shape[1])
    return rows.T @ rows / len(inputs)


def fast(inputs: Tensor, kernel: int) -> Tensor:
    return kfc.moments.second_moment(inputs, kernel, padding=kernel // 2, bias=False)


METHODS: dict[str, Callable[[Tensor, int], Tensor]] = {"unfold": unfold_and_multiply, "kfc": fast}


def measure(case: Case, repeats: int) -> dict[str, list[float]]:
    """Return milliseconds of both methods, interleaved, after one round to warm up."""
    inputs = case.inputs()
    times: dict[str, list[float]] = {name: [] for name in METHODS}
    for turn in range(repeats + 1):
        for name, method in METHODS.items():
            start = perf_counter()
            method(inputs, case.kernel)
            if turn:
                times[name].append(1000 * (perf_counter() - start))
    return times


def error(case: Case) -> float:
    """Return the largest difference from float64, relative to the largest entry."""
    inputs = case.inputs()[:32]
    true = unfold_and_multiply(inputs.double(), case.kernel)
    return float((fast(inputs, case.kernel) - true).abs().max() / true.abs().max())


def slope(sizes: list[float], times: list[float]) -> float:
    """Return the slope of the least-squares line through the logarithms."""
    x, y = [math.log(s) for s in sizes], [math.log(t) for t in times]
    return statistics.linear_regression(x, y).slope


def amount(case: Case, what: str) -> float:
    return {"batch": case.batch, "channels": case.channels}.get(what, case.size**2)


@dataclass(frozen=True)
class Growth:
    """Times by size, and the slopes of their logarithms."""

    what: str
    sizes: list[float]
    milliseconds: dict[str, list[float]]

    @property
    def slopes(self) -> dict[str, float]:
        return {name: slope(self.sizes, times) for name, times in self.milliseconds.items()}


def measure_growth(what: str, repeats: int) -> Growth:
    measured = [measure(case, repeats) for case in GROWTH[what]]
    return Growth(
        what,
        [amount(case, what) for case in GROWTH[what]],
        {name: [statistics.median(times[name]) for times in measured] for name in METHODS},
    )
