"""Compare the training of KFC's default settings with that of exact ones, on CIFAR-10.

python benchmarks/default_settings.py cifar10 --seeds 0 1 2
python benchmarks/default_settings.py resnet20 --settings exact default --seeds 0 1 2

"exact" gathers statistics from whole batches, inverts factors exactly and postpones nothing.
"part", "low rank" and "overhead" each differ from it in one of these, and "default" in all of them.
The table shows training / test errors in percent after each epoch: of the averaged parameters, or
of the raw ones if the learning rate falls to zero.
"""

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfc
from kfc.lab.data import Inputs, load
from kfc.lab.networks.architectures import ResNet20, cuda_convnet, initialise

# The shares and tolerances that are left out are the default ones.
SETTINGS: dict[str, dict[str, Any]] = {
    "exact": {
        "curvature": kfc.Kronecker(fraction=1, inverse_error=None),
        "schedule": kfc.Periods(),
    },
    "part": {"curvature": kfc.Kronecker(inverse_error=None), "schedule": kfc.Periods()},
    "low rank": {"curvature": kfc.Kronecker(fraction=1), "schedule": kfc.Periods()},
    "overhead": {"curvature": kfc.Kronecker(fraction=1, inverse_error=None)},
    "default": {},
}
EXAMPLES = 10_000  # of each split, for an evaluation


class Case(NamedTuple):
    """A network, and how it is trained."""

    network: Callable[[], nn.Module]
    batch: int
    epochs: int
    rate: float
    falls: bool


CASES = {
    "cifar10": Case(partial(cuda_convnet, 3, 10), 512, 5, 3e-3, False),
    "resnet20": Case(partial(ResNet20, 3, 10), 128, 2, 3e-3, True),
}


class Data(NamedTuple):
    """Images as the networks take them, and their labels."""

    images: Tensor
    labels: Tensor


def cifar10() -> tuple[Data, Data]:
    """Return the training and the test examples."""
    data = load("cifar10")
    inputs = Inputs.normalised(data.train)
    train, test = (
        Data(inputs(split.images[:]), torch.tensor(split.labels[:]).long())
        for split in (data.train, data.test)
    )
    return train, test


@torch.no_grad()
def error(model: nn.Module, data: Data) -> float:
    """Return the error on the first examples, in percent."""
    model.eval()
    wrong = sum(
        (model(images).argmax(1) != labels).sum().item()
        for images, labels in zip(
            data.images[:EXAMPLES].split(500), data.labels[:EXAMPLES].split(500), strict=True
        )
    )
    model.train()
    return 100 * wrong / min(EXAMPLES, len(data.labels))


def train(case: Case, options: dict[str, Any], seed: int, data: tuple[Data, Data]) -> list[str]:
    """Return the errors after each epoch, and the seconds of training."""
    examples, test = data
    torch.manual_seed(seed)
    model = case.network()
    initialise(model, "kaiming")
    model = model.to(memory_format=torch.channels_last)
    updates = len(examples.labels) // case.batch
    optimizer = kfc.KFC(model, lr=case.rate, averaging_timescale=updates, seed=seed, **options)
    cells, seconds = [], 0.0
    for epoch in range(case.epochs):
        order = torch.randperm(len(examples.labels))
        start = perf_counter()
        for update, chosen in enumerate(order.split(case.batch)[:updates]):
            if case.falls:
                done = (epoch + update / updates) / case.epochs
                optimizer.param_groups[0]["lr"] = case.rate * (1 - done)
            images = examples.images[chosen].contiguous(memory_format=torch.channels_last)
            optimizer.zero_grad()
            F.cross_entropy(model(images), examples.labels[chosen]).backward()
            optimizer.step()
        seconds += perf_counter() - start
        with nullcontext() if case.falls else optimizer.averaged_parameters():
            cells.append(f"{error(model, examples):.1f} / {error(model, test):.1f}")
    return [*cells, f"{seconds:.0f}"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    case, data = CASES[options.case], cifar10()
    epochs = " | ".join(f"epoch {epoch + 1}" for epoch in range(case.epochs))
    print(f"| settings | seed | {epochs} | seconds |")
    print("|---" * (case.epochs + 3) + "|")
    for name in options.settings:
        for seed in options.seeds:
            cells = train(case, SETTINGS[name], seed, data)
            print(f"| {name} | {seed} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
