"""Networks to inspect: from the last checkpoint of a run, or untrained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from kfc.lab.averages import Averages
from kfc.lab.components import NetworkComponents
from kfc.lab.config import ConfigError, RunConfig
from kfc.lab.data import Dataset
from kfc.lab.runs import Record, RunError, matching_checkpoint, read_checkpoint, require_data
from kfc.lab.tasks import Task

PARAMETERS = ("averaged", "raw")


@dataclass(frozen=True)
class InspectedNetwork:
    """A network, with images and labels to inspect it on.

    Attributes:
        description: a run's folder, and the options that determine the network.
        training: progress and errors of a run; ``None`` for an untrained network.
        model: in evaluation mode.
    """

    label: str
    description: Mapping[str, Any]
    training: Mapping[str, Any] | None
    model: nn.Module
    task: Task
    images: Tensor
    labels: Tensor

    def loss(self, outputs: Tensor, count: int) -> Tensor:
        """Return the mean loss of the first ``count`` examples."""
        return self.task.loss(outputs, self.images[:count], self.labels[:count])

    def outputs(self) -> Tensor:
        """Return the outputs for all images.

        Raises:
            ConfigError: they are not finite.
        """
        with torch.no_grad():
            outputs: Tensor = self.model(self.images)
        if not bool(outputs.isfinite().all()):
            raise ConfigError(f"the outputs of {self.label} are not finite: nothing to compare")
        return outputs


def untrained_network(config: RunConfig, data: Dataset, *, examples: int) -> InspectedNetwork:
    """Return a network before training."""
    components = NetworkComponents(config, data)
    images = _first_examples(components, config, data, examples)
    return InspectedNetwork(
        config.net, _options(config), None, components.model.eval(), components.task, *images
    )


def network_of_run(
    record: Record,
    data: Dataset,
    *,
    examples: int,
    parameters: str = "averaged",
    device: str | None = None,
) -> InspectedNetwork:
    """Return the network of a run; its folder is only read, and the run may be in progress.

    Args:
        parameters: "averaged", or "raw" for the last iterate.
        device: by default the run's.

    Raises:
        RunError: there is no checkpoint, or the checkpoint or the data are not of this run.
    """
    config = replace(record.config, device=device or record.config.device)
    require_data(data, record.data_digest, f"{record.path} was trained on")
    state = read_checkpoint(record.path)
    if state is None:
        raise RunError(f"{record.path} has no checkpoint yet: there is nothing to inspect")
    components = NetworkComponents(config, data)
    with matching_checkpoint(record.path):
        _restore(components.model, state, parameters)
        training = _progress(state, parameters, config, data)
    description = {
        "run": str(record.path),
        "parameters": parameters,
        **_options(config),
        "optimizer": config.optimizer,
        "lr": config.lr,
    }
    images = _first_examples(components, config, data, examples)
    return InspectedNetwork(
        record.name, description, training, components.model.eval(), components.task, *images
    )


def _options(config: RunConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in ("net", "data", "init", "inputs", "seed")}


def _first_examples(
    components: NetworkComponents, config: RunConfig, data: Dataset, count: int
) -> tuple[Tensor, Tensor]:
    available = config.train_examples or len(data.train.labels)
    if count > available:
        raise ConfigError(f"examples must be at most {available}, the training set; got {count}")
    return components.examples(data.train, count)


def _restore(model: nn.Module, state: Mapping[str, Any], parameters: str) -> None:
    model.load_state_dict(state["model"])
    if parameters == "averaged":
        averages = Averages(model, timescale=1.0)
        averages.load_state_dict(state["averages"])
        averages.copy_to_model()


def _progress(
    state: Mapping[str, Any], parameters: str, config: RunConfig, data: Dataset
) -> dict[str, Any]:
    """Return the progress of the run, and the last losses and errors of these parameters."""
    evaluation, prefix = state["last_evaluation"], "averaged_" if parameters == "averaged" else ""
    measures = ("train_loss", "train_error", "test_loss", "test_error")
    examples = config.train_examples or len(data.train.labels)
    return {
        "update": state["update"],
        "epoch": state["update"] / (examples // config.batch_size),
        "seconds": state["seconds"],
        **{measure: evaluation.get(prefix + measure) for measure in measures},
    }
