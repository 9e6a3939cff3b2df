"""Small networks of several kinds, for the workloads of ``kfc compare suite``."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfc.lab.networks.architectures import convolution, halving


def dropout_convnet() -> nn.Sequential:
    """Return ``svhn_convnet`` with about a quarter of the maps and an eighth of the units."""
    return nn.Sequential(
        nn.Dropout(0.1),
        *(*convolution(3, 24, size=5), halving("max"), nn.Dropout(0.1)),
        *(*convolution(24, 32, size=5), halving("max"), nn.Dropout(0.1)),
        *(*convolution(32, 64, size=5), halving("max"), nn.Dropout(0.25)),
        nn.Flatten(),
        *(nn.Linear(64 * 4 * 4, 256), nn.ReLU(inplace=True), nn.Dropout(0.25)),
        nn.Linear(256, 10),
    )


def sequence_convnet() -> nn.Sequential:
    """Return a 1-D convolutional network from (N, 1, length) to logits (N, 10)."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise((1, 16, 32, 64, 64)):
        layers += [
            nn.Conv1d(inputs, outputs, 9, stride=2, padding=4),
            nn.ReLU(inplace=True),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(7), nn.Flatten(), nn.Linear(64 * 7, 10))


class Attention(nn.Module):
    """Multi-head self-attention, with linear layers of its own for queries, keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.output = nn.Linear(width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (N, tokens, width) to the same shape."""
        query, key, value = (
            layer(tokens).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        # Written out, because fused attention has no forward-mode derivative.
        scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
        mixed: Tensor = scores.softmax(dim=-1) @ value
        attended: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return attended


class TransformerBlock(nn.Module):
    """Attention and a two-layer network, each with a normalised input and a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (N, tokens, width) to the same shape."""
        tokens = tokens + self.attention(self.norm1(tokens))
        branch: Tensor = self.mlp(self.norm2(tokens))
        return tokens + branch


class ViT(nn.Module):
    """A small vision transformer: patches of 4x4 pixels, learned positions, mean of all tokens."""

    def __init__(self, width: int = 48, depth: int = 3, heads: int = 4, side: int = 32) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, kernel_size=4, stride=4)
        self.positions = nn.Parameter(0.02 * torch.randn((side // 4) ** 2, width))
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (N, 3, side, side) to logits (N, 10)."""
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        logits: Tensor = self.linear(self.norm(self.blocks(tokens)).mean(dim=1))
        return logits


class UNet(nn.Module):
    """A U-Net (Ronneberger et al., 2015) with two halvings and batch normalisation.

    It takes images (N, 1, height, width), sides divisible by 4, to logits (N, classes, height,
    width).
    """

    def __init__(self, classes: int, maps: int = 12) -> None:
        super().__init__()
        self.down1 = self._pair(1, maps)
        self.down2 = self._pair(maps, 2 * maps)
        self.bottom = self._pair(2 * maps, 4 * maps)
        self.up2 = nn.ConvTranspose2d(4 * maps, 2 * maps, kernel_size=2, stride=2)
        self.merge2 = self._pair(4 * maps, 2 * maps)
        self.up1 = nn.ConvTranspose2d(2 * maps, maps, kernel_size=2, stride=2)
        self.merge1 = self._pair(2 * maps, maps)
        self.output = nn.Conv2d(maps, classes, kernel_size=1)

    @staticmethod
    def _pair(inputs: int, outputs: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for maps in (inputs, outputs):
            layers.append(nn.Conv2d(maps, outputs, kernel_size=3, padding=1, bias=False))
            layers += [nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
        return nn.Sequential(*layers)

    def forward(self, images: Tensor) -> Tensor:
        fine = self.down1(images)
        middle = self.down2(F.max_pool2d(fine, 2))
        coarse = self.bottom(F.max_pool2d(middle, 2))
        middle = self.merge2(torch.cat([middle, self.up2(coarse)], dim=1))
        fine = self.merge1(torch.cat([fine, self.up1(middle)], dim=1))
        logits: Tensor = self.output(fine)
        return logits
