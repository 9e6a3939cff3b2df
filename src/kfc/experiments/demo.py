"""The demonstration: KFC against SGD on the embedded digits."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kfc.experiments.data import load_digits
from kfc.experiments.networks import digits_network
from kfc.experiments.training import Evaluation, Run, train
from kfc.optimizers import KFC

BATCH_SIZE = 64

# Learning rates from {0.3, 0.1, 0.03, ...}, each method's best by training loss.
CONTENDERS: dict[str, tuple[str, Callable[[torch.nn.Module], torch.optim.Optimizer]]] = {
    "SGD": (
        "lr 0.1, momentum 0.9",
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    ),
    "KFC": ("lr 0.003, defaults", lambda model: KFC(model, lr=3e-3)),
}


def run_demo(epochs: int, seed: int, on_epoch: Callable[[str, Evaluation], None]) -> list[Run]:
    """Train the same network from the same weights, in the same order, with each contender."""
    data = load_digits()
    runs = []
    for name, (settings, make_optimizer) in CONTENDERS.items():
        torch.manual_seed(seed)
        model = digits_network()
        run = Run(name, f"{settings}, batch {BATCH_SIZE}")
        train(
            run,
            model,
            make_optimizer(model),
            data,
            epochs=epochs,
            batch_size=BATCH_SIZE,
            seed=seed,
            on_epoch=lambda evaluation, name=name: on_epoch(name, evaluation),  # type: ignore[misc]
        )
        runs.append(run)
    return runs
