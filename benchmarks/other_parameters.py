"""Training with plain and with scaled gradients of the parameters that have no Fisher block.

Prints the mean loss of the last sixth of the updates. Images are those of CIFAR-10, which
``kfc data cifar10`` downloads; characters are those of the pages in docs/.

    python benchmarks/other_parameters.py --network lstm --treatment plain --factor 10
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfc

DECODED = Path.home() / ".cache" / "kfc" / "data" / "decoded" / "cifar10"
CONTEXT = 48
Batch = tuple[Tensor, Tensor]


class Block(nn.Module):
    """A transformer block; LayerScale has two parameters of its own."""

    def __init__(self, width: int, *, causal: bool, layer_scale: float | None) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.causal = causal
        self.scales = [1.0, 1.0]
        if layer_scale is not None:
            values = [nn.Parameter(torch.full((width,), layer_scale)) for _ in range(2)]
            self.scales = nn.ParameterList(values)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in parts)
        scores = query @ key.mT / query.shape[-1] ** 0.5
        if self.causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(later, -1e9)
        found = (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)
        x = x + self.scales[0] * self.proj(found)
        return x + self.scales[1] * self.down(F.gelu(self.up(self.norms[1](x))))


class VisionTransformer(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, 8)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(0.02 * torch.randn(1, 17, width))
        blocks = [Block(width, causal=False, layer_scale=0.01) for _ in range(3)]
        self.rest = nn.Sequential(*blocks, nn.LayerNorm(width))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).mT
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.places
        return self.head(self.rest(x)[:, 0])


class LanguageModel(nn.Module):
    """Its embeddings are bare parameters."""

    def __init__(self, tokens: int, width: int = 64) -> None:
        super().__init__()
        self.tokens = nn.Parameter(0.1 * torch.randn(tokens, width))
        self.places = nn.Parameter(0.02 * torch.randn(CONTEXT, width))
        blocks = [Block(width, causal=True, layer_scale=None) for _ in range(2)]
        self.rest = nn.Sequential(*blocks, nn.LayerNorm(width), nn.Linear(width, tokens))

    def forward(self, indices: Tensor) -> Tensor:
        return self.rest(self.tokens[indices] + self.places).transpose(1, 2)


class Recurrent(nn.Module):
    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, 32)
        self.recurrent = nn.LSTM(32, 96, batch_first=True)
        self.head = nn.Linear(96, tokens)

    def forward(self, indices: Tensor) -> Tensor:
        return self.head(self.recurrent(self.embedding(indices))[0]).transpose(1, 2)


class Standardised(nn.Conv2d):
    """A convolution with a standardised weight and a gain, after timm's ``ScaledStdConv2d``."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, 3, stride=2, padding=1)
        self.gain = nn.Parameter(torch.ones(outputs, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        flat = self.weight.reshape(1, self.out_channels, -1)
        gain = self.gain.view(-1) * flat.shape[-1] ** -0.5
        weight = F.batch_norm(flat, None, None, gain, training=True, eps=1e-6)
        return F.conv2d(x, weight.view_as(self.weight), self.bias, self.stride, self.padding)


class ScaledReLU(nn.Module):
    """Keeps the variance of its inputs, after timm's ``ScaledReLU`` in networks of this kind."""

    def forward(self, x: Tensor) -> Tensor:
        return 1.7 * F.relu(x)


def images(generator: torch.Generator) -> Callable[[], Batch]:
    """Return a function that draws batches of CIFAR-10, with inputs of unit variance."""
    loaded = (np.load(DECODED / f"train-{kind}.npy")[:20000] for kind in ("images", "labels"))
    inputs, labels = map(torch.from_numpy, loaded)
    inputs = inputs.float()
    inputs = inputs if inputs.shape[1] == 3 else inputs.permute(0, 3, 1, 2).contiguous()
    deviation, mean = torch.std_mean(inputs, (0, 2, 3), keepdim=True)
    inputs, labels = (inputs - mean) / deviation, labels.long()

    def draw() -> Batch:
        chosen = torch.randint(len(inputs), (128,), generator=generator)
        return inputs[chosen], labels[chosen]

    return draw


def text() -> tuple[Tensor, int]:
    """Return the characters of the documentation as indices, and the number of different ones."""
    pages = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
    characters = "".join(page.read_text() for page in pages)
    places = {character: index for index, character in enumerate(sorted(set(characters)))}
    return torch.tensor([places[character] for character in characters]), len(places)


def problem(network: str, seed: int) -> tuple[nn.Module, Callable[[], Batch]]:
    """Return a network and a function that draws its batches."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    if network == "vit":
        return VisionTransformer(), images(generator)
    if network == "standardised":
        convolutions = [Standardised(3, 16), Standardised(16, 32), Standardised(32, 32)]
        layers = [module for each in convolutions for module in (each, ScaledReLU())]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 10)), images(generator)
    indices, tokens = text()

    def draw() -> Batch:
        starts = torch.randint(len(indices) - CONTEXT, (32,), generator=generator)
        rows = indices[starts[:, None] + torch.arange(CONTEXT + 1)]
        return rows[:, :-1], rows[:, 1:]

    return (LanguageModel(tokens) if network == "gpt" else Recurrent(tokens)), draw


def final_loss(args: argparse.Namespace, seed: int) -> float:
    """Return the mean loss of the last updates."""
    model, draw = problem(args.network, seed)
    probe = kfc.KFC(model)
    others = [*probe.engine.plan.plain, *args.exclude]
    probe.close()
    groups = [{"prefix": others, "treatment": args.treatment}]
    optimizer = kfc.KFC(model, fallback_lr=3e-3 * args.factor, groups=groups, seed=0)
    losses = []
    for _ in range(args.updates):
        inputs, targets = draw()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    last = losses[-(args.updates // 6) :]
    return sum(last) / len(last)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    networks = ("standardised", "lstm", "gpt", "vit")
    parser.add_argument("--network", choices=networks, default="lstm")
    parser.add_argument("--treatment", choices=("scaled", "plain"), default="scaled")
    parser.add_argument("--factor", type=float, default=1.0, help="fallback_lr over lr")
    parser.add_argument("--exclude", nargs="*", default=[], help="layers without factors, too")
    parser.add_argument("--updates", type=int, default=250)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for seed in range(args.seeds):
        loss = final_loss(args, seed)
        print(f"{args.network}, {args.treatment}, factor {args.factor:g}, seed {seed}: {loss:.3f}")


if __name__ == "__main__":
    main()
