"""Initial weights: cuda-convnet's table, Kaiming's and Glorot's."""

from __future__ import annotations

import torch
from torch import nn

from kfc.lab.networks.resnet import ResidualBlock
from kfc.lab.networks.sequential import WEIGHT_STDS


@torch.no_grad()
def initialise(model: nn.Module, init: str) -> None:
    """Draw Gaussian weights of convolutional and linear layers, and set their biases to 0.

    torch initialises the scales and biases of normalisation layers to 1 and 0.

    Args:
        init: ``"paper"`` for the standard deviations of cuda-convnet's table; ``"glorot"`` for the
            variance 2 / (fan-in + fan-out), which suits tanh units; ``"kaiming"`` for the variance
            2 / fan-in, where the last layer's weights are a tenth of that, so that the initial
            logits are small, and residual branches without normalisation start at 0.
    """
    modules = model.named_modules()
    layers = {name: each for name, each in modules if isinstance(each, nn.Conv2d | nn.Linear)}
    for name, layer in layers.items():
        if layer.bias is not None:
            layer.bias.zero_()
        if init == "paper":
            layer.weight.normal_(std=WEIGHT_STDS[name])
        elif init == "glorot":
            nn.init.xavier_normal_(layer.weight)
        else:
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    if init == "kaiming":
        list(layers.values())[-1].weight.mul_(0.1)
        for block in model.modules():
            if isinstance(block, ResidualBlock) and not block.normalised:
                block.conv2.weight.zero_()
