"""The training loop, and what it records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfc.experiments.data import Dataset

EVALUATION_BATCH = 1000


@dataclass(frozen=True)
class Evaluation:
    """Where a run stands after some epochs; seconds are of training alone, errors in percent."""

    epoch: int
    updates: int
    seconds: float
    train_loss: float
    train_error: float
    test_loss: float
    test_error: float


@dataclass
class Run:
    """One optimizer's way through the data."""

    name: str
    settings: str
    evaluations: list[Evaluation] = field(default_factory=list)


def train(
    run: Run,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Dataset,
    *,
    epochs: int,
    batch_size: int,
    seed: int,
    on_epoch: Callable[[Evaluation], None],
) -> None:
    """Train by cross-entropy; evaluate before the first and after every epoch.

    Args:
        seed: of the order of examples, so that every optimizer sees the same one.
    """
    order = torch.Generator().manual_seed(seed)
    updates, seconds = 0, 0.0
    for epoch in range(epochs + 1):
        if epoch:
            start = perf_counter()
            for batch in torch.randperm(len(data.train_labels), generator=order).split(batch_size):
                optimizer.zero_grad()
                outputs = model(data.train_images[batch])
                F.cross_entropy(outputs, data.train_labels[batch]).backward()
                optimizer.step()
                updates += 1
            seconds += perf_counter() - start
        train_loss, train_error = evaluate(model, data.train_images, data.train_labels)
        test_loss, test_error = evaluate(model, data.test_images, data.test_labels)
        run.evaluations.append(
            Evaluation(epoch, updates, seconds, train_loss, train_error, test_loss, test_error)
        )
        on_epoch(run.evaluations[-1])


@torch.no_grad()
def evaluate(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[float, float]:
    """Mean cross-entropy, and the percentage of wrong answers; in evaluation mode."""
    was_training = model.training
    model.eval()
    loss, wrong = 0.0, 0
    for some, targets in zip(
        images.split(EVALUATION_BATCH), labels.split(EVALUATION_BATCH), strict=True
    ):
        outputs = model(some)
        loss += F.cross_entropy(outputs, targets, reduction="sum").item()
        wrong += int((outputs.argmax(dim=1) != targets).sum())
    model.train(was_training)
    return loss / len(labels), 100 * wrong / len(labels)
