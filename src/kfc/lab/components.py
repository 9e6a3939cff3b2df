"""The components of a run: task, network, batches, optimizer, averaged parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfc.distributed.ranks import Ranks
from kfc.lab.averages import Averages
from kfc.lab.config import CUDA_CONVNET, ConfigError, RunConfig
from kfc.lab.data import Batches, Dataset, Inputs, Split
from kfc.lab.data.batches import part_of
from kfc.lab.data.catalogue import CATALOGUE
from kfc.lab.method import Setup
from kfc.lab.networks import NETWORKS, build
from kfc.lab.optimizers import optimizer_options
from kfc.lab.options import config_errors
from kfc.lab.processes.data_parallel import Replica, synchronised
from kfc.lab.processes.ranks import device_of_rank, explained_collectives, failing_together

PAPER_AVERAGING_EXAMPLES = 50_000
EVALUATION_BATCH = 1000


@dataclass(frozen=True)
class Task:
    """What a network is trained for: a loss and an error measure.

    Attributes:
        likelihood: the likelihood that belongs to the loss, as ``kfc.KFC`` takes it.
        output_shape: the shape of a network's output, from (images, number of classes).
        loss: the mean loss over the examples, from (outputs, images, labels).
        mistakes: (N,) the contribution of each example to the error, from the same.
        error: the error in percent, from the mean of the contributions.
    """

    likelihood: str
    output_shape: Callable[[Tensor, int], tuple[int, ...]]
    loss: Callable[[Tensor, Tensor, Tensor], Tensor]
    mistakes: Callable[[Tensor, Tensor, Tensor], Tensor]
    error: Callable[[float], float]


TASKS = {
    # The error is the fraction of images that are classified wrongly.
    "classification": Task(
        likelihood="categorical",
        output_shape=lambda images, classes: (len(images), classes),
        loss=lambda outputs, images, labels: F.cross_entropy(outputs, labels),
        mistakes=lambda outputs, images, labels: outputs.argmax(dim=1) != labels,
        error=lambda mean: 100 * mean,
    ),
    # Pixels from 0 to 1 are probabilities; the error is their root mean square error.
    "reconstruction": Task(
        likelihood="bernoulli",
        output_shape=lambda images, classes: tuple(images.shape),
        loss=lambda outputs, images, labels: F.binary_cross_entropy_with_logits(outputs, images),
        mistakes=lambda outputs, images, labels: (
            (outputs.sigmoid() - images).square().flatten(1).mean(dim=1)
        ),
        error=lambda mean: float(100 * mean**0.5),
    ),
}


class NetworkComponents:
    """A run's network, and its data in the form that the network takes.

    The network is built and tried before anything is written.
    """

    def __init__(self, config: RunConfig, data: Dataset, ranks: Ranks | None = None) -> None:
        self.ranks = ranks or Ranks(None)
        self.device = _usable(device_of_rank(config.machine.device, self.ranks))
        known = NETWORKS.get(config.problem.net)
        self.task = TASKS[known.task if known else "classification"]
        self.inputs = _inputs(config.problem.inputs, data.train)
        model = build(
            config.problem.net,
            image=data.train.images.shape[1:],
            classes=data.classes,
            init=config.problem.init,
            seed=config.machine.seed,
        )
        # nn.Module.to has no overload for a memory format alone.
        model = model.to(self.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.model = synchronised(model, self.ranks, self.device)
        self._check_outputs(config.problem.net, data)

    def on_device(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Move a batch to the device, in the memory format in which convolutions are fastest."""
        images = images.to(self.device).contiguous(memory_format=torch.channels_last)
        return images, labels.to(self.device)

    def examples(self, split: Split, stop: int, start: int = 0) -> tuple[Tensor, Tensor]:
        """Return images and labels ``start`` to ``stop`` of a split."""
        labels = torch.from_numpy(split.labels[start:stop].copy())
        return self.on_device(self.inputs(split.images[start:stop]), labels)

    def _check_outputs(self, net: str, data: Dataset) -> None:
        """Raise ``ConfigError`` if the network's outputs do not fit the data."""
        images, _ = self.examples(data.train, 2)
        self.model.eval()
        try:
            with torch.no_grad():
                outputs = self.model(images)
        except Exception as error:
            raise ConfigError(
                f"the network {net} fails on images {tuple(images.shape)}: {error}"
            ) from error
        finally:
            self.model.train()
        wanted = self.task.output_shape(images, data.classes)
        if not isinstance(outputs, Tensor) or outputs.shape != wanted:
            found = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
            raise ConfigError(
                f"the network {net} must return a tensor of shape {wanted} for two images; "
                f"it returned {found}"
            )


def require_network(config: RunConfig) -> None:
    """Build the run's network, and try it on random images like those of its data, on the CPU.

    Errors of the network are thus reported before the data is loaded.
    """
    entry = CATALOGUE[config.problem.data]
    pixels = np.random.default_rng(0).integers(0, 256, (2, *entry.shape), dtype=np.uint8)
    split = Split(pixels, np.zeros(2, np.int64))
    data = Dataset(split, split, entry.name, entry.classes, "", False)
    NetworkComponents(config.with_options(device="cpu"), data)


class RunComponents(NetworkComponents):
    """All components of a run.

    Attributes:
        model: the network itself; ``loss`` runs it through ``replica``.
        averages: the averaged parameters.
        first_image: of the training set, as a batch.
        estimated_examples: the number of training examples of the first estimate of the factors.
    """

    def __init__(self, config: RunConfig, data: Dataset, ranks: Ranks | None = None) -> None:
        ranks = ranks or Ranks(None)
        with failing_together(ranks):
            super().__init__(config, data, ranks)
            if not any(parameter.requires_grad for parameter in self.model.parameters()):
                count = sum(1 for _ in self.model.parameters())
                raise ConfigError(
                    f"the network {config.problem.net} has nothing to train: "
                    f"{f'all of its {count} parameters are frozen' if count else 'no parameters'}"
                )
            with config_errors():
                self.batches = Batches(
                    data.train,
                    self.inputs,
                    config.problem.batch_size,
                    config.machine.seed,
                    workers=config.machine.workers,
                    examples=config.problem.train_examples,
                    rank=ranks.rank,
                    ranks=ranks.size,
                )
        epoch = len(self.batches) * config.problem.batch_size
        averaged = config.records.averaging_examples or min(epoch, PAPER_AVERAGING_EXAMPLES)
        timescale = averaged / config.problem.batch_size
        with failing_together(ranks), config_errors():
            costs = weight_costs(config, self.model)
            setup = Setup(
                config.method.lr, costs, config.machine.seed, self.task.likelihood, timescale
            )
            options = optimizer_options(config.method.optimizer, config.method.options)
            self.estimated_examples = options.first_estimate(self.batches.examples)
            # Optimizers without a seed of their own take that of torch.
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(config.machine.seed)
                self.optimizer = options.make(self.model, setup)
        with explained_collectives(ranks):
            self.replica = Replica(self.model, ranks, self.device)
        self.averages = Averages(self.model, timescale, config.records.averaging_fraction)
        self.first_image, _ = self.examples(data.train, 1)
        self._evaluated = {
            "train": (data.train, min(self.batches.examples, config.records.evaluation_examples)),
            "test": (data.test, min(len(data.test), config.records.evaluation_examples)),
        }

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return this rank's loss, weighted so that the mean over ranks is the batch's loss."""
        loss = self.task.loss(self.replica.forward(images), images, labels)
        return loss if self.batches.weight == 1 else self.batches.weight * loss

    @torch.no_grad()
    def evaluate(self, name: str) -> tuple[float, float]:
        """Return the mean loss and the error in percent on the split "train" or "test".

        Each rank evaluates its part of the examples; all return the result for all examples.
        """
        split, count = self._evaluated[name]
        self.model.eval()
        loss = mistakes = 0.0
        mine = part_of(count, self.ranks.rank, self.ranks.size)
        for start in mine[::EVALUATION_BATCH]:
            stop = min(start + EVALUATION_BATCH, mine.stop)
            images, labels = self.examples(split, stop, start)
            outputs = self.model(images)
            loss += self.task.loss(outputs, images, labels).item() * len(images)
            mistakes += self.task.mistakes(outputs, images, labels).sum().item()
        self.model.train()
        loss, mistakes = self.ranks.sum([loss, mistakes], "evaluation")
        return loss / count, self.task.error(mistakes / count)


def weight_costs(config: RunConfig, model: nn.Module) -> dict[str, float]:
    """Return λ by parameter name; biases and scales have none, unless the run decays them."""
    if config.method.weight_decay == CUDA_CONVNET:
        return dict(NETWORKS[config.problem.net].weight_costs)
    cost = float(config.method.weight_decay)
    decayed = [
        name
        for name, parameter in model.named_parameters()
        if parameter.dim() > 1 or config.method.decay_biases
    ]
    return dict.fromkeys(decayed, cost) if cost else {}


def _usable(device: torch.device) -> torch.device:
    try:
        torch.zeros((), device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ConfigError(f"device {device} cannot be used here: {error}") from error
    return device


@lru_cache(maxsize=2)
def _inputs(kind: str, split: Split) -> Inputs:
    """Return the normalisation of the inputs, computed once for all runs of a comparison."""
    inputs: Inputs = getattr(Inputs, kind)(split)
    return inputs
