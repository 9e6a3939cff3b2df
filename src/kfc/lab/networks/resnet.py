"""ResNet-20 in its CIFAR form (He et al., 2016), with and without batch normalisation."""

from __future__ import annotations

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


class ResNet(nn.Module):
    """A convolution, three stages of residual blocks with 16, 32 and 64 maps, and a linear layer.

    Args:
        blocks_per_stage: 3 for ResNet-20, which counts convolutions and the linear layer.
    """

    def __init__(
        self, channels: int, classes: int, *, blocks_per_stage: int = 3, normalised: bool = True
    ) -> None:
        super().__init__()
        self.conv = convolution(channels, 16, stride=1, bias=not normalised)
        self.norm = normalisation(16, normalised)
        blocks = []
        for inputs, outputs, first_stride in ((16, 16, 1), (16, 32, 2), (32, 64, 2)):
            blocks.append(ResidualBlock(inputs, outputs, first_stride, normalised))
            for _ in range(blocks_per_stage - 1):
                blocks.append(ResidualBlock(outputs, outputs, 1, normalised))
        self.blocks = nn.Sequential(*blocks)
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
