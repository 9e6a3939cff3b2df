"""Networks to inspect: from the last checkpoint of a run, or untrained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from kfc.lab.components import NetworkComponents, Task
from kfc.lab.config import ConfigError, RunConfig
from kfc.lab.data import Dataset
from kfc.lab.disk import RunError
from kfc.lab.inspection.results import InspectionSettings
from kfc.lab.runs import Record, matching_checkpoint, read_checkpoint, require_data

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


def inspected_network(
    config: RunConfig,
    data: Dataset,
    settings: InspectionSettings,
    record: Record | None = None,
    parameters: str = "averaged",
) -> InspectedNetwork:
    """Return the network of a run, or an untrained one, with the first training examples.

    The folder of the run is only read, and the run may be in progress.

    Args:
        config: the run's, but perhaps for another device.
        record: the run; ``None`` for an untrained network.
        parameters: "averaged", or "raw" for the run's last iterate.

    Raises:
        ConfigError: there are not as many examples.
        RunError: there is no checkpoint, or the checkpoint or the data are not of this run.
    """
    available = config.problem.train_examples or len(data.train.labels)
    batches = settings.batches or 1
    if settings.examples is not None and settings.examples * batches > available:
        raise ConfigError(
            f"examples must be at most {available // batches} for {batches} batches, since the "
            f"training set has {available}; got {settings.examples}"
            if batches > 1
            else f"examples must be at most {available}, the training set; got {settings.examples}"
        )
    examples = min(available, settings.most_examples)
    components = NetworkComponents(config, data)
    options = ("net", "data", "init", "inputs", "seed")
    label, training = config.problem.net, None
    values = config.to_dict()
    description = {name: values[name] for name in options}
    if record is not None:
        label, training = record.name, _restore(components.model, record, data, parameters)
        origin = {"run": str(record.path), "parameters": parameters}
        method = {name: values[name] for name in ("optimizer", "lr")}
        description = {**origin, **description, **method}
    model, images = components.model.eval(), components.examples(data.train, examples)
    return InspectedNetwork(label, description, training, model, components.task, *images)


def _restore(model: nn.Module, record: Record, data: Dataset, parameters: str) -> dict[str, Any]:
    """Set the parameters to those of a run; return its progress, and their losses and errors."""
    require_data(data, record.data_digest, f"{record.path} was trained on")
    found = read_checkpoint(record.path)
    if found is None:
        raise RunError(f"{record.path} has no checkpoint yet: there is nothing to inspect")
    state = found.state
    examples = record.config.problem.train_examples or len(data.train.labels)
    prefix = "averaged_" if parameters == "averaged" else ""
    measures = ("train_loss", "train_error", "test_loss", "test_error")
    with matching_checkpoint(record.path):
        model.load_state_dict(state["model"])
        if parameters == "averaged":
            model.load_state_dict(state["averages"], strict=False)
        return {
            **({"note": found.note} if found.note else {}),
            "update": state["update"],
            "epoch": state["update"] / (examples // record.config.problem.batch_size),
            "seconds": state["seconds"],
            **{name: state["last_evaluation"].get(prefix + name) for name in measures},
        }
