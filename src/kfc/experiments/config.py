"""What a run is made of: everything needed to repeat it, checked before anything starts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from types import NoneType
from typing import Any

import torch

from kfc.checks import require_choice, require_number, require_whole
from kfc.experiments.networks import NETWORKS
from kfc.experiments.optimizers import OPTIMIZERS

INPUTS = ("centred", "normalised", "unit")
# The word for "as the network's paper has it", where a number is possible too.
PAPER = "paper"


class ConfigError(Exception):
    """A setting that cannot be; the message says which, and what can."""


@dataclass(frozen=True)
class RunConfig:
    """One run. Made by :func:`make_config`, which fills in what is not given.

    Attributes:
        options: the optimizer's own, see :data:`kfc.experiments.optimizers.OPTIMIZERS`.
        lr: ``None`` if the optimizer chooses it.
        init: a name of :data:`kfc.experiments.networks.initialisation.INITIALISATIONS`; ``None``
            for a network of the user's own.
        inputs: "centred": pixels minus the mean image; "normalised": divided by their standard
            deviation too; "unit": pixels from 0 to 1.
        weight_decay: λ of every weight (biases and scales have none); "paper": the network's.
        epochs: where the run ends, as are ``updates`` and ``seconds`` (of training); the first
            that is reached counts.
        averaging_examples: τ times the batch size: the averaged parameters' timescale; ``None``:
            one epoch, but not above the paper's 50,000.
        train_examples: train on the first so many only.
        evaluation_examples: evaluate on the first so many of either split, if there are more.
        evaluation_period: in epochs.
        log_period: in updates.
        checkpoint_seconds: a checkpoint after so much training, besides those at evaluations.
    """

    data: str
    net: str
    optimizer: str
    lr: float | None
    options: Mapping[str, Any]
    init: str | None
    inputs: str
    weight_decay: float | str
    batch_size: int
    epochs: float | None
    updates: int | None
    seconds: float | None
    averaging_examples: int | None
    train_examples: int | None
    evaluation_examples: int
    evaluation_period: float
    log_period: int
    checkpoint_seconds: float
    seed: int
    device: str
    threads: int
    workers: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def with_limits(
        self, epochs: float | None, updates: int | None, seconds: float | None
    ) -> RunConfig:
        """The same run with other ends; as it is if none is given."""
        if epochs is updates is seconds is None:
            return self
        config = replace(self, epochs=epochs, updates=updates, seconds=seconds)
        _check(config)
        return config

    def part_of_the_way(self, row: Mapping[str, Any]) -> float:
        """How far a row of metrics is to the nearest end; above 1 beyond it."""
        parts = [
            row["epoch"] / self.epochs if self.epochs else 0.0,
            row["update"] / self.updates if self.updates else 0.0,
            row["seconds"] / self.seconds if self.seconds else 0.0,
        ]
        return float(max(parts))


DEFAULTS: dict[str, Any] = {
    "net": None,
    "optimizer": "kfc",
    "lr": None,
    "init": None,
    "inputs": None,
    "weight_decay": 0.0,
    "batch_size": None,
    "epochs": None,
    "updates": None,
    "seconds": None,
    "averaging_examples": None,
    "train_examples": None,
    "evaluation_examples": 10_000,
    "evaluation_period": 1.0,
    "log_period": 10,
    "checkpoint_seconds": 60.0,
    "seed": 0,
    "device": "cpu",
    "threads": None,
    "workers": 0,
}
LIMITS = ("epochs", "updates", "seconds")
DEFAULT_EPOCHS = 10.0
DEFAULT_NETS = {
    "digits": "digits",
    "mnist": "vgg",
    "fashion-mnist": "vgg",
    "cifar10": "cuda-convnet",
    "svhn": "svhn-convnet",
}


def make_config(**wishes: Any) -> RunConfig:
    """A run's settings from what is given; the rest as the network and the optimizer have it.

    Options of the optimizer, such as ``damping``, stand among the others.

    Raises:
        ConfigError: an unknown setting, one that means nothing to this optimizer, or a bad value.
    """
    given = {name: value for name, value in wishes.items() if value is not None}
    if "data" not in given:
        raise ConfigError(f"name a data set: one of {', '.join(DEFAULT_NETS)}")
    own = {name: given.pop(name) for name in list(given) if name in _ALL_OPTIONS}
    unknown = [name for name in given if name not in DEFAULTS and name != "data"]
    if unknown:
        known = ", ".join(["data", *DEFAULTS, *sorted(_ALL_OPTIONS)])
        raise ConfigError(f"unknown settings: {', '.join(unknown)}; known are {known}")
    values = {**DEFAULTS, **given}
    if values["optimizer"] not in OPTIMIZERS:
        raise ConfigError(
            f"no optimizer {values['optimizer']!r}; there are {', '.join(OPTIMIZERS)}"
        )
    kind = OPTIMIZERS[values["optimizer"]]
    _refuse_foreign_options(values["optimizer"], own)
    values["options"] = {**kind.options, **own}
    values["net"] = values["net"] or DEFAULT_NETS.get(values["data"])
    values["lr"] = kind.lr if values["lr"] is None else values["lr"]
    if values["batch_size"] is None:
        values["batch_size"] = kind.batch_size
    if values["threads"] is None:
        values["threads"] = torch.get_num_threads()
    _require_names(values)
    network = NETWORKS.get(values["net"] or "")
    if network is not None:
        values["init"] = values["init"] or network.inits[0]
        usual = values["init"] == network.inits[0]
        values["inputs"] = values["inputs"] or (network.inputs if usual else "normalised")
    values["inputs"] = values["inputs"] or "normalised"
    if values["epochs"] is values["updates"] is values["seconds"] is None:
        values["epochs"] = DEFAULT_EPOCHS
    config = RunConfig(**values)
    _check(config)
    return config


def config_from_dict(values: Mapping[str, Any]) -> RunConfig:
    """The inverse of :meth:`RunConfig.to_dict`."""
    names = {field.name for field in fields(RunConfig)}
    if set(values) != names:
        difference = ", ".join(sorted(set(values) ^ names))
        raise ConfigError(f"not the settings of a run: {difference} missing or unknown")
    config = RunConfig(**values)
    _check(config)
    return config


def _require_names(values: Mapping[str, Any]) -> None:
    for name in ("data", "net", "init", "inputs", "device"):
        if not isinstance(values[name], (str, NoneType)):
            raise ConfigError(f"{name} must be a name, got {values[name]!r}")


_ALL_OPTIONS = frozenset(name for kind in OPTIMIZERS.values() for name in kind.options)


def _refuse_foreign_options(optimizer: str, own: Mapping[str, Any]) -> None:
    known = OPTIMIZERS[optimizer].options
    foreign = [name for name in own if name not in known]
    if foreign:
        raise ConfigError(
            f"{', '.join(foreign)}: nothing that {optimizer} has; its options are "
            f"{', '.join(known)}"
        )


def _require_at_most(name: str, value: int, most: int) -> None:
    if value > most:
        raise ValueError(f"{name} must be at most {most}, got {value}")


def _check_options(config: RunConfig) -> None:
    """Numbers where numbers belong; what they may be is for the optimizer to say."""
    for name, default in OPTIMIZERS[config.optimizer].options.items():
        value = config.options.get(name, default)  # a run may be older than an option
        if isinstance(default, str):
            if not isinstance(value, str):
                raise ValueError(f"{name} must be a word such as {default!r}, got {value!r}")
        elif value is not None:
            require_number(name, value)


def _check(config: RunConfig) -> None:
    """Raise a ConfigError that names the first value out of range."""
    try:
        require_choice("data", config.data, tuple(DEFAULT_NETS))
        require_choice("optimizer", config.optimizer, tuple(OPTIMIZERS))
        require_choice("inputs", config.inputs, INPUTS)
        if config.lr is not None or OPTIMIZERS[config.optimizer].lr is not None:
            require_number("lr", config.lr, positive=True)
        for name in ("batch_size", "log_period", "threads", "evaluation_examples"):
            require_whole(name, getattr(config, name))
        for name in ("evaluation_period", "checkpoint_seconds"):
            require_number(name, getattr(config, name), positive=True)
        for name in ("epochs", "seconds"):
            if getattr(config, name) is not None:
                require_number(name, getattr(config, name), positive=True)
        for name in ("updates", "train_examples", "averaging_examples"):
            if getattr(config, name) is not None:
                require_whole(name, getattr(config, name))
        require_whole("seed", config.seed, low=0)
        require_whole("workers", config.workers, low=0)
        _require_at_most("seed", config.seed, 2**63 - 1)
        for name in ("threads", "workers"):
            _require_at_most(name, getattr(config, name), 64 * (os.cpu_count() or 1))
        _check_options(config)
        if config.weight_decay != PAPER:
            require_number("weight_decay", config.weight_decay)
        torch.device(config.device)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(str(error)) from error
    network = NETWORKS.get(config.net)
    if network is not None and network.task == "reconstruction" and config.inputs != "unit":
        raise ConfigError(f"inputs: {config.net} gives pixels back, so they must be unit")
    if config.weight_decay == PAPER and (network is None or not network.weight_costs):
        raise ConfigError(
            f"weight_decay: no paper gives weight costs for the network {config.net}; give a number"
        )
