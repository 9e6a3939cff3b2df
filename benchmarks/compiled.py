"""Time of training steps with and without ``torch.compile``.

SGD and KFC train copies of the same network in turns, a few steps each, so that other load on the
machine affects all of them. The median over steps is the time of the common step, in which nothing
is due.

    python benchmarks/compiled.py --threads 1
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

import kfc


class Block(nn.Module):
    """A residual block of normalisation, GELU and a pointwise convolution, which can be fused."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(width), nn.Conv2d(width, width, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self.conv(F.gelu(self.norm(inputs)))


def network(width: int) -> nn.Module:
    """Return a small network of a convolution, eight residual blocks and a linear layer."""
    blocks = [Block(width) for _ in range(8)]
    first = nn.Conv2d(3, width, 4, stride=4)
    return nn.Sequential(first, *blocks, nn.Flatten(), nn.Linear(64 * width, 10))


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
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=10)
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
    print("| | eager, ms | compiled, ms | compiled / eager |")
    print("|---|---|---|---|")
    for name in ("SGD", "KFC", "WhitenedAdam"):
        eager, compiled = seconds[name, "eager"], seconds[name, "compiled"]
        medians = [1e3 * statistics.median(each) for each in (eager, compiled)]
        ratio = medians[1] / medians[0]
        print(f"| {name} | {medians[0]:.1f} | {medians[1]:.1f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
