"""Losses and errors of a network on a part of the data."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from kfc.distributed.workers import Workers
from kfc.experiments.data import Inputs, Split
from kfc.experiments.data.batches import part_of
from kfc.experiments.tasks import Task

BATCH = 1000


@dataclass(frozen=True)
class Examples:
    """The first so many examples of a split, as the network sees them."""

    split: Split
    inputs: Inputs
    count: int
    device: torch.device


@torch.no_grad()
def evaluate(
    model: nn.Module, examples: Examples, task: Task, workers: Workers | None = None
) -> tuple[float, float]:
    """The mean loss, and the error in percent; in evaluation mode.

    Args:
        workers: each rank takes its part of the examples, and has the result for all.
    """
    workers = workers or Workers(None)
    was_training = model.training
    model.eval()
    losses, mistakes = [], []
    mine = part_of(examples.count, workers.rank, workers.size)
    for start in mine[::BATCH]:
        chosen = slice(start, min(start + BATCH, mine.stop))
        images = channels_last(examples.inputs(examples.split.images[chosen]).to(examples.device))
        labels = torch.from_numpy(examples.split.labels[chosen].copy()).to(examples.device)
        outputs = model(images)
        losses.append(task.loss(outputs, images, labels).item() * len(images))
        mistakes.append(task.mistakes(outputs, images, labels).sum().item())
    model.train(was_training)
    loss, mistaken = workers.sum([sum(losses), sum(mistakes)], "evaluation")
    return loss / examples.count, task.error(mistaken / examples.count)


def channels_last(images: torch.Tensor) -> torch.Tensor:
    """The order of memory that convolutions are fastest in."""
    return images.contiguous(memory_format=torch.channels_last)
