"""The architectures of the networks, and their initial weights."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

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
        # A convolution with ones, which is faster than pooling with stride 1.
        ones = maps.new_ones(maps.shape[-3], 1, self.size, self.size)
        sums = F.conv2d(maps.square(), ones, padding=self.size // 2, groups=len(ones))
        base = 1 + self.scale / self.size**2 * sums
        # Square roots are five times as fast as the power -0.75.
        return maps * (base * base.sqrt()).rsqrt()


def cuda_convnet(
    channels: int,
    classes: int,
    *,
    pooling: tuple[Pooling, Pooling, Pooling] = ("max", "average", "average"),
    batch_normalised: bool = False,
) -> nn.Sequential:
    """Return the paper's network from images (N, channels, 32, 32) to logits (N, classes).

    Args:
        pooling: the kinds of pooling in the three layers. The first layer pools before its ReLU,
            the others after it, which makes a difference for averages.
        batch_normalised: whether batch normalisation follows each convolution, which then has no
            bias. The response normalisation remains; the logits are not normalised.
    """
    bias = not batch_normalised
    layers: dict[str, nn.Module] = {
        "conv1": nn.Conv2d(channels, 32, kernel_size=5, padding=2, bias=bias),
        "pool1": halving(pooling[0]),
        "relu1": nn.ReLU(inplace=True),
        "rnorm1": WithinMapNormalisation(),
        "conv2": nn.Conv2d(32, 32, kernel_size=5, padding=2, bias=bias),
        "relu2": nn.ReLU(inplace=True),
        "pool2": halving(pooling[1]),
        "rnorm2": WithinMapNormalisation(),
        "conv3": nn.Conv2d(32, 64, kernel_size=5, padding=2, bias=bias),
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


def halving(kind: Pooling) -> nn.Module:
    """Pool 3x3 windows at every second pixel; averages are over the pixels within the border."""
    if kind == "max":
        return nn.MaxPool2d(3, stride=2, ceil_mode=True)
    return nn.AvgPool2d(3, stride=2, ceil_mode=True, count_include_pad=False)


def convolution(inputs: int, outputs: int, size: int = 3) -> tuple[nn.Module, nn.Module]:
    """Return a convolution that keeps the size of the maps, and a ReLU."""
    return nn.Conv2d(inputs, outputs, size, padding=size // 2), nn.ReLU(inplace=True)


def digits(channels: int, classes: int) -> nn.Sequential:
    """Return a small network from images (N, channels, 8, 8) to logits (N, classes)."""
    return nn.Sequential(
        *convolution(channels, 16),
        nn.MaxPool2d(2),
        *convolution(16, 32),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 2 * 2, classes),
    )


def vgg(channels: int, classes: int) -> nn.Sequential:
    """Return a small VGG (after Simonyan & Zisserman, 2015): 40 million multiply-adds per image.

    It takes images (N, channels, 32, 32), or of 28x28 pixels, to logits (N, classes).
    """
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise((channels, 32, 64, 128)):
        layers += [*convolution(inputs, outputs), *convolution(outputs, outputs)]
        layers.append(nn.MaxPool2d(2, ceil_mode=True))
    layers += [nn.Flatten(), nn.Linear(128 * 4 * 4, 256), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.Linear(256, classes))


def svhn_convnet(channels: int, classes: int) -> nn.Sequential:
    """Return the network for SVHN of Srivastava et al., "Dropout" (2014).

    It takes images (N, channels, 32, 32) to logits (N, classes). Dropout applies to the input, and
    after pooling to the output of every layer but the last. Pooling windows extend over the border
    (ceil mode), so that maps are halved to 16, 8 and 4 pixels.
    """
    return nn.Sequential(
        nn.Dropout(1 - 0.9),  # the paper states the probability of keeping a unit
        *(*convolution(channels, 96, size=5), halving("max"), nn.Dropout(0.25)),
        *(*convolution(96, 128, size=5), halving("max"), nn.Dropout(0.25)),
        *(*convolution(128, 256, size=5), halving("max"), nn.Dropout(0.5)),
        nn.Flatten(),
        *(nn.Linear(256 * 4 * 4, 2048), nn.ReLU(inplace=True), nn.Dropout(0.5)),
        *(nn.Linear(2048, 2048), nn.ReLU(inplace=True), nn.Dropout(0.5)),
        nn.Linear(2048, classes),
    )


def autoencoder(channels: int, classes: int, *, sizes: tuple[int, ...]) -> nn.Sequential:
    """Return a deep autoencoder from pixels (N, channels, side, side) to logits of the same shape.

    Args:
        classes: not used; the labels do not matter.
        sizes: of the layers from a single-channel image to the code; the decoder reverses them.
    """
    side = math.isqrt(sizes[0])
    pixels = channels * side**2
    widths = [pixels, *sizes[1:], *reversed(sizes[1:-1]), pixels]
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    # The code is linear, as the outputs are.
    del layers[2 * (len(sizes) - 1)]
    return nn.Sequential(*layers[:-1], nn.Unflatten(1, (channels, side, side)))


class ResidualBlock(nn.Module):
    """relu(shortcut(x) + branch(x)) with a branch of two 3x3 convolutions.

    Without normalisation the convolutions have biases, and nothing limits the sums of nine blocks;
    Kaiming initialisation then sets the last convolution's weights of each branch to 0.
    """

    def __init__(self, inputs: int, outputs: int, stride: int, normalised: bool) -> None:
        super().__init__()
        self.conv1 = conv3x3(inputs, outputs, stride, bias=not normalised)
        self.norm1 = normaliser(outputs, normalised)
        self.conv2 = conv3x3(outputs, outputs, stride=1, bias=not normalised)
        self.norm2 = normaliser(outputs, normalised)
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
    """ResNet-20 in its CIFAR form (He et al., 2016), with or without batch normalisation.

    It has a convolution, three stages of residual blocks with 16, 32 and 64 maps (``width`` times
    1, 2 and 4), and a linear layer. The name counts the convolutions and the linear layer.
    """

    def __init__(
        self, channels: int, classes: int, *, normalised: bool = True, width: int = 16
    ) -> None:
        super().__init__()
        self.conv = conv3x3(channels, width, stride=1, bias=not normalised)
        self.norm = normaliser(width, normalised)
        maps = [width * times for times in (1, 1, 1, 1, 2, 2, 2, 4, 4, 4)]
        self.blocks = nn.Sequential(
            *(
                ResidualBlock(inputs, outputs, outputs // inputs, normalised)
                for inputs, outputs in pairwise(maps)
            )
        )
        self.linear = nn.Linear(maps[-1], classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (N, channels, height, width) of any size to logits (N, classes)."""
        maps = self.blocks(F.relu(self.norm(self.conv(images))))
        logits: Tensor = self.linear(maps.mean(dim=(2, 3)))
        return logits


def conv3x3(inputs: int, outputs: int, stride: int, bias: bool) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel_size=3, stride=stride, padding=1, bias=bias)


def normaliser(maps: int, normalised: bool) -> nn.Module:
    return nn.BatchNorm2d(maps) if normalised else nn.Identity()


@torch.no_grad()
def initialise(model: nn.Module, init: str) -> None:
    """Draw Gaussian weights of convolutional and linear layers, and set their biases to 0.

    torch initialises the scales and biases of normalisation layers to 1 and 0.

    Args:
        init: ``"cuda-convnet"`` for its published standard deviations; ``"glorot"`` for the
            variance 2 / (fan-in + fan-out), which suits tanh units; ``"kaiming"`` for the variance
            2 / fan-in, where the last layer's weights are a tenth of that, so that the initial
            logits are small, and residual branches without normalisation start at 0.
    """
    modules = model.named_modules()
    layers = {name: each for name, each in modules if isinstance(each, _ConvNd | nn.Linear)}
    for name, layer in layers.items():
        if layer.bias is not None:
            layer.bias.zero_()
        if init == "cuda-convnet":
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
