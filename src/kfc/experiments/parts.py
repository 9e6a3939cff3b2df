"""What a run works with, made from its settings alone: network, batches, optimizer, averages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch import Tensor, nn

from kfc.distributed.workers import Workers
from kfc.experiments.averages import Averages
from kfc.experiments.config import PAPER, ConfigError, RunConfig
from kfc.experiments.data import Batches, Dataset, Inputs, Split
from kfc.experiments.evaluation import Examples, channels_last, evaluate
from kfc.experiments.networks import NETWORKS, build
from kfc.experiments.optimizers import Stepper, Wishes, make_optimizer
from kfc.experiments.processes import device_of_rank, explained_collectives, failing_together
from kfc.experiments.replicas import Replica, synchronised
from kfc.experiments.tasks import TASKS
from kfc.optimizers import KFAC

PAPER_AVERAGING_EXAMPLES = 50_000
# The task of a network of the user's own.
CLASSIFICATION = "classification"


class NetworkParts:
    """A run's network, and the data as it sees them.

    Args:
        workers: the ranks that train it together; by default this process alone.

    Raises:
        ConfigError, DataError, NetworkError: before anything is written.
    """

    def __init__(self, config: RunConfig, data: Dataset, workers: Workers | None = None) -> None:
        self.workers = workers or Workers(None)
        self.device = _usable(device_of_rank(config.device, self.workers))
        self.task = TASKS[NETWORKS[config.net].task if config.net in NETWORKS else CLASSIFICATION]
        self.inputs = _inputs(config.inputs, data.train)
        image = data.train.images.shape[1:]
        model = build(
            config.net, image=image, classes=data.classes, init=config.init, seed=config.seed
        )
        # nn.Module.to has no overload for a memory format alone.
        model = model.to(self.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.model = synchronised(model, self.workers, self.device)
        self._try_network(config, data)

    def first_examples(self, split: Split, count: int) -> tuple[Tensor, Tensor]:
        """Images and labels."""
        images = channels_last(self.inputs(split.images[:count]).to(self.device))
        return images, torch.from_numpy(split.labels[:count].copy()).to(self.device)

    def _try_network(self, config: RunConfig, data: Dataset) -> None:
        """Refuse a network that does not go with the data, before there is a folder."""
        images = channels_last(self.inputs(data.train.images[:2]).to(self.device))
        self.model.eval()
        try:
            with torch.no_grad():
                outputs = self.model(images)
        except Exception as error:
            raise ConfigError(
                f"the network {config.net} fails on images {tuple(images.shape)}: {error}"
            ) from error
        finally:
            self.model.train()
        wanted = self.task.output_shape(images, data.classes)
        if not isinstance(outputs, Tensor) or outputs.shape != wanted:
            found = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
            raise ConfigError(
                f"the network {config.net} must return a tensor of shape {wanted} for two images; "
                f"it returned {found}"
            )


class Parts(NetworkParts):
    """All that a run works with.

    Attributes:
        model: the network; its loss goes through ``replica``.
    """

    def __init__(self, config: RunConfig, data: Dataset, workers: Workers | None = None) -> None:
        workers = workers or Workers(None)
        with failing_together(workers):
            super().__init__(config, data, workers)
            self.batches = self._make_batches(config, data)
        with failing_together(workers):  # what is wrong with its options is so on all ranks
            self.optimizer = self._make_optimizer(config)
        with explained_collectives(workers):
            self.replica = Replica(self.model, workers, self.device)
        epoch = len(self.batches) * config.batch_size
        averaged = config.averaging_examples or min(epoch, PAPER_AVERAGING_EXAMPLES)
        self.averages = Averages(self.model, averaged / config.batch_size)
        used = config.train_examples, config.evaluation_examples
        self.train = self._examples(data.train, *used)
        self.test = self._examples(data.test, config.evaluation_examples)

    def _make_batches(self, config: RunConfig, data: Dataset) -> Batches:
        with _as_config_errors():
            return Batches(
                data.train,
                self.inputs,
                config.batch_size,
                config.seed,
                workers=config.workers,
                examples=config.train_examples,
                rank=self.workers.rank,
                ranks=self.workers.size,
            )

    def _make_optimizer(self, config: RunConfig) -> Stepper | KFAC:
        costs = weight_costs(config, self.model)
        wishes = Wishes(config.lr, costs, config.options, config.seed, self.task.likelihood)
        with _as_config_errors():
            return make_optimizer(config.optimizer, self.model, wishes)

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        """Of this rank's part of a batch, weighted: the mean over ranks is the whole batch's."""
        loss = self.task.loss(self.replica.forward(images), images, labels)
        return loss if self.batches.weight == 1 else self.batches.weight * loss

    def evaluate(self, examples: Examples) -> tuple[float, float]:
        """The mean loss, and the error in percent."""
        return evaluate(self.model, examples, self.task, self.workers)

    def first_images(self) -> Tensor:
        """Of the training set: one, as a batch."""
        return channels_last(self.inputs(self.train.split.images[:1]).to(self.device))

    def _examples(self, split: Split, *limits: int | None) -> Examples:
        """The first of a split, as many as the limits allow."""
        count = min([len(split.labels), *(limit for limit in limits if limit is not None)])
        return Examples(split, self.inputs, count, self.device)


def weight_costs(config: RunConfig, model: nn.Module) -> dict[str, float]:
    """λ by parameter name; biases and scales have none."""
    if config.weight_decay == PAPER:
        return dict(NETWORKS[config.net].weight_costs)
    cost = float(config.weight_decay)
    weights = [n for n, p in model.named_parameters() if p.dim() > 1]
    return dict.fromkeys(weights, cost) if cost else {}


@contextmanager
def _as_config_errors() -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError) as error:
        raise ConfigError(str(error)) from error


def _usable(device: torch.device) -> torch.device:
    try:
        torch.zeros((), device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ConfigError(f"device: there is no {device} to compute on here ({error})") from error
    return device


@lru_cache(maxsize=2)
def _inputs(kind: str, split: Split) -> Inputs:
    """All runs of a comparison have the same."""
    make: Callable[[Split], Inputs] = getattr(Inputs, kind)
    return make(split)
