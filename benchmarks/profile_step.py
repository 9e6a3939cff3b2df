"""Time the parts of a KFC step: `make profile`.

Statistics, inverses and the exact clip are due in every step, and SGD takes turns with KFC. The
table shows medians over the steps.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from machine import machine
from methods import LR, sgd
from networks import NETWORKS
from torch import Tensor

import kfc
from kfc.curvature.kfc import FactorStatistics
from kfc.statistics.backward import RecordedPass

WARM_UP = 3
BACKWARD = "sampled backward with Γ"
# The parts that ``diagnostics`` times, and their names in the table.
PARTS = {
    "check": "finiteness",
    "averages": "moving averages",
    "inverses": "Cholesky factors",
    "natural gradient": "natural gradient",
    "clip": "exact Fisher norms",
    "update": "momentum and parameters",
}


class Clocks:
    """Milliseconds of each part, summed within a step."""

    def __init__(self) -> None:
        self.current: dict[str, float] = defaultdict(float)
        self.steps: dict[str, list[float]] = defaultdict(list)

    def around(self, owner: Any, name: str, label: Callable[..., str] | str) -> None:
        """Time every call of a function; a part within a part counts in both."""
        real = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = perf_counter()
            result = real(*args, **kwargs)
            part = label if isinstance(label, str) else label(*args)
            self.current[part] += 1000 * (perf_counter() - start)
            return result

        setattr(owner, name, timed)

    def end_step(self, counts: bool) -> None:
        if counts:
            for part, value in self.current.items():
                self.steps[part].append(value)
        self.current.clear()

    def median(self, part: str) -> float:
        return statistics.median(self.steps[part])


def shape(values: Tensor) -> str:
    return "x".join(str(n) for n in values.shape[1:])


def add_clocks() -> Clocks:
    """Time the parts of gathering statistics; ``diagnostics`` has the other parts."""
    clocks = Clocks()
    layer = FactorStatistics
    clocks.around(layer, "forward", lambda _, inputs, __: f"Ω of {shape(inputs)}")
    clocks.around(layer, "backward", lambda _, __, values, ___: f"Γ of {shape(values)}")
    clocks.around(RecordedPass, "backward", BACKWARD)
    return clocks


def run(clocks: Clocks, options: argparse.Namespace, images: Tensor, labels: Tensor) -> None:
    """Train with SGD and with KFC in turns, and time every part."""
    network, device = NETWORKS[options.network], torch.device("cpu")
    plain, ours = network.model(device), network.model(device)
    natural = kfc.KFC(ours, lr=LR, schedule=kfc.Periods(1, 1), clip=kfc.FisherClip(period=1))
    optimizers = {"SGD": (plain, sgd(plain)), "KFC": (ours, natural)}
    for turn in range(WARM_UP + options.steps):
        for name, (model, optimizer) in optimizers.items():
            times = [perf_counter()]
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            times.append(perf_counter())
            loss.backward()
            times.append(perf_counter())
            optimizer.step()
            times.append(perf_counter())
            del loss
            parts = zip(("forward", "backward", "step()"), times, times[1:], strict=False)
            for part, start, end in parts:
                clocks.current[f"{name}: {part}"] = 1000 * (end - start)
            clocks.current[f"{name}: all"] = 1000 * (times[-1] - times[0])
        for part, label in PARTS.items():
            clocks.current[label] = 1000 * natural.diagnostics["seconds"][part]
        clocks.end_step(turn >= WARM_UP)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--network", choices=NETWORKS, default="cifar10")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    network, device = NETWORKS[options.network], torch.device("cpu")
    images, labels = network.data(options.batch or network.batch, device)
    clocks = add_clocks()
    run(clocks, options, images, labels)
    print(", ".join(f"{k} {v}" for k, v in machine(device).items()))
    print(f"network {options.network}, batch {len(images)}\n")
    print("| part | ms |\n|---|---|")
    for part in clocks.steps:
        print(f"| {part} | {clocks.median(part):.1f} |")
    gammas = sum(clocks.median(part) for part in clocks.steps if part.startswith("Γ"))
    print(f"| sampled backward alone | {clocks.median(BACKWARD) - gammas:.1f} |")


if __name__ == "__main__":
    main()
