"""The methods of the benchmark: how each is constructed without arguments, and how when tuned."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, TypeAlias

import torch
from torch import nn

import kfc
from kfc.lab.muon import Muon

AnyOptimizer: TypeAlias = torch.optim.Optimizer | Muon
Make = Callable[..., AnyOptimizer]
# AdamW's rate for the parameters that Muon does not train, as a multiple of Muon's.
ADAMW_SHARE = 0.15


@dataclass(frozen=True)
class Method:
    """An optimizer of the benchmark.

    Attributes:
        make: returns the optimizer, from the model and keyword arguments. The untuned ruleset gives
            no arguments.
        scale: the usual value of ``scaled``, around which the tuned ruleset searches.
        decay: the usual weight decay, which the tuned ruleset tries besides none.
        scaled: the argument that is searched on a logarithmic scale.
        fixed: arguments of every tuned run.
        adapts: whether the method sets its own learning rate, so that no schedule applies; its
            ``step`` needs a closure.
        averages: whether it is evaluated inside ``averaged_parameters()``, because averaging is a
            part of the method; AlgoPerf's ``prepare_for_eval``.
        ours: whether it is a method of this library.
        package: a package that must be installed, and its module.
    """

    name: str
    make: Make
    scale: float
    decay: float
    scaled: str = "lr"
    fixed: tuple[tuple[str, Any], ...] = ()
    adapts: bool = False
    averages: bool = False
    ours: bool = False
    package: tuple[str, str] | None = None

    def missing(self) -> str | None:
        """Return what to do if the method is not available here, else ``None``."""
        if self.package is not None and find_spec(self.package[1]) is None:
            name = self.package[0]
            return f"{self.name} needs the package {name}: pip install {name}"
        if self.ours and not hasattr(kfc, self.name):
            return f"{self.name} is not in this version of kfc ({kfc.__version__})"
        return None


def _of_torch(name: str, **always: Any) -> Make:
    """Return the constructor of an optimizer of torch.

    Args:
        always: arguments that make the optimizer what its name says, in both rulesets.
    """
    return lambda model, **options: getattr(torch.optim, name)(
        model.parameters(), **always, **options
    )


def _of_pytorch_optimizer(name: str) -> Make:
    def make(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
        import pytorch_optimizer

        optimizer: torch.optim.Optimizer = getattr(pytorch_optimizer, name)(
            model.parameters(), **options
        )
        return optimizer

    return make


def _of_kfc(name: str) -> Make:
    return lambda model, **options: getattr(kfc, name)(model, **options)


def _muon(model: nn.Module, **options: Any) -> Muon:
    shared = {name: value for name, value in options.items() if name != "lr"}
    rate = {"lr": ADAMW_SHARE * options["lr"]} if "lr" in options else {}
    return Muon(
        model,
        lambda named: torch.optim.Muon([matrix for _, matrix in named], **options),
        lambda named: torch.optim.AdamW([tensor for _, tensor in named], **rate, **shared),
    )


def _kfac(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    damping = options.pop("initial_model_damping", None)
    if damping is not None:
        options["adaptation"] = kfc.Adaptation(initial_model_damping=damping)
    return kfc.KFAC(model, **options)


PYTORCH_OPTIMIZER = ("pytorch-optimizer", "pytorch_optimizer")

_ALL = (
    Method("SGD", _of_torch("SGD"), 0.03, 5e-4, fixed=(("momentum", 0.9),)),
    Method("AdamW", _of_torch("AdamW"), 3e-3, 0.05),
    Method("NAdamW", _of_torch("NAdam", decoupled_weight_decay=True), 3e-3, 0.05),
    Method(
        "Shampoo",
        _of_pytorch_optimizer("Shampoo"),
        0.3,
        5e-4,
        fixed=(("momentum", 0.9),),
        package=PYTORCH_OPTIMIZER,
    ),
    Method("SOAP", _of_pytorch_optimizer("SOAP"), 0.01, 0.05, package=PYTORCH_OPTIMIZER),
    Method("Muon", _muon, 0.02, 0.05),
    Method("KFC", _of_kfc("KFC"), 2e-3, 5e-4, ours=True),
    Method("KFAC", _kfac, 1e-2, 5e-4, scaled="initial_model_damping", adapts=True, ours=True),
    Method("WhitenedAdam", _of_kfc("WhitenedAdam"), 0.015, 0.05, averages=True, ours=True),
)
METHODS: Mapping[str, Method] = {method.name: method for method in _ALL}
