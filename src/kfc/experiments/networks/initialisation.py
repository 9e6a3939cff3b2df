"""Weights to start from: cuda-convnet's table, Kaiming's, or Glorot's."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from kfc.experiments.networks.cuda_convnet import WEIGHT_STDS
from kfc.experiments.networks.resnet import ResidualBlock


@torch.no_grad()
def paper(model: nn.Module) -> None:
    """Gaussian weights with the table's standard deviations, biases 0; for cuda-convnet's kin."""
    for name, layer in weight_layers(model):
        layer.weight.normal_(std=WEIGHT_STDS[name])
        zero_bias(layer)


@torch.no_grad()
def kaiming(model: nn.Module) -> None:
    """Gaussian weights of variance 2 / fan-in, biases 0; the last layer's weights a tenth of that.

    Small logits at the start: nothing has been learnt yet that could justify a firm prediction.
    """
    layers = [layer for _, layer in weight_layers(model)]
    for layer in layers:
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        zero_bias(layer)
    layers[-1].weight.mul_(0.1)
    for block in model.modules():
        if isinstance(block, ResidualBlock) and not block.normalised:
            block.conv2.weight.zero_()


@torch.no_grad()
def glorot(model: nn.Module) -> None:
    """Gaussian weights of variance 2 / (fan-in + fan-out), biases 0; for tanh units."""
    for _, layer in weight_layers(model):
        nn.init.xavier_normal_(layer.weight)
        zero_bias(layer)


INITIALISATIONS = {"paper": paper, "kaiming": kaiming, "glorot": glorot}


def weight_layers(model: nn.Module) -> Iterator[tuple[str, nn.Conv2d | nn.Linear]]:
    """By name, from input to output; torch has normalisation layers start at 1 and 0 already."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            yield name, module


def zero_bias(layer: nn.Conv2d | nn.Linear) -> None:
    if layer.bias is not None:
        layer.bias.zero_()
