"""The configuration of a run: everything needed to repeat it, validated before it starts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from kfc.lab.networks import NETWORKS, require_known
from kfc.lab.optimizers import OPTIMIZERS, all_optimizer_options, optimizer_options
from kfc.lab.options import (
    ConfigError,
    check_options,
    config_errors,
    duration,
    flat,
    from_flat,
    not_one_of,
    number_or,
    option,
    options_of,
    section,
)

__all__ = ["ConfigError", "RunConfig", "config_from_dict", "make_config"]

# The weight decay that belongs to the network, instead of a number: cuda-convnet's weight costs.
CUDA_CONVNET = "cuda-convnet"
DEFAULT_NETS = {
    "digits": "digits",
    "mnist": "vgg",
    "fashion-mnist": "vgg",
    "cifar10": "cuda-convnet",
    "svhn": "svhn-convnet",
}
LIMITS = ("epochs", "updates", "seconds")
MOST_PROCESSES = 64 * (os.cpu_count() or 1)

# The headings of the options in `kfc train --help`.
DATA, OPTIMIZER, LENGTH = "Data and network", "Optimizer", "Length"
RECORDS = "Machine and records"
# Numbers must be positive unless an option says otherwise.
_data, _optimizer, _length, _records = (
    partial(option, panel=panel, positive=True) for panel in (DATA, OPTIMIZER, LENGTH, RECORDS)
)


def number_or_weight_costs(text: str) -> float | str:
    """Return a number, or the word "cuda-convnet"."""
    return number_or(CUDA_CONVNET, text)


@dataclass(frozen=True)
class Problem:
    """The data and the network.

    Attributes:
        init: ``None`` for a network of the user's own.
    """

    data: str = _data(None, f"One of {', '.join(DEFAULT_NETS)}", choices=tuple(DEFAULT_NETS))
    net: str = _data(None, f"{', '.join(NETWORKS)}; or your own network as module:function")
    init: str | None = _data(
        None,
        'Initial weights: kaiming (glorot for autoencoders), or "cuda-convnet" as published',
    )
    inputs: str = _data(
        None,
        "Pixels: normalised (to zero mean and unit variance), centred (minus the mean image) or "
        "unit (from 0 to 1); the default depends on the initial weights",
        choices=("normalised", "centred", "unit"),
    )
    batch_size: int = _data(
        None, "Examples per batch, over all processes; the default depends on the optimizer"
    )
    train_examples: int | None = _data(None, "Train on the first N examples only")


@dataclass(frozen=True)
class Method:
    """The optimizer.

    Attributes:
        lr: ``None`` if the optimizer adapts it.
        options: the optimizer's own options, see ``kfc.lab.optimizers``.
    """

    optimizer: str = _optimizer("kfc", f"One of {', '.join(OPTIMIZERS)}", choices=tuple(OPTIMIZERS))
    lr: float | None = _optimizer(
        None, "Learning rate; the default depends on the optimizer (kfac adapts it)"
    )
    weight_decay: float | str = _optimizer(
        0.0,
        f'Weight decay λ of the weights, or "{CUDA_CONVNET}" for the weight costs of that network',
        positive=False,
        parse=number_or_weight_costs,
        word=CUDA_CONVNET,
    )
    decay_biases: bool = _optimizer(
        False, "Apply --weight-decay to biases and scales too, as in the paper's ½λθᵀθ"
    )
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Length:
    """When the run ends: at the first limit that it reaches."""

    epochs: float | None = _length(10.0, "End after N epochs, unless --updates or --time is given")
    updates: int | None = _length(None, "End after N updates of the parameters")
    seconds: float | None = _length(
        None,
        'End after this training time (evaluations do not count): "90s", "10m", "1.5h"',
        flag="time",
        parse=duration,
    )

    def fraction_done(self, row: Mapping[str, Any]) -> float:
        """Return how far a row of metrics is towards the nearest limit; above 1 beyond it."""
        limits = {"epoch": self.epochs, "update": self.updates, "seconds": self.seconds}
        return max(float(row[name] / limit) for name, limit in limits.items() if limit)


@dataclass(frozen=True)
class Records:
    """What is averaged, evaluated, logged and saved, and how often."""

    averaging_examples: int | None = _records(
        None, "Timescale of the averaged parameters in examples; by default an epoch, at most 50000"
    )
    averaging_fraction: float = _records(
        0.125,
        "Timescale of the averaged parameters relative to the updates so far, until it is that of "
        "--averaging-examples; 1 for the mean of all parameters since the initial ones",
        most=1,
    )
    evaluation_period: float = _records(1.0, "Epochs between evaluations")
    evaluation_examples: int = _records(
        10_000, "Evaluate on at most the first N examples of each split"
    )
    checkpoint_seconds: float = _records(60.0, "Seconds of training between checkpoints")
    checkpoints: int = _records(
        2, "Checkpoints to keep: if the newest is damaged, the one before it is used", most=1000
    )
    log_period: int = _records(10, "Updates between rows of the log")


@dataclass(frozen=True)
class Machine:
    """Where the run is computed, and its random numbers."""

    seed: int = _records(
        0, "Seed of initial weights, order and sampling", positive=False, most=2**63 - 1
    )
    device: str = _records("cpu", "Device, such as cpu, cuda or mps")
    threads: int = _records(
        None, "Threads of each process; by default torch's number", most=MOST_PROCESSES
    )
    workers: int = _records(
        0, "Processes that prepare batches", positive=False, most=MOST_PROCESSES
    )


@dataclass(frozen=True)
class RunConfig:
    """The configuration of one run, complete and valid; ``make_config`` fills in defaults."""

    problem: Problem = section(Problem)
    method: Method = section(Method)
    length: Length = section(Length)
    records: Records = section(Records)
    machine: Machine = section(Machine)

    def __post_init__(self) -> None:
        """Raise ``ConfigError`` for the first invalid value."""
        check_options(self)
        problem, method = self.problem, self.method
        optimizer_options(method.optimizer, method.options)
        if method.lr is None and OPTIMIZERS[method.optimizer].lr is not None:
            raise ConfigError(f"lr must be a number for the optimizer {method.optimizer}")
        try:
            torch.device(self.machine.device)
        except RuntimeError as error:
            raise ConfigError(f"device: {error}") from error
        with config_errors():
            require_known(problem.net)
        network = NETWORKS.get(problem.net)
        if network is not None and network.task == "reconstruction" and problem.inputs != "unit":
            raise ConfigError(
                f"inputs must be 'unit' for {problem.net}, which reconstructs pixels from 0 to 1; "
                f"got {problem.inputs!r}"
            )
        if method.weight_decay == CUDA_CONVNET:
            if network is None or not network.weight_costs:
                raise ConfigError(
                    "weight_decay must be a number, since there are no weight costs for "
                    f"{problem.net}"
                )
            if method.decay_biases:
                raise ConfigError(
                    f"weight_decay must be a number with decay_biases, got {CUDA_CONVNET!r}, "
                    "which has no weight costs for biases"
                )

    def to_dict(self) -> dict[str, Any]:
        """Return the values by option, without sections."""
        return flat(self)

    def with_options(self, **values: Any) -> RunConfig:
        """Return the run with other values of these options."""
        if unknown := values.keys() - OPTIONS.keys():
            raise ConfigError(f"unknown options: {', '.join(sorted(unknown))}")
        return from_flat(RunConfig, {**flat(self), **values})

    def with_length(self, length: Length) -> RunConfig:
        """Return the run with other limits; unchanged if the new length has none."""
        return self if length == Length(None, None, None) else replace(self, length=length)


OPTIONS = options_of(RunConfig)


def make_config(**given: Any) -> RunConfig:
    """Return a run's configuration, with defaults of the network and the optimizer filled in.

    Args:
        given: options of ``RunConfig`` and of the optimizer, such as ``damping``; ``None``
            means the default.
    """
    given = {name: value for name, value in given.items() if value is not None}
    if "data" not in given:
        raise ConfigError(f"data must be given: one of {', '.join(DEFAULT_NETS)}")
    own = {name: given.pop(name) for name in all_optimizer_options() if name in given}
    if unknown := [name for name in given if name not in OPTIONS]:
        known = [*OPTIONS, *sorted(all_optimizer_options())]
        raise ConfigError(not_one_of("every option", unknown[0], known))
    for name, value in given.items():
        OPTIONS[name].check(value)
    options = optimizer_options(given.get("optimizer", Method.optimizer), own)
    net = given.get("net", DEFAULT_NETS[given["data"]])
    network = NETWORKS.get(net)
    init = given.get("init", network.default_init if network else None)
    defaults = {
        "net": net,
        "init": init,
        "inputs": network.inits.get(str(init), "normalised") if network else "normalised",
        "lr": options.lr,
        "batch_size": options.batch_size,
        "threads": torch.get_num_threads(),
        "epochs": None if given.keys() & set(LIMITS) else Length.epochs,
    }
    return from_flat(RunConfig, {**defaults, **given, "options": flat(options)})


def config_from_dict(values: Mapping[str, Any]) -> RunConfig:
    """Return the configuration from the values of ``RunConfig.to_dict()``."""
    names = {*OPTIONS, "options"}
    if set(values) != names:
        difference = ", ".join(sorted(set(values) ^ names))
        raise ConfigError(f"not the configuration of a run: {difference} missing or unknown")
    return from_flat(RunConfig, values)
