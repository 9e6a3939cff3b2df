"""How long patch moments take, against unfold-and-multiply: `python benchmarks/second_moment.py`.

Both methods take turns in one run; times are medians with their quartiles. The growth of each in
batch, channels and map size is the slope of log time against log size.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
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
    "batch": [Case(n, 16, 16, 3) for n in (64, 128, 256, 512)],
    "channels": [Case(128, c, 16, 3) for c in (32, 64, 128, 256)],
    "map size (pixels)": [Case(128, 16, s, 3) for s in (8, 16, 32, 64)],
}


def unfold_and_multiply(inputs: Tensor, kernel: int) -> Tensor:
    """What every other library does; the rows' leading 1 left out."""
    columns = F.unfold(inputs, kernel, padding=kernel // 2)
    rows = columns.transpose(1, 2).reshape(-1, columns.shape[1])
    return rows.T @ rows / len(inputs)


def fast(inputs: Tensor, kernel: int) -> Tensor:
    return kfc.patches.second_moment(inputs, kernel, padding=kernel // 2, bias=False)


METHODS: dict[str, Callable[[Tensor, int], Tensor]] = {"unfold": unfold_and_multiply, "kfc": fast}


def measure(case: Case, repeats: int) -> dict[str, list[float]]:
    """Milliseconds of each method, the two interleaved, after one round to warm up."""
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
    """The largest difference from float64, relative to the largest entry."""
    inputs = case.inputs()[:32]
    true = unfold_and_multiply(inputs.double(), case.kernel)
    return float((fast(inputs, case.kernel) - true).abs().max() / true.abs().max())


def slope(sizes: list[float], times: list[float]) -> float:
    """Of the least-squares line through the logarithms."""
    x, y = [math.log(s) for s in sizes], [math.log(t) for t in times]
    return statistics.linear_regression(x, y).slope


def amount(case: Case, what: str) -> float:
    return {"batch": case.batch, "channels": case.channels}.get(what, case.size**2)


def processor() -> str:
    """What the system calls it; Linux tells in a file."""
    try:
        with open("/proc/cpuinfo") as file:
            names = [
                line.split(":", 1)[1].strip() for line in file if line.startswith("model name")
            ]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", help="also write the numbers to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    machine = f"torch {torch.__version__}, {arguments.threads} threads, {processor()}"
    print(
        f"{machine}\n\n| case | unfold ms | kfc ms | ratio | kfc's error |\n|---|---|---|---|---|"
    )
    results: list[dict[str, object]] = []
    for case in CASES:
        times = measure(case, arguments.repeats)
        low, middle, high = statistics.quantiles(times["kfc"], n=4)
        plain = statistics.median(times["unfold"])
        wrong = error(case)
        print(
            f"| {case} | {plain:.0f} | {middle:.1f} ({low:.1f} to {high:.1f}) | "
            f"{plain / middle:.1f} | {wrong:.0e} |",
            flush=True,
        )
        results.append({**asdict(case), "milliseconds": times, "error": wrong})
    print("\n| growth in | kfc | unfold |\n|---|---|---|")
    for what, cases in GROWTH.items():
        measured = [measure(case, arguments.repeats) for case in cases]
        sizes = [amount(case, what) for case in cases]
        slopes = {
            name: slope(sizes, [statistics.median(times[name]) for times in measured])
            for name in METHODS
        }
        print(f"| {what} | {slopes['kfc']:.2f} | {slopes['unfold']:.2f} |", flush=True)
        results.append({"growth": what, **slopes})
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({"machine": machine, "results": results}, file, indent=1)


if __name__ == "__main__":
    main()
