"""Train on scikit-learn's handwritten digits with a plain training loop (needs scikit-learn).

Only the optimizer differs from the usual loop. The optimizer keeps averaged parameters, with which
the model is evaluated.
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import kfc


def load() -> tuple[Tensor, Tensor]:
    """Return images (1797, 1, 8, 8) of about unit scale, and labels (1797,)."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    return images, torch.tensor(digits.target)


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    model.eval()
    correct = (model(images).argmax(dim=1) == labels).float().mean().item()
    model.train()
    return correct


def main(epochs: int = 6, batch_size: int = 128) -> None:
    torch.manual_seed(0)
    images, labels = load()
    # The last digits were written by different people than the first: a fair test set.
    train_images, test_images = images[:1437], images[1437:]
    train_labels, test_labels = labels[:1437], labels[1437:]

    model = make_model()
    steps_per_epoch = len(train_labels) // batch_size
    optimizer = kfc.KFC(model, lr=3e-3, averaging_timescale=steps_per_epoch, seed=0)

    for epoch in range(1, epochs + 1):
        for batch in torch.randperm(len(train_labels)).split(batch_size):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(train_images[batch]), train_labels[batch])
            loss.backward()
            optimizer.step()
        with optimizer.averaged_parameters():
            print(f"epoch {epoch}: test accuracy {accuracy(model, test_images, test_labels):.1%}")


if __name__ == "__main__":
    main()
