"""Networks to inspect: a run's, as its last checkpoint has it, or a fresh one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kfc.experiments.averages import Averages
from kfc.experiments.config import ConfigError, RunConfig, config_from_dict
from kfc.experiments.data import Dataset
from kfc.experiments.parts import NetworkParts
from kfc.experiments.runs import Record, RunError, read_checkpoint
from kfc.experiments.tasks import Task

PARAMETERS = ("averaged", "raw")


@dataclass(frozen=True)
class Subject:
    """A network, with images and labels to inspect it on.

    Attributes:
        what: a run's folder, or the names that a fresh network is made of.
        training: of a run, how far it is and its errors.
        model: in evaluation mode.
    """

    label: str
    what: Mapping[str, Any]
    training: Mapping[str, Any] | None
    model: nn.Module
    task: Task
    images: Tensor
    labels: Tensor

    def loss(self, outputs: Tensor, count: int) -> Tensor:
        """Of the first examples."""
        return self.task.loss(outputs, self.images[:count], self.labels[:count])


def fresh_subject(config: RunConfig, data: Dataset, *, examples: int) -> Subject:
    """A network as it is before training."""
    names = {name: getattr(config, name) for name in ("net", "data", "init", "inputs", "seed")}
    return _subject(config.net, names, None, NetworkParts(config, data), config, data, examples)


def run_subject(
    record: Record,
    data: Dataset,
    *,
    examples: int,
    parameters: str = "averaged",
    device: str | None = None,
) -> Subject:
    """A run's network; its folder is read only, and may be of a run that is going on.

    Args:
        parameters: "averaged", or "raw": the last iterate.
        device: by default the run's.

    Raises:
        RunError: there is no checkpoint, it is not of this run, or the data are not.
    """
    config = config_from_dict({**record.config.to_dict(), "device": device or record.config.device})
    if data.digest != record.data_digest:
        raise RunError(
            f"{record.path} was trained on other data: its {config.data} has digest "
            f"{record.data_digest}, the one here {data.digest}"
        )
    state = read_checkpoint(record.path)
    if state is None:
        raise RunError(f"{record.path} has no checkpoint yet, so that there is nothing to inspect")
    parts = NetworkParts(config, data)
    try:
        _restore(parts.model, state, parameters)
        training = _progress(state, parameters, config, data)
    except (KeyError, ValueError, RuntimeError, TypeError) as error:
        raise RunError(f"the checkpoint in {record.path} is not of this run: {error}") from error
    what = {
        "run": str(record.path),
        "parameters": parameters,
        **{name: getattr(config, name) for name in ("net", "data", "init", "inputs", "seed")},
        "optimizer": config.optimizer,
        "lr": config.lr,
    }
    return _subject(record.name, what, training, parts, config, data, examples)


def _subject(
    label: str,
    what: Mapping[str, Any],
    training: Mapping[str, Any] | None,
    parts: NetworkParts,
    config: RunConfig,
    data: Dataset,
    examples: int,
) -> Subject:
    most = min(len(data.train.labels), config.train_examples or len(data.train.labels))
    if examples > most:
        raise ConfigError(f"examples: there are {most} to train on, fewer than {examples}")
    images, labels = parts.first_examples(data.train, examples)
    return Subject(label, what, training, parts.model.eval(), parts.task, images, labels)


def _restore(model: nn.Module, state: Mapping[str, Any], parameters: str) -> None:
    model.load_state_dict(state["model"])
    if parameters == "averaged":
        averages = Averages(model, timescale=1.0)
        averages.load_state_dict(state["averages"])
        averages.copy_to_model()


def _progress(
    state: Mapping[str, Any], parameters: str, config: RunConfig, data: Dataset
) -> dict[str, Any]:
    """How far the run is, and the last losses and errors of these parameters."""
    evaluation, prefix = state["last_evaluation"], "averaged_" if parameters == "averaged" else ""
    measures = ("train_loss", "train_error", "test_loss", "test_error")
    examples = config.train_examples or len(data.train.labels)
    return {
        "update": state["update"],
        "epoch": state["update"] / (examples // config.batch_size),
        "seconds": state["seconds"],
        **{measure: evaluation.get(prefix + measure) for measure in measures},
    }


def outputs_of(subject: Subject) -> Tensor:
    """On all images.

    Raises:
        ConfigError: they are not finite.
    """
    with torch.no_grad():
        outputs: Tensor = subject.model(subject.images)
    if not bool(outputs.isfinite().all()):
        raise ConfigError(f"the outputs of {subject.label} are not finite: nothing can be compared")
    return outputs
