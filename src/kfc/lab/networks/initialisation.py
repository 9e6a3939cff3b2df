"""Initial weights: cuda-convnet's table, Kaiming's and Glorot's."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from kfc.lab.networks.cuda_convnet import WEIGHT_STDS
from kfc.lab.networks.resnet import ResidualBlock


@torch.no_grad()
def paper(model: nn.Module) -> None:
    """Draw Gaussian weights with the standard deviations of cuda-convnet's table; biases are 0."""
    for name, layer in _weight_layers(model):
        layer.weight.normal_(std=WEIGHT_STDS[name])


@torch.no_grad()
def kaiming(model: nn.Module) -> None:
    """Draw Gaussian weights of variance 2 / fan-in; biases are 0.

    The last layer's weights are a tenth of that, so that the initial logits are small. Residual
    branches without normalisation start at 0.
    """
    layers = [layer for _, layer in _weight_layers(model)]
    for layer in layers:
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    layers[-1].weight.mul_(0.1)
    for block in model.modules():
        if isinstance(block, ResidualBlock) and not block.normalised:
            block.conv2.weight.zero_()


@torch.no_grad()
def glorot(model: nn.Module) -> None:
    """Draw Gaussian weights of variance 2 / (fan-in + fan-out), for tanh units; biases are 0."""
    for _, layer in _weight_layers(model):
        nn.init.xavier_normal_(layer.weight)


INITIALISATIONS = {"paper": paper, "kaiming": kaiming, "glorot": glorot}


def _weight_layers(model: nn.Module) -> Iterator[tuple[str, nn.Conv2d | nn.Linear]]:
    """Yield convolutional and linear layers by name, after setting their biases to 0.

    torch initialises the scales and biases of normalisation layers to 1 and 0.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            if module.bias is not None:
                module.bias.zero_()
            yield name, module
