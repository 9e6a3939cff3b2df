"""Segment images: predict the class of every pixel with a convolutional encoder and decoder.

The decoder contains a ``ConvTranspose2d``. The logits are (N, classes, height, width), as expected
by ``cross_entropy``, which averages over examples and pixels. The default
``likelihood="categorical"`` averages in the same way. For a loss that is summed over pixels, pass
``likelihood=kfc.Categorical(reduction="batchmean")``.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfc

BACKGROUND, SQUARE, DISC = range(3)
SIZE = 16


def draw_shapes(count: int) -> tuple[Tensor, Tensor]:
    """Return noisy images (count, 1, SIZE, SIZE) of shapes, and the class of each pixel."""
    rows, columns = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    centres = torch.randint(3, SIZE - 3, (2, 2, count, 1, 1))
    distances = [((rows - y).abs(), (columns - x).abs()) for y, x in centres]
    labels = torch.full((count, SIZE, SIZE), BACKGROUND)
    labels[torch.maximum(*distances[0]) <= 2] = SQUARE
    labels[distances[1][0] ** 2 + distances[1][1] ** 2 <= 10] = DISC  # on top of the square
    # Squares and discs are equally bright; only their shapes differ.
    images = (labels != BACKGROUND).float() + 0.2 * torch.randn(count, SIZE, SIZE)
    return images.unsqueeze(1), labels


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.ReLU(),
        nn.ConvTranspose2d(32, 16, 4, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 3, 3, padding=1),
    )


@torch.no_grad()
def overlap(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the intersection over union, averaged over the classes."""
    found = model(images).argmax(dim=1)
    ratios = []
    for kind in (BACKGROUND, SQUARE, DISC):
        both = ((found == kind) & (labels == kind)).sum()
        either = ((found == kind) | (labels == kind)).sum()
        ratios.append(both / either)
    return torch.stack(ratios).mean().item()


def main(steps: int = 80, batch_size: int = 64) -> None:
    torch.manual_seed(0)
    test_images, test_labels = draw_shapes(200)
    model = make_model()
    optimizer = kfc.KFC(model, lr=1e-2, seed=0)

    for step in range(1, steps + 1):
        images, labels = draw_shapes(batch_size)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step}: test overlap {overlap(model, test_images, test_labels):.1%}")


if __name__ == "__main__":
    main()
