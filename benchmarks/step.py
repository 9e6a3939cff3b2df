"""What a training step costs, as a ratio to SGD's: `python benchmarks/step.py`.

The paper's CIFAR-10 network without response normalisation, on random images. All methods take
turns in one run; times are medians.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from time import perf_counter

import torch
import torch.nn.functional as F
from second_moment import processor
from torch import nn

import kfc

# Small, so that nobody's loss wanders off while it is timed.
LR = 1e-4
NEVER = 10**9

METHODS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD, momentum 0.9": lambda m: torch.optim.SGD(m.parameters(), lr=LR, momentum=0.9),
    "KFC: statistics, inverses and exact clip every step": lambda m: kfc.KFC(
        m, lr=LR, statistics_period=1, inverse_period=1, clip_period=1
    ),
    "KFC: statistics and inverses every step, no clip": lambda m: kfc.KFC(
        m, lr=LR, statistics_period=1, inverse_period=1, fisher_clip=None
    ),
    "KFC: nothing due": lambda m: kfc.KFC(
        m, lr=LR, statistics_period=NEVER, inverse_period=NEVER, fisher_clip=None
    ),
}


def network() -> nn.Module:
    pool = {"kernel_size": 3, "stride": 2, "ceil_mode": True}
    model = nn.Sequential(
        nn.Conv2d(3, 32, 5, padding=2),
        nn.MaxPool2d(**pool),
        nn.ReLU(),
        nn.Conv2d(32, 32, 5, padding=2),
        nn.ReLU(),
        nn.AvgPool2d(**pool, count_include_pad=False),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.ReLU(),
        nn.AvgPool2d(**pool, count_include_pad=False),
        nn.Flatten(),
        nn.Linear(1024, 10),
    )
    return model.to(memory_format=torch.channels_last)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    images = torch.randn(arguments.batch, 3, 32, 32).to(memory_format=torch.channels_last)
    labels = torch.randint(10, (arguments.batch,))
    runs = {}
    for name, make_optimizer in METHODS.items():
        torch.manual_seed(0)
        model = network()
        runs[name] = (model, make_optimizer(model))
    times: dict[str, list[float]] = {name: [] for name in METHODS}
    for _ in range(2 + arguments.repeats):
        for name, (model, optimizer) in runs.items():
            start = perf_counter()
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
            times[name].append(1000 * (perf_counter() - start))
    # The first two rounds warm up.
    medians = {name: statistics.median(all_[2:]) for name, all_ in times.items()}
    plain = next(iter(medians.values()))
    print(f"torch {torch.__version__}, {arguments.threads} threads, {processor()}")
    print(
        f"batch {arguments.batch}\n\n| step | ms | ratio | first step, ratio |\n|---|---|---|---|"
    )
    for name, middle in medians.items():
        print(f"| {name} | {middle:.0f} | {middle / plain:.2f} | {times[name][0] / plain:.2f} |")


if __name__ == "__main__":
    main()
