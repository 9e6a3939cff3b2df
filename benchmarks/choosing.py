"""Repeat the measurements behind the tables of docs/choosing.md.

python benchmarks/choosing.py initial-damping first-factors curvatures    # on the digits, minutes
python benchmarks/choosing.py periods clip                                # on CIFAR-10, an hour

On the digits, batches have 128 examples, and losses are means over the training set of the
parameters as they are: medians over the seeds. On CIFAR-10, batches have 512 examples.
"""

import argparse
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from default_settings import cifar10, error
from kfac_bounds import batches
from torch import Tensor, nn

import kfc
from kfc.lab.data import Inputs, load
from kfc.lab.networks import build
from kfc.lab.networks.architectures import cuda_convnet, initialise
from kfc.optimizers.clipping import NormClip

CHECKPOINTS = (11, 22, 44, 110)  # updates: epochs 1, 2, 4 and 10 of the digits
TIMESCALE = 11.0
CURVATURES: dict[str, tuple[Any, float, float]] = {
    "`kfc`": ("kfc", 3e-3, 1e-3),
    "`sua`": ("sua", 3e-3, 1e-3),
    "`prong`": ("prong", 3e-3, 1e-3),
    '`kfc`, `inverse="eigen"`': (kfc.Kronecker(inverse="eigen"), 3e-3, 1e-2),
    "`ekfac`": ("ekfac", 3e-3, 1e-2),
    "`diagonal`": ("diagonal", 3e-3, 1e-2),
    '`kfc`, `inverse="eigen"`, 1e-3': (kfc.Kronecker(inverse="eigen"), 3e-3, 1e-3),
    "`ekfac`, 1e-3": ("ekfac", 3e-3, 1e-3),
    "`diagonal`, 1e-3": ("diagonal", 3e-3, 1e-3),
}
PERIODS: dict[str, Any] = {
    "5 and 20": kfc.Periods(5, 20),
    "pace 25, to 10 and 20": kfc.Periods(kfc.Stretch(10, pace=25), kfc.Stretch(20, pace=25)),
    "pace 15, to 10 and 20": kfc.Periods(kfc.Stretch(10, pace=15), kfc.Stretch(20, pace=15)),
    "pace 12, to 10 and 20 (default)": kfc.Periods(),
}
CLIPPED: dict[str, dict[str, float]] = {
    "default": {},
    "lr 0.006": {"lr": 6e-3},
    "damping 3e-4": {"damping": 3e-4},
}


class Digits:
    """The training set of the digits, and a network with the same weights for each seed."""

    def __init__(self) -> None:
        data = load("digits").train
        self.images = Inputs.normalised(data)(data.images[:])
        self.labels = torch.as_tensor(data.labels[:]).long()

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return build("digits", image=(1, 8, 8), classes=10, init="kaiming", seed=seed)

    def batches(self, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        for chosen in batches(len(self.images), 128, generator):
            yield self.images[chosen], self.labels[chosen]

    @torch.no_grad()
    def loss(self, model: nn.Module) -> float:
        return F.cross_entropy(model(self.images), self.labels).item()

    def train(self, model: nn.Module, optimizer: Any, seed: int) -> list[float]:
        """Return the losses of the whole set at the checkpoints."""
        found = []
        for update, (images, labels) in enumerate(self.batches(seed), 1):

            def closure(images: Tensor = images, labels: Tensor = labels) -> Tensor:
                return F.cross_entropy(model(images), labels)

            if isinstance(optimizer, kfc.KFAC):
                optimizer.step(closure)
            else:
                optimizer.zero_grad()
                closure().backward()
                optimizer.step()
            if update in CHECKPOINTS:
                found.append(self.loss(model))
            if update == CHECKPOINTS[-1]:
                return found
        raise AssertionError("batches never end")


def losses(runs: list[list[float]]) -> str:
    """Return the median of the runs at each checkpoint."""
    return ", ".join(f"{median(each):.2g}" for each in zip(*runs, strict=True))


def initial_damping(seeds: int) -> None:
    digits = Digits()
    print("| initial λ | training loss after 11, 22, 44, 110 updates | highest at 110 | final λ |")
    print("|---|---|---|---|")
    for initial in (1.0, 0.1, 0.01, 1e-3, 1e-4):
        runs, final = [], []
        for seed in range(seeds):
            model = digits.model(seed)
            adaptation = kfc.Adaptation(initial_model_damping=initial)
            optimizer = kfc.KFAC(model, adaptation=adaptation, seed=seed)
            runs.append(digits.train(model, optimizer, seed))
            final.append(optimizer.step_diagnostics["model_damping"])
        highest = max(run[-1] for run in runs)
        print(f"| {initial:g} | {losses(runs)} | {highest:.2g} | {median(final):.1g} |", flush=True)


def curvatures(seeds: int) -> None:
    digits = Digits()
    print("| curvature | lr | damping | training loss after 11, 22, 44, 110 updates |")
    print("|---|---|---|---|")
    for name, (curvature, lr, damping) in CURVATURES.items():
        runs = []
        for seed in range(seeds):
            model = digits.model(seed)
            # Without the overhead, which postpones refreshes of some approximations only.
            optimizer = kfc.KFC(
                model,
                lr=lr,
                damping=damping,
                curvature=curvature,
                schedule=kfc.Periods(),
                seed=seed,
            )
            runs.append(digits.train(model, optimizer, seed))
        print(f"| {name} | {lr:g} | {damping:g} | {losses(runs)} |", flush=True)


def first_factors(seeds: int) -> None:
    digits = Digits()
    print("| examples of the estimate | ξ | training loss after 11, 22, 44, 110 updates |")
    print("|---|---|---|")
    for examples, decay in ((0, 0.95), (128, 0.95), (1438, 0.95), (0, None), (1438, None)):
        runs = []
        for seed in range(seeds):
            model = digits.model(seed)
            optimizer = kfc.KFC(
                model,
                curvature=kfc.Kronecker(factor_decay="averaging" if decay is None else decay),
                averaging_timescale=TIMESCALE,
                seed=seed,
            )
            if examples:
                loader = zip(
                    digits.images[:examples].split(128),
                    digits.labels[:examples].split(128),
                    strict=True,
                )
                optimizer.estimate_factors(
                    loader, lambda output, batch: F.cross_entropy(output, batch[1])
                )
            runs.append(digits.train(model, optimizer, seed))
        shown = "exp(-1/11) = 0.91" if decay is None else decay
        print(f"| {examples or 'none'} | {shown} | {losses(runs)} |", flush=True)


def updates_on_cifar10(
    model: nn.Module, optimizer: Any, data: tuple[Any, Any], epochs: int
) -> Iterator[int]:
    """Make the updates of several epochs, and yield the number of the epoch after each epoch."""
    examples, _ = data
    count = len(examples.labels) // 512
    for epoch in range(epochs):
        for chosen in torch.randperm(len(examples.labels)).split(512)[:count]:
            images = examples.images[chosen].contiguous(memory_format=torch.channels_last)
            optimizer.zero_grad()
            F.cross_entropy(model(images), examples.labels[chosen]).backward()
            optimizer.step()
        yield epoch


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = cuda_convnet(3, 10)
    initialise(model, "kaiming")
    return model.to(memory_format=torch.channels_last)


def periods(seeds: int) -> None:
    data = cifar10()
    header = " | ".join(f"epoch {epoch}" for epoch in range(1, 6))
    print(f"| periods | seed | {header} | test error | statistics gathered |\n{'|---' * 9}|")
    for name, schedule in PERIODS.items():
        for seed in range(seeds):
            model = network(seed)
            optimizer = kfc.KFC(model, averaging_timescale=97, schedule=schedule, seed=seed)
            cells, gathered = [], counted(optimizer.engine.curvature, "update_")
            for _ in updates_on_cifar10(model, optimizer, data, 5):
                with optimizer.averaged_parameters():
                    cells.append(f"{error(model, data[0]):.1f}%")
                    test = f"{error(model, data[1]):.1f}%"
            cells.append(test)
            print(f"| {name} | {seed} | {' | '.join(cells)} | {len(gathered)} |", flush=True)


def counted(owner: Any, name: str) -> list[None]:
    """Return a list that grows by one entry with each call of a method."""
    calls: list[None] = []
    method = getattr(owner, name)

    def called(*arguments: Any, **keywords: Any) -> Any:
        calls.append(None)
        return method(*arguments, **keywords)

    setattr(owner, name, called)
    return calls


def clip(seeds: int) -> None:
    """Compute ν in every step, and compare with the decisions of the default clip."""
    data = cifar10()
    print(
        "| run | steps | ν > C at | ν computed | missed | shortened by the estimate |\n"
        "|---|---|---|---|---|---|"
    )
    for name, options in CLIPPED.items():
        for seed in range(seeds):
            model = network(seed)
            limits = kfc.FisherClip(0.3, fraction=0.25, period=1, loss_bound=0.25)
            optimizer = kfc.KFC(model, clip=limits, seed=seed, **options)
            norms, exact = [], optimizer._clip.shorten

            def shorten(
                estimate: Any, norm: Tensor, exact: Any = exact, norms: list[Any] = norms
            ) -> float | None:
                norms.append((float(estimate), norm.item()))
                return exact(estimate, norm)

            optimizer._clip.shorten = shorten
            for _ in updates_on_cifar10(model, optimizer, data, 3):
                pass
            large, computed, missed, guarded = replayed(norms)
            extent = f", by up to {max(guarded):.0%}" if guarded else ""
            print(
                f"| {name} | {len(norms)} | {large} | {computed} | {missed or 'none'} | "
                f"{len(guarded)}{extent} |",
                flush=True,
            )


def replayed(norms: list[tuple[float, float]]) -> tuple[int, int, int, list[float]]:
    """Return how the default clip would have treated updates with these estimates and ν.

    Returns:
        The numbers of updates with ν > C, of evaluations and of missed updates, and by how much
        each update that it would have shortened by the estimate.
    """
    limits = kfc.FisherClip(0.3)
    state, missed, guarded = NormClip(limits), 0, []
    for estimate, norm in norms:
        if state.is_due():
            state.shorten(estimate, torch.tensor(norm))
            continue
        factor = float(state.guard(estimate))
        missed += norm > state.limit and factor == 1
        guarded += [1 - factor] if factor < 1 else []
    computed = state.state_dict()["evaluations"]
    return sum(norm > state.limit for _, norm in norms), computed, missed, guarded


TABLES: dict[str, Callable[[int], None]] = {
    "initial-damping": initial_damping,
    "first-factors": first_factors,
    "curvatures": curvatures,
    "periods": periods,
    "clip": clip,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", nargs="+", choices=TABLES)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.tables:
        TABLES[name](options.seeds)


if __name__ == "__main__":
    main()
