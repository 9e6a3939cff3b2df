"""ResNet-20 in its CIFAR form (He et al., 2016), with and without batch normalisation."""

from __future__ import annotations

from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn


class ResidualBlock(nn.Module):
    """relu(shortcut(x) + branch(x)) with a branch of two 3x3 convolutions.

    Without normalisation the convolutions have biases, and nothing limits the sums of nine blocks;
    Kaiming initialisation then sets the last convolution's weights of each branch to 0.
    """

    def __init__(self, inputs: int, outputs: int, stride: int, normalised: bool) -> None:
        super().__init__()
        self.conv1 = convolution(inputs, outputs, stride, bias=not normalised)
        self.norm1 = normalisation(outputs, normalised)
        self.conv2 = convolution(outputs, outputs, stride=1, bias=not normalised)
        self.norm2 = normalisation(outputs, normalised)
        self.stride = stride
        self.new_maps = outputs - inputs
        self.normalised = normalised

    def forward(self, maps: Tensor) -> Tensor:
        """Map (N, inputs, height, width) to (N, outputs, height / stride, width / stride)."""
        branch = F.relu(self.norm1(self.conv1(maps)))
        branch = self.norm2(self.conv2(branch))
        return F.relu(self.shortcut(maps) + branch)

    def shortcut(self, maps: Tensor) -> Tensor:
        """Return every stride-th pixel, and zeros for the new maps ("option A")."""
        kept = maps[..., :: self.stride, :: self.stride]
        return F.pad(kept, (0, 0, 0, 0, 0, self.new_maps))


class ResNet20(nn.Module):
    """A convolution, three stages of residual blocks with 16, 32 and 64 maps, and a linear layer.

    The name counts the convolutions and the linear layer.
    """

    def __init__(self, channels: int, classes: int, *, normalised: bool = True) -> None:
        super().__init__()
        self.conv = convolution(channels, 16, stride=1, bias=not normalised)
        self.norm = normalisation(16, normalised)
        maps = (16, 16, 16, 16, 32, 32, 32, 64, 64, 64)
        self.blocks = nn.Sequential(
            *(
                ResidualBlock(inputs, outputs, outputs // inputs, normalised)
                for inputs, outputs in pairwise(maps)
            )
        )
        self.linear = nn.Linear(64, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (N, channels, height, width) of any size to logits (N, classes)."""
        maps = self.blocks(F.relu(self.norm(self.conv(images))))
        logits: Tensor = self.linear(maps.mean(dim=(2, 3)))
        return logits


def convolution(inputs: int, outputs: int, stride: int, bias: bool) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel_size=3, stride=stride, padding=1, bias=bias)


def normalisation(maps: int, normalised: bool) -> nn.Module:
    return nn.BatchNorm2d(maps) if normalised else nn.Identity()
