"""Time of training steps with and without ``torch.compile``.

SGD and KFC train copies of the same network in turns, a few steps each, so that other load on the
machine affects all of them. The median over steps is the time of the common step, in which nothing
is due; the mean also contains the steps with statistics, inverses and Fisher norms.

    python benchmarks/compiled.py --threads 1
"""

import argparse
import copy
import itertools
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

import kfc


def network(width: int) -> nn.Module:
    """Return six convolutions with batch normalisation and GELU, and a linear layer."""
    layers: list[nn.Module] = []
    sizes = [3, width, width, 2 * width, 2 * width, 4 * width, 4 * width]
    for index, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
        stride = 2 if index % 2 else 1
        layers += [nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)]
        layers += [nn.BatchNorm2d(outputs), nn.GELU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * width * 16, 10))


def trainer(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, torch.Tensor]
) -> Callable[[], float]:
    """Return a function that takes a step and returns its seconds."""

    def step() -> float:
        start = time.perf_counter()
        optimizer.zero_grad()
        F.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()
        return time.perf_counter() - start

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=5, help="steps of each method in a round")
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    batch = torch.randn(options.batch, 3, 32, 32), torch.randint(10, (options.batch,))
    start = network(options.width)
    steps = {}
    for name in ("SGD", "KFC", "WhitenedAdam"):
        for way in ("eager", "compiled"):
            model = copy.deepcopy(start)
            if name == "SGD":
                optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
            else:
                optimizer = getattr(kfc, name)(model)
            run = torch.compile(model) if way == "compiled" else model
            steps[name, way] = trainer(run, optimizer, batch)
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in steps}
    for step in steps.values():  # compile, and take the first steps, with statistics
        for _ in range(3):
            step()
    for _ in range(options.rounds):
        for key, step in steps.items():
            seconds[key] += [step() for _ in range(options.steps)]
    print("| | eager, ms | compiled, ms | compiled / eager, median | mean |")
    print("|---|---|---|---|---|")
    for name in ("SGD", "KFC", "WhitenedAdam"):
        eager, compiled = seconds[name, "eager"], seconds[name, "compiled"]
        medians = [1e3 * statistics.median(each) for each in (eager, compiled)]
        mean = statistics.mean(compiled) / statistics.mean(eager)
        ratio = medians[1] / medians[0]
        print(f"| {name} | {medians[0]:.1f} | {medians[1]:.1f} | {ratio:.2f} | {mean:.2f} |")


if __name__ == "__main__":
    main()
