"""Losses and errors of a network on a part of the data."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from kfc.experiments.data import Inputs, Split

BATCH = 1000


@dataclass(frozen=True)
class Examples:
    """The first so many examples of a split, as the network sees them."""

    split: Split
    inputs: Inputs
    count: int
    device: torch.device


@torch.no_grad()
def evaluate(model: nn.Module, examples: Examples) -> tuple[float, float]:
    """Mean cross-entropy, and the percentage of wrong answers; in evaluation mode."""
    was_training = model.training
    model.eval()
    losses, wrong = [], []
    for start in range(0, examples.count, BATCH):
        chosen = slice(start, min(start + BATCH, examples.count))
        images = channels_last(examples.inputs(examples.split.images[chosen]).to(examples.device))
        labels = torch.from_numpy(examples.split.labels[chosen].copy()).to(examples.device)
        outputs = model(images)
        losses.append(F.cross_entropy(outputs, labels, reduction="sum").double())
        wrong.append((outputs.argmax(dim=1) != labels).sum())
    model.train(was_training)
    loss, errors = torch.stack(losses).sum().item(), torch.stack(wrong).sum().item()
    return loss / examples.count, 100 * errors / examples.count


def channels_last(images: torch.Tensor) -> torch.Tensor:
    """The order of memory that convolutions are fastest in."""
    return images.contiguous(memory_format=torch.channels_last)
