"""Hessian-free optimization of the digits: conjugate gradients on the exact Fisher matrix.

Each update solves (F + δI) x = ∇h on the whole training set, with the exact Fisher matrix F. The
Kronecker-factored approximation of F is only the preconditioner, and saves iterations (needs
scikit-learn).
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import kfc


def main(updates: int = 6, damping: float = 1e-3) -> None:
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    labels = torch.tensor(digits.target)
    train_images, test_images = images[:1437], images[1437:]
    train_labels, test_labels = labels[:1437], labels[1437:]
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(256, 10)
    )
    for update in range(1, updates + 1):
        model.zero_grad()
        loss = F.cross_entropy(model(train_images), train_labels)
        loss.backward()
        gradient = {name: p.grad for name, p in model.named_parameters()}
        found = kfc.solve_fisher(
            model, train_images, gradient, damping=damping, tolerance=0.1, max_iterations=30
        )
        reached = line_search(model, found.solution, train_images, train_labels, loss.item())
        with torch.no_grad():
            test = (model(test_images).argmax(dim=1) == test_labels).float().mean().item()
        iterations = len(found.residuals) - 1
        print(
            f"update {update}: {iterations} iterations, loss {reached:.4f}, "
            f"test accuracy {test:.1%}"
        )


@torch.no_grad()
def line_search(
    model: nn.Module, solution: dict[str, Tensor], images: Tensor, labels: Tensor, before: float
) -> float:
    """Move along -x, with half the length until the loss falls, and return the new loss."""
    start, length = {name: p.clone() for name, p in model.named_parameters()}, 1.0
    while length > 1e-3:
        for name, parameter in model.named_parameters():
            parameter.copy_(start[name]).sub_(solution[name], alpha=length)
        loss = F.cross_entropy(model(images), labels).item()
        if loss < before:
            return loss
        length /= 2
    for name, parameter in model.named_parameters():
        parameter.copy_(start[name])
    return before


if __name__ == "__main__":
    main()
