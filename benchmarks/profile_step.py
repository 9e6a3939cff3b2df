"""Where each millisecond of a KFC step goes: `make profile`.

The paper's CIFAR-10 network, statistics, inverses and exact clip in every step, in turns with SGD.
Clocks are put around the functions that the table names; medians over the steps.
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

import kfc
from kfc.curvature import Curvature
from kfc.layers.structures.kfc import FactorStatistics
from kfc.preconditioner import Preconditioner
from kfc.session import Session

WARM_UP = 3


class Clocks:
    """Milliseconds by part, summed within a step."""

    def __init__(self) -> None:
        self.current: dict[str, float] = defaultdict(float)
        self.steps: dict[str, list[float]] = defaultdict(list)

    def around(self, owner: Any, name: str, label: Callable[..., str] | str) -> None:
        """Time every call of a function; parts inside parts count in both."""
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


def shape(values: torch.Tensor) -> str:
    return "x".join(str(n) for n in values.shape[1:])


def put_clocks() -> Clocks:
    clocks = Clocks()
    layer = FactorStatistics
    clocks.around(layer, "forward", lambda _, inputs, __: f"Ω of {shape(inputs)}")
    clocks.around(layer, "backward", lambda _, __, values, ___: f"Γ of {shape(values)}")
    clocks.around(Session, "backward", "sampled backward with Γ")
    clocks.around(Curvature, "take_up", "moving averages")
    clocks.around(Curvature, "refresh_inverses", "Cholesky factors")
    clocks.around(Curvature, "precondition", "natural gradient")
    clocks.around(Preconditioner, "_check", "finiteness")
    clocks.around(kfc.KFC, "_fisher_norm", "exact Fisher norm, a quarter of the batch")
    clocks.around(kfc.KFC, "_move", "momentum and parameters")
    return clocks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--network", choices=NETWORKS, default="cifar10")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    network, device = NETWORKS[options.network], torch.device("cpu")
    images, labels = network.data(options.batch or network.batch, device)
    plain, ours = network.model(device), network.model(device)
    optimizers = {
        "SGD": (plain, sgd(plain)),
        "KFC": (
            ours,
            kfc.KFC(ours, lr=LR, statistics_period=1, inverse_period=1, clip_period=1),
        ),
    }
    clocks = put_clocks()
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
            for part, start, end in zip(
                ("forward", "backward", "step()"), times, times[1:], strict=False
            ):
                clocks.current[f"{name}: {part}"] = 1000 * (end - start)
            clocks.current[f"{name}: all"] = 1000 * (times[-1] - times[0])
        clocks.end_step(turn >= WARM_UP)
    print(", ".join(f"{k} {v}" for k, v in machine(device).items()))
    print(f"network {options.network}, batch {len(images)}\n")
    print("| part | ms |\n|---|---|")
    gammas = sum(clocks.median(part) for part in clocks.steps if part.startswith("Γ"))
    for part in clocks.steps:
        print(f"| {part} | {clocks.median(part):.1f} |")
    alone = clocks.median("sampled backward with Γ") - gammas
    print(f"| sampled backward alone | {alone:.1f} |")


if __name__ == "__main__":
    main()
