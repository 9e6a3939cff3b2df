"""The networks that steps are timed on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kfc.lab.networks.architectures import digits
from kfc.lab.networks.small import ViT


@dataclass(frozen=True)
class Network:
    """A network with the size of its images, its usual batch size and its input channels."""

    build: Callable[[], nn.Module]
    size: int
    batch: int
    channels: int = 3

    def model(self, device: torch.device) -> nn.Module:
        return self.build().to(device, memory_format=torch.channels_last)

    def data(self, batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
        images = torch.randn(batch, self.channels, self.size, self.size)
        images = images.to(device, memory_format=torch.channels_last)
        return images, torch.randint(10, (batch,)).to(device)


def paper_network(widths: tuple[int, int, int], padded_pools: bool = False) -> nn.Module:
    """Return three 5x5 convolutions with max pooling and average pooling, as in the paper.

    Args:
        padded_pools: pad the maps for average pooling instead of using ``ceil_mode``, which not
            every library supports; maps have the same sizes.
    """
    first, second, third = widths

    def average() -> nn.Module:
        if padded_pools:
            return nn.AvgPool2d(3, 2, padding=1)
        return nn.AvgPool2d(3, 2, ceil_mode=True, count_include_pad=False)

    return nn.Sequential(
        nn.Conv2d(3, first, 5, padding=2),
        nn.MaxPool2d(3, 2, ceil_mode=True),
        nn.ReLU(),
        nn.Conv2d(first, second, 5, padding=2),
        nn.ReLU(),
        average(),
        nn.Conv2d(second, third, 5, padding=2),
        nn.ReLU(),
        average(),
        nn.Flatten(),
        nn.Linear(16 * third, 10),
    )


def vgg_like() -> nn.Module:
    """Return pairs of 3x3 convolutions with max pooling in between."""
    layers: list[nn.Module] = []
    channels = 3
    for width in (32, 64, 128):
        for _ in range(2):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * channels, 10))


class Residual(nn.Module):
    """Two 3x3 convolutions with a shortcut around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Conv2d(inputs, outputs, 1, stride)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.relu(self.first_norm(self.first(inputs)))
        return torch.relu(self.second_norm(self.second(hidden)) + self.shortcut(inputs))


class Bottleneck(nn.Module):
    """A 3x3 convolution between two 1x1 convolutions, with a shortcut around them."""

    def __init__(self, inputs: int, inner: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * inner
        self.layers = nn.Sequential(
            *(nn.Conv2d(inputs, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU()),
            *(nn.Conv2d(inner, inner, 3, stride, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU()),
            *(nn.Conv2d(inner, outputs, 1, bias=False), nn.BatchNorm2d(outputs)),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Conv2d(inputs, outputs, 1, stride)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.relu(self.layers(inputs) + self.shortcut(inputs))


def resnet18(width: int) -> nn.Module:
    """Return ResNet-18 for small images; 64 is its full width."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1, bias=False)]
    layers += [nn.BatchNorm2d(width), nn.ReLU()]
    channels = width
    for factor, stride in ((1, 1), (2, 2), (4, 2), (8, 2)):
        outputs = factor * width
        layers += [Residual(channels, outputs, stride), Residual(outputs, outputs, 1)]
        channels = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


def resnet50() -> nn.Module:
    """Return ResNet-50 with its usual stem, which reduces images to a quarter of their size."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)]
    layers += [nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for inner, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for block in range(blocks):
            layers.append(Bottleneck(channels, inner, stride if block == 0 else 1))
            channels = 4 * inner
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


NETWORKS = {
    "cifar10": Network(lambda: paper_network((32, 32, 64)), 32, 512),
    "svhn": Network(lambda: paper_network((64, 64, 64)), 32, 512),
    "vgg": Network(vgg_like, 32, 256),
    "resnet18-quarter": Network(lambda: resnet18(16), 32, 256),
    "resnet18": Network(lambda: resnet18(64), 32, 128),
    "resnet50": Network(resnet50, 64, 32),
    "vit": Network(lambda: ViT(width=384, depth=6, heads=6), 32, 128),
    "digits": Network(lambda: digits(1, 10), 8, 64, channels=1),
}
