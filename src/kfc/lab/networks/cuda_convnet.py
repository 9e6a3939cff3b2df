"""The cuda-convnet network for CIFAR-10 of the paper, and its variants."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Pooling = Literal["max", "average"]

# The values of cuda-convnet's "18%" network.
WEIGHT_STDS = {"conv1": 1e-4, "conv2": 0.01, "conv3": 0.01, "fc10": 0.01}
WEIGHT_COSTS = {f"conv{layer}.weight": 0.004 for layer in (1, 2, 3)} | {"fc10.weight": 1.0}


class WithinMapNormalisation(nn.Module):
    """y = x (1 + (scale / size²) Σ x²)^-0.75, the sum over the size x size window around a pixel.

    Unlike that of ``nn.LocalResponseNorm``, the window is within the pixel's own map; it is cut off
    at the border.
    """

    def __init__(self, size: int = 3, scale: float = 5e-5) -> None:
        super().__init__()
        if size < 1 or size % 2 == 0:
            raise ValueError(f"the window must have an odd size, got {size}")
        self.size = size
        self.scale = scale

    def extra_repr(self) -> str:
        return f"size={self.size}, scale={self.scale:g}"

    def forward(self, maps: Tensor) -> Tensor:
        """Map (N, channels, height, width) to the same shape."""
        base = 1 + self.scale / self.size**2 * self._window_sums(maps.square())
        # Square roots are five times as fast as the power -0.75.
        return maps * (base * base.sqrt()).rsqrt()

    def _window_sums(self, maps: Tensor) -> Tensor:
        """Convolve each map with ones, which is faster than pooling with stride 1."""
        channels = maps.shape[-3]
        ones = torch.ones(channels, 1, self.size, self.size, dtype=maps.dtype, device=maps.device)
        return F.conv2d(maps, ones, padding=self.size // 2, groups=channels)


def cuda_convnet(
    channels: int,
    classes: int,
    *,
    pooling: tuple[Pooling, Pooling, Pooling] = ("max", "average", "average"),
    batch_normalised: bool = False,
) -> nn.Sequential:
    """Return a network from images (N, channels, 32, 32) to logits (N, classes).

    Args:
        pooling: the kinds of pooling in the three layers. The first layer pools before its ReLU,
            the others after it, which makes a difference for averages.
        batch_normalised: whether batch normalisation follows each convolution, which then has no
            bias. The response normalisation remains; the logits are not normalised.
    """
    layers: dict[str, nn.Module] = {
        "conv1": convolution(channels, 32, bias=not batch_normalised),
        "pool1": halving(pooling[0]),
        "relu1": nn.ReLU(inplace=True),
        "rnorm1": WithinMapNormalisation(),
        "conv2": convolution(32, 32, bias=not batch_normalised),
        "relu2": nn.ReLU(inplace=True),
        "pool2": halving(pooling[1]),
        "rnorm2": WithinMapNormalisation(),
        "conv3": convolution(32, 64, bias=not batch_normalised),
        "relu3": nn.ReLU(inplace=True),
        "pool3": halving(pooling[2]),
        "flatten": nn.Flatten(),
        "fc10": nn.Linear(1024, classes),
    }
    model = nn.Sequential()
    for name, layer in layers.items():
        model.add_module(name, layer)
        if batch_normalised and isinstance(layer, nn.Conv2d):
            model.add_module(name.replace("conv", "norm"), nn.BatchNorm2d(layer.out_channels))
    return model


def convolution(inputs: int, outputs: int, bias: bool) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel_size=5, padding=2, bias=bias)


def halving(kind: Pooling) -> nn.Module:
    """Pool 3x3 windows at every second pixel; averages are over the pixels within the border."""
    if kind == "max":
        return nn.MaxPool2d(3, stride=2, ceil_mode=True)
    return nn.AvgPool2d(3, stride=2, ceil_mode=True, count_include_pad=False)
