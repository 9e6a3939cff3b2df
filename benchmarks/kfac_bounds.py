"""Train the digits with KFAC, with and without the trust region of α and μ, and print a table.

python benchmarks/kfac_bounds.py --batch 64 --updates 200 --seeds 3
"""

import argparse
import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

import kfc
from kfc.lab.data import Inputs, load
from kfc.lab.networks import build

VARIANTS = {
    "no bounds": (kfc.Adaptation(max_lr=None, max_momentum=None), False),
    "defaults": (kfc.Adaptation(), False),
    "defaults, `held_out=`": (kfc.Adaptation(), True),
}


def batches(count: int, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    while True:
        order = torch.randperm(count, generator=generator)
        yield from order.split(size)[: count // size]


def row(variant: str, batch: int, updates: int, seed: int) -> str:
    data = load("digits").train
    images, labels = Inputs.normalised(data)(data.images[:]), torch.as_tensor(data.labels[:]).long()
    model = build("digits", image=(1, 8, 8), classes=10, init=None, seed=seed)
    adaptation, held_out = VARIANTS[variant]
    optimizer = kfc.KFAC(model, adaptation=adaptation, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    stream = batches(len(images), batch, generator)
    told = []

    def loss_on(chosen: Tensor) -> Tensor:
        return F.cross_entropy(model(images[chosen]), labels[chosen])

    for _ in range(updates):
        chosen, other = next(stream), next(stream) if held_out else None
        optimizer.step(
            lambda chosen=chosen: loss_on(chosen),
            held_out=None if other is None else lambda other=other: loss_on(other),
        )
        told.append(optimizer.step_diagnostics)
    with torch.no_grad():
        final = F.cross_entropy(model(images), labels).item()
    rates, momenta = ([step[name] for step in told] for name in ("lr", "momentum"))
    floor = min(step["factor_damping"] / math.sqrt(step["model_damping"]) for step in told)
    return (
        f"| {batch} | {variant} | {seed} | {min(rates):.2g} to {max(rates):.2g} | "
        f"{min(momenta):.2g} to {max(momenta):.2g} | {floor:.2g} | "
        f"{told[-1]['model_damping']:.1g} | {final:.1e} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    print("| batch | variant | seed | α | μ | lowest γ/√λ | final λ | training loss |")
    print("|---|---|---|---|---|---|---|---|")
    for variant in VARIANTS:
        for seed in range(options.seeds):
            print(row(variant, options.batch, options.updates, seed), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
