"""Classify noisy one-dimensional waveforms of four kinds with Conv1d layers."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfc

LENGTH = 64
WAVES = (
    torch.sin,
    lambda phase: torch.sin(phase).sign(),  # square
    lambda phase: torch.asin(torch.sin(phase)) * 2 / math.pi,  # triangle
    lambda phase: (phase / math.pi) % 2 - 1,  # sawtooth
)


def make_signals(count: int) -> tuple[Tensor, Tensor]:
    """Return noisy waves of random frequency and phase, (count, 1, LENGTH), and their kinds."""
    periods = 2 + 3 * torch.rand(count, 1)
    shifts = torch.rand(count, 1)
    phases = 2 * math.pi * (periods * torch.linspace(0, 1, LENGTH) + shifts)
    kinds = torch.randint(len(WAVES), (count,))
    every_kind = torch.stack([wave(phases) for wave in WAVES])
    clean = every_kind[kinds, torch.arange(count)]
    # Scale to unit variance, so that the amplitude does not reveal the kind.
    clean = clean / clean.std(dim=1, keepdim=True)
    return (clean + 0.2 * torch.randn(count, LENGTH)).unsqueeze(1), kinds


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(1, 16, 7, stride=2, padding=3),
        nn.ReLU(),
        nn.Conv1d(16, 32, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv1d(32, 32, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        nn.Linear(32, len(WAVES)),
    )


@torch.no_grad()
def accuracy(model: nn.Module, signals: Tensor, kinds: Tensor) -> float:
    return (model(signals).argmax(dim=1) == kinds).float().mean().item()


def main(steps: int = 100, batch_size: int = 128) -> None:
    torch.manual_seed(0)
    test_signals, test_kinds = make_signals(1000)
    model = make_model()
    optimizer = kfc.KFC(model, lr=3e-3, seed=0)

    for step in range(1, steps + 1):
        signals, kinds = make_signals(batch_size)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(signals), kinds)
        loss.backward()
        optimizer.step()
        if step % 25 == 0:
            print(f"step {step}: test accuracy {accuracy(model, test_signals, test_kinds):.1%}")


if __name__ == "__main__":
    main()
