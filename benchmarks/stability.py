"""Train the digits at many learning rates and batch sizes, and report every run that diverges.

python benchmarks/stability.py WhitenedAdam --seeds 10
python benchmarks/stability.py KFC --seeds 5 --first-seed 5
python benchmarks/stability.py KFAC --seeds 5
python benchmarks/stability.py KFC --outliers --seeds 2
python benchmarks/stability.py KFAC --outliers --seeds 2 --before 40

A run fails if a loss is not finite, if its training loss ends above ten times the larger of its
lowest one and 0.001, or if it ends above 0.1 at a rate of at most ten times the default.
"""

import argparse
import inspect
import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from kfac_bounds import batches

import kfc
from kfc.lab.data import Inputs, load
from kfc.lab.networks import build

METHODS: dict[str, Any] = {"KFC": kfc.KFC, "KFAC": kfc.KFAC, "WhitenedAdam": kfc.WhitenedAdam}
BATCHES = (16, 32, 64, 128, 512)
RATES = (1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3)
UPDATES = 600
EVALUATION_PERIOD = 25
# Factors of the inputs of an outlying batch, and the number of updates after it.
OUTLIERS = (100.0, 1e4, 1e6)
UPDATES_AFTER = 20


class Run(NamedTuple):
    """The training losses of a run at its evaluations, and the losses of its batches."""

    losses: list[float]
    batch_losses: list[float]

    @property
    def is_finite(self) -> bool:
        return all(map(math.isfinite, self.losses + self.batch_losses))

    @property
    def growth(self) -> float:
        """The largest loss of a batch relative to the first."""
        return largest(self.batch_losses) / self.batch_losses[0]

    def failure(self, must_converge: bool) -> str:
        """Return why the run fails, or an empty string."""
        if not self.is_finite:
            return "not finite"
        last = self.losses[-1]
        if last > 10 * max(min(self.losses), 1e-3):
            return f"ends at {last:.2g} after {min(self.losses):.2g}"
        return f"ends at {last:.2g}" if must_converge and last > 0.1 else ""


class Training:
    """A network on the digits with its optimizer and a stream of batches."""

    def __init__(self, method: str, batch: int, seed: int, **options: float) -> None:
        data = load("digits").train
        self.images = Inputs.normalised(data)(data.images[:])
        self.labels = torch.as_tensor(data.labels[:]).long()
        self.model = build("digits", image=(1, 8, 8), classes=10, init="kaiming", seed=seed)
        torch.manual_seed(seed)
        self.optimizer = METHODS[method](self.model, **options)
        self._takes_closure = method == "KFAC"
        self._stream = batches(len(self.images), batch, torch.Generator().manual_seed(seed))

    def update(self, factor: float = 1.0) -> float:
        """Make one update, on inputs multiplied by a factor, and return the loss of the batch."""
        chosen = next(self._stream)
        images, labels = factor * self.images[chosen], self.labels[chosen]
        if self._takes_closure:
            return float(self.optimizer.step(lambda: F.cross_entropy(self.model(images), labels)))
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(images), labels)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    @torch.no_grad()
    def loss(self) -> float:
        """Return the loss on the whole training set."""
        self.model.eval()
        value = F.cross_entropy(self.model(self.images), self.labels).item()
        self.model.train()
        return value


def largest(values: list[float]) -> float:
    """Return the largest value, or NaN if there is one, which ``max`` may skip."""
    return math.nan if any(map(math.isnan, values)) else max(values)


def run(method: str, batch: int, seed: int, **options: float) -> Run:
    training, result = Training(method, batch, seed, **options), Run([], [])
    for update in range(1, UPDATES + 1):
        result.batch_losses.append(training.update())
        if update % EVALUATION_PERIOD == 0:
            result.losses.append(training.loss())
    return result


def grid(method: str, seeds: range) -> None:
    """Print the largest training loss at the end by batch size and rate, and what failed."""
    default = inspect.signature(METHODS[method].__init__).parameters.get("lr")
    rates: list[dict[str, float]] = [{"lr": rate} for rate in RATES] if default else [{}]
    failures, growth, count = [], 0.0, 0
    print(f"| {method}, batch | {' | '.join(str(r.get('lr', 'defaults')) for r in rates)} |")
    print("|---" * (1 + len(rates)) + "|")
    for batch in BATCHES:
        cells = []
        for options in rates:
            runs = [run(method, batch, seed, **options) for seed in seeds]
            must_converge = default is None or options["lr"] <= 10 * default.default
            for seed, each in zip(seeds, runs, strict=True):
                if reason := each.failure(must_converge):
                    failures.append(f"batch {batch}, {options}, seed {seed}: {reason}")
            cells.append(f"{largest([each.losses[-1] for each in runs]):.1e}")
            growth = largest([growth, *(each.growth for each in runs)])
            count += len(runs)
        print(f"| {batch} | {' | '.join(cells)} |", flush=True)
    print(f"{count - len(failures)} of {count} runs within the limits;", end=" ")
    print(f"largest batch loss relative to the first: {growth:.3f}", *failures, sep="\n")


def outliers(method: str, seeds: range, before: int) -> None:
    """Print the training loss before an outlying batch, and the largest and last one after it."""
    print(f"| {method}, factor | seed | before | largest after | last |\n|---|---|---|---|---|")
    for factor in OUTLIERS:
        for seed in seeds:
            training = Training(method, 64, seed)
            for _ in range(before):
                training.update()
            earlier = training.loss()
            training.update(factor)
            after = [training.loss()]
            for _ in range(UPDATES_AFTER):
                training.update()
                after.append(training.loss())
            row = f"{factor:g} | {seed} | {earlier:.2g} | {largest(after):.2g} | {after[-1]:.2g}"
            print(f"| {row} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("--seeds", type=int, default=10, help="number of seeds (default: 10)")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--outliers", action="store_true", help="one batch with scaled inputs")
    parser.add_argument("--before", type=int, default=100, help="updates before the outlier")
    options = parser.parse_args()
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    if options.outliers:
        outliers(options.method, seeds, options.before)
    else:
        grid(options.method, seeds)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
