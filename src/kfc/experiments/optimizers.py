"""The optimizers that can be compared, each made for a network in the same way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from kfc.optimizers import KFAC, KFC
from kfc.optimizers.kfac import DEFAULT_MODEL_DAMPING


class Stepper(Protocol):
    """What the training loop needs of an optimizer; KFAC alone has another way to step."""

    def zero_grad(self) -> None: ...
    def step(self) -> Any: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Wishes:
    """
    Attributes:
        weight_costs: λ by parameter name; parameters without one are not decayed.
        options: the optimizer's own.
        lr: ``None`` if the optimizer chooses it.
        seed: for what it draws at random.
        likelihood: of the loss.
    """

    lr: float | None
    weight_costs: Mapping[str, float]
    options: Mapping[str, Any]
    seed: int
    likelihood: str

    @property
    def rate(self) -> float:
        """For optimizers that need one."""
        assert self.lr is not None
        return self.lr

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """torch's param groups: parameters of one weight decay together."""
        return _by_cost(dict(model.named_parameters()), self.weight_costs)


@dataclass(frozen=True)
class OptimizerKind:
    """
    Attributes:
        options: its own options with their defaults.
        lr: a first guess; ``None`` if it chooses one itself.
        batch_size: what it is usually run with.
    """

    make: Callable[[nn.Module, Wishes], Stepper | KFAC]
    summary: str
    lr: float | None
    batch_size: int
    options: Mapping[str, Any]


def is_installed(name: str) -> bool:
    """Those that are not ours may be missing."""
    if name == "soap":
        return find_spec("pytorch_optimizer") is not None
    return name != "muon" or hasattr(torch.optim, "Muon")


def make_optimizer(name: str, model: nn.Module, wishes: Wishes) -> Stepper | KFAC:
    return OPTIMIZERS[name].make(model, wishes)


def _by_cost(parameters: Mapping[str, Tensor], costs: Mapping[str, float]) -> list[dict[str, Any]]:
    groups: dict[float, list[Tensor]] = {}
    for name, parameter in parameters.items():
        groups.setdefault(costs.get(name, 0.0), []).append(parameter)
    return [{"params": members, "weight_decay": cost} for cost, members in groups.items()]


def _kfc(model: nn.Module, wishes: Wishes) -> KFC:
    return KFC(model, wishes.rate, **_for_curvature(wishes))


def _kfac(model: nn.Module, wishes: Wishes) -> KFAC:
    return KFAC(model, lr=wishes.lr, **_for_curvature(wishes))


def _for_curvature(wishes: Wishes) -> dict[str, Any]:
    names: dict[float, list[str]] = {}
    for name, cost in wishes.weight_costs.items():
        names.setdefault(cost, []).append(name)
    groups = [{"prefix": members, "weight_decay": cost} for cost, members in names.items()]
    options = {name: value for name, value in wishes.options.items() if value is not None}
    options["fisher_clip"] = options["fisher_clip"] or None
    if options.get("inverse_worker") == "none":
        del options["inverse_worker"]
    # A run that is resumed goes on bit for bit: nothing may depend on how fast a thread is.
    options["deterministic"] = True
    return {**options, "groups": groups, "seed": wishes.seed, "likelihood": wishes.likelihood}


def _sgd(model: nn.Module, wishes: Wishes) -> Stepper:
    return torch.optim.SGD(wishes.groups(model), lr=wishes.rate, **wishes.options)


def _adam(model: nn.Module, wishes: Wishes) -> Stepper:
    return torch.optim.Adam(wishes.groups(model), lr=wishes.rate, **_with_betas(wishes))


def _adamw(model: nn.Module, wishes: Wishes) -> Stepper:
    return torch.optim.AdamW(wishes.groups(model), lr=wishes.rate, **_with_betas(wishes))


def _soap(model: nn.Module, wishes: Wishes) -> Stepper:
    try:
        from pytorch_optimizer import SOAP
    except ImportError as error:
        raise ValueError(
            "soap is not ours: it needs the package pytorch-optimizer (pip install "
            "pytorch-optimizer)"
        ) from error
    optimizer: Stepper = SOAP(wishes.groups(model), lr=wishes.rate, **_with_betas(wishes))
    return optimizer


def _with_betas(wishes: Wishes) -> dict[str, Any]:
    options = dict(wishes.options)
    betas = options.pop("beta1"), options.pop("beta2")
    return {**options, "betas": betas}


class Muon:
    """torch's Muon for the hidden weights, AdamW for the rest.

    Muon takes matrices; a convolution's weight is one, a row for each output map. As its author
    does, the last layer, biases and scales are left to AdamW.
    """

    def __init__(self, model: nn.Module, wishes: Wishes) -> None:
        if not is_installed("muon"):
            raise ValueError(f"muon is torch's, from version 2.9 on; here is {torch.__version__}")
        parameters = dict(model.named_parameters())
        weights = [name for name, parameter in parameters.items() if parameter.dim() > 1]
        hidden = weights[:-1]
        self._weights = [parameters.pop(name) for name in hidden]
        self._matrices = [nn.Parameter(as_matrix(weight.detach())) for weight in self._weights]
        options = dict(wishes.options)
        rest = torch.optim.AdamW(
            _by_cost(parameters, wishes.weight_costs), lr=options.pop("adamw_lr")
        )
        self._parts: list[torch.optim.Optimizer] = [rest]
        if hidden:
            groups = _by_cost(dict(zip(hidden, self._matrices, strict=True)), wishes.weight_costs)
            self._parts.append(torch.optim.Muon(groups, lr=wishes.rate, **options))

    def zero_grad(self) -> None:
        for part in self._parts:
            part.zero_grad()
        for weight in self._weights:
            weight.grad = None

    def step(self) -> None:
        for weight, matrix in zip(self._weights, self._matrices, strict=True):
            matrix.grad = None if weight.grad is None else as_matrix(weight.grad, like=weight)
        for part in self._parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self._parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self._parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)


def as_matrix(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """(rows, columns), one row for each output map, in the order of memory of ``like``.

    Of ``like`` itself it is a view, so that a step on the matrix is one on the weight; the order of
    columns makes no difference to an orthogonal factor.
    """
    like = tensor if like is None else like
    if like.dim() == 4 and not like.is_contiguous():
        tensor = tensor.permute(0, 2, 3, 1)
    return tensor.flatten(1)


ADAM_OPTIONS = {"beta1": 0.9, "beta2": 0.999}

CURVATURE_OPTIONS = {
    "factor_decay": 0.95,
    "statistics_period": None,
    "inverse_period": None,
    "fisher": "sampled",
    "inverse": "factored",
    "curvature": "kfc",
    "inverse_placement": "auto",
    "inverse_worker": "none",
    "max_staleness": None,
}

OPTIMIZERS: dict[str, OptimizerKind] = {
    "kfc": OptimizerKind(
        _kfc,
        "KFC, Algorithm 1 of the paper",
        lr=3e-3,
        batch_size=512,
        options={
            "momentum": 0.9,
            "damping": 1e-3,
            "fisher_clip": 0.3,
            "overhead": None,
            **CURVATURE_OPTIONS,
        },
    ),
    "kfac": OptimizerKind(
        _kfac,
        "K-FAC, appendix A.2: chooses learning rate, momentum and damping",
        lr=None,
        batch_size=512,
        options={
            "momentum": None,
            "model_damping": None,
            "factor_damping": None,
            "initial_model_damping": DEFAULT_MODEL_DAMPING,
            "damping_period": 5,
            "gamma_period": 20,
            "fisher_clip": 0.0,
            **CURVATURE_OPTIONS,
        },
    ),
    "sgd": OptimizerKind(
        _sgd, "SGD with momentum", lr=1e-2, batch_size=128, options={"momentum": 0.9}
    ),
    "adam": OptimizerKind(_adam, "Adam", lr=1e-3, batch_size=128, options=ADAM_OPTIONS),
    "adamw": OptimizerKind(
        _adamw, "Adam, decoupled weight decay", lr=1e-3, batch_size=128, options=ADAM_OPTIONS
    ),
    "muon": OptimizerKind(
        Muon,
        "Muon; AdamW for the last layer and biases",
        lr=2e-2,
        batch_size=256,
        options={"momentum": 0.95, "adamw_lr": 3e-3},
    ),
    "soap": OptimizerKind(
        _soap,
        "SOAP, if pytorch-optimizer is installed",
        lr=3e-3,
        batch_size=256,
        options={"beta1": 0.95, "beta2": 0.95, "precondition_frequency": 10},
    ),
}
