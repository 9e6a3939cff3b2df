"""Train a model that returns more than its predictions; ``output=`` selects the predictions.

The model returns (logits, features), and the loss contains a small penalty on the features. The
curvature is that of the cross-entropy of the logits; the penalty affects only the gradient.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfc

ARMS = 3


def draw_spirals(count: int) -> tuple[Tensor, Tensor]:
    """Return points (count, 2) on spiral arms, and the arm of each point."""
    arms = torch.randint(ARMS, (count,))
    radii = torch.rand(count).sqrt()
    angles = 2 * math.pi * (radii + arms / ARMS) + 0.1 * torch.randn(count)
    return torch.stack([radii * angles.cos(), radii * angles.sin()], dim=1), arms


class Classifier(nn.Module):
    """A classifier that returns logits and the features from which they are computed."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()
        )
        self.head = nn.Linear(width, ARMS)

    def forward(self, points: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(points)
        return self.head(features), features


@torch.no_grad()
def accuracy(model: nn.Module, points: Tensor, arms: Tensor) -> float:
    logits, _ = model(points)
    return (logits.argmax(dim=1) == arms).float().mean().item()


def main(steps: int = 100, batch_size: int = 128) -> None:
    torch.manual_seed(0)
    test_points, test_arms = draw_spirals(1000)
    model = Classifier()
    optimizer = kfc.KFC(model, lr=1e-2, output=lambda returned: returned[0], seed=0)

    for step in range(1, steps + 1):
        points, arms = draw_spirals(batch_size)
        optimizer.zero_grad()
        logits, features = model(points)
        loss = F.cross_entropy(logits, arms) + 1e-4 * features.square().mean()
        loss.backward()
        optimizer.step()
        if step % 25 == 0:
            print(f"step {step}: test accuracy {accuracy(model, test_points, test_arms):.1%}")


if __name__ == "__main__":
    main()
