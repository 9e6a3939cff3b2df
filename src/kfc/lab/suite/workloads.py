"""The workloads of the benchmark: network, data, batch size, target and time limit of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfc.lab.components import TASKS, Task
from kfc.lab.networks.architectures import ResNet20, autoencoder, cuda_convnet, digits, initialise
from kfc.lab.networks.small import UNet, ViT, dropout_convnet, sequence_convnet
from kfc.lab.suite.problems import BACKGROUND, Form


def _wrong_digit_pixels(outputs: Tensor, images: Tensor, labels: Tensor) -> Tensor:
    """Return the fraction of each image's digit pixels, (N,), that have the wrong class."""
    belongs = labels != BACKGROUND
    wrong = (outputs.argmax(dim=1) != labels) & belongs
    return wrong.sum(dim=(1, 2)) / belongs.sum(dim=(1, 2)).clamp(min=1)


SUITE_TASKS = {
    **TASKS,
    # The error is the fraction of the digits' pixels that are classified wrongly.
    "segmentation": Task(
        likelihood="categorical",
        output_shape=lambda images, classes: (len(images), classes, *images.shape[-2:]),
        loss=lambda outputs, images, labels: F.cross_entropy(outputs, labels),
        mistakes=_wrong_digit_pixels,
        error=lambda mean: 100 * mean,
    ),
}


@dataclass(frozen=True)
class Workload:
    """A training problem with a target.

    Attributes:
        data: the name of a data set.
        network: makes the network; torch's initialisation remains if ``init`` is ``None``.
        metric: ``"train_error"``, ``"test_error"`` (percent) or ``"train_loss"``, on the first
            ``examples`` of the split.
        seconds: the time limit, of training alone.
        task: a name in ``SUITE_TASKS``.
        inputs: see ``kfc.lab.networks.Network``.
        augmented: whether training images are cropped and flipped at random.
        evaluations: the number of evaluations within the time limit.
        quick: the target and the time limit of `--quick`; ``None`` if it leaves the workload out.
    """

    name: str
    title: str
    data: str
    network: Callable[[], nn.Module]
    batch_size: int
    metric: str
    target: float
    seconds: float
    init: str | None = "kaiming"
    task: str = "classification"
    inputs: str = "normalised"
    form: Form = "images"
    augmented: bool = False
    examples: int = 2000
    evaluations: int = 40
    quick: tuple[float, float] | None = None

    @property
    def split(self) -> str:
        """The split that is evaluated."""
        return self.metric.split("_")[0]

    @property
    def goal(self) -> str:
        """The target in words."""
        if self.metric == "train_loss":
            return f"training loss {self.target:g}"
        return f"{self.target:g}% {'training' if self.split == 'train' else 'test'} error"

    def build(self, seed: int) -> nn.Module:
        """Return the network with initial weights that depend on the seed only."""
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            model = self.network()
            if self.init is not None:
                initialise(model, self.init)
        # nn.Module.to has no overload for a memory format alone.
        return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]

    def adjusted(self, quick: bool, limit_factor: float) -> Workload:
        """Return the workload of `--quick` or the usual one, with its time limit multiplied."""
        target, seconds = self.target, self.seconds
        if quick:
            assert self.quick is not None
            target, seconds = self.quick
        return replace(self, target=target, seconds=limit_factor * seconds)


_ALL = (
    Workload(
        name="digits",
        title="digits, small CNN",
        data="digits",
        network=partial(digits, 1, 10),
        batch_size=64,
        metric="train_loss",
        target=0.001,
        seconds=15.0,
        evaluations=200,
        quick=(0.01, 8.0),
    ),
    Workload(
        name="cifar10",
        title="CIFAR-10, the paper's network",
        data="cifar10",
        network=partial(cuda_convnet, 3, 10),
        batch_size=128,
        metric="train_error",
        target=6.0,
        seconds=300.0,
    ),
    Workload(
        name="resnet",
        title="CIFAR-10, ResNet-20 with BN, augmented",
        data="cifar10",
        network=partial(ResNet20, 3, 10, width=8),
        batch_size=128,
        metric="test_error",
        target=40.0,
        seconds=100.0,
        augmented=True,
    ),
    Workload(
        name="svhn",
        title="SVHN, dropout",
        data="svhn",
        network=dropout_convnet,
        batch_size=128,
        metric="test_error",
        target=18.0,
        seconds=100.0,
    ),
    Workload(
        name="autoencoder",
        title="MNIST, deep autoencoder",
        data="mnist",
        network=partial(autoencoder, 1, 10, sizes=(784, 500, 250, 100, 30)),
        batch_size=256,
        metric="train_loss",
        target=0.11,
        seconds=80.0,
        init="glorot",
        task="reconstruction",
        inputs="unit",
        quick=(0.2, 20.0),
    ),
    Workload(
        name="vit",
        title="CIFAR-10, small ViT",
        data="cifar10",
        network=ViT,
        batch_size=128,
        metric="test_error",
        target=45.0,
        seconds=100.0,
        init=None,
    ),
    Workload(
        name="unet",
        title="MNIST canvases, U-Net",
        data="mnist",
        network=partial(UNet, BACKGROUND + 1),
        batch_size=32,
        metric="test_error",
        target=30.0,
        seconds=100.0,
        task="segmentation",
        form="canvases",
        examples=400,
    ),
    Workload(
        name="sequence",
        title="MNIST as a sequence, 1-D CNN",
        data="mnist",
        network=sequence_convnet,
        batch_size=128,
        metric="test_error",
        target=2.0,
        seconds=80.0,
        form="sequences",
        quick=(8.0, 20.0),
    ),
)
WORKLOADS = {workload.name: workload for workload in _ALL}
