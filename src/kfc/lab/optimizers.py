"""The optimizers that `kfc train` offers, and the options of each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from importlib.util import find_spec
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn

from kfc.curvature.options import APPROXIMATIONS, AVERAGING, Approximation
from kfc.distributed.options import PLACEMENTS, Parallel
from kfc.lab.muon import Muon
from kfc.lab.options import ConfigError, Option, check_options, number_or, option, options_of
from kfc.optimizers import KFAC, KFC
from kfc.optimizers.options import Adaptation
from kfc.schedule import Budget, Periods, Stretch


@dataclass(frozen=True)
class Setup:
    """Settings that every optimizer takes besides its own options.

    Attributes:
        lr: ``None`` if the optimizer adapts its learning rate.
        weight_costs: weight decay λ by parameter name; parameters without an entry have none.
        likelihood: the likelihood that belongs to the loss, as ``kfc.KFC`` takes it.
        averaging_timescale: τ of the averaged parameters, in updates.
    """

    lr: float | None
    weight_costs: Mapping[str, float]
    seed: int
    likelihood: str
    averaging_timescale: float | None = None

    def groups(
        self, named: Iterable[tuple[str, Tensor | str]], key: str = "params", **options: Any
    ) -> list[dict[str, Any]]:
        """Return parameter groups with these options, one for each weight decay."""
        members: dict[float, list[Tensor | str]] = {}
        for name, member in named:
            members.setdefault(self.weight_costs.get(name, 0.0), []).append(member)
        return [{key: each, "weight_decay": cost, **options} for cost, each in members.items()]


@dataclass(frozen=True)
class OptimizerOptions(ABC):
    """The options of one optimizer; each subclass declares them as fields."""

    lr: ClassVar[float | None]  # the default; None if the optimizer adapts it
    batch_size: ClassVar[int]  # the default

    def __post_init__(self) -> None:
        check_options(self)

    @abstractmethod
    def make(self, model: nn.Module, setup: Setup) -> Optimizer:
        """Return the optimizer for a model."""

    def first_estimate(self, available: int) -> int:
        """Return the number of training examples of the first estimate of the factors.

        Args:
            available: the number of examples in the training set.
        """
        return 0


# KFC and KFAC


def number_or_averaging(text: str) -> float | str:
    """Return a number, or the word "averaging"."""
    return number_or(AVERAGING, text)


CLIP = "Limit C of the Fisher norm of an update; 0 for no limit"


@dataclass(frozen=True)
class CurvatureOptions(OptimizerOptions):
    """Options that KFC and KFAC have in common."""

    batch_size = 512
    periods: ClassVar[Periods] = Periods()  # where no period is given
    estimates_first: ClassVar[bool]  # whether to make a first estimate if no number is given
    statistics_period: int | None = option(
        None,
        "Steps T_s between updates of the factors; by default 1 for kfac, rising to 10 for kfc",
        positive=True,
    )
    inverse_period: int | None = option(
        None, "Steps T_f between updates of the inverses; by default rising to 20", positive=True
    )
    curvature: str = option(
        "kfc",
        f"Approximation of the Fisher matrix: {', '.join(APPROXIMATIONS)}",
        choices=tuple(APPROXIMATIONS),
    )
    fisher: str | None = option(
        None, "Targets of the Fisher matrix: sampled (default), exact or empirical"
    )
    inverse: str | None = option(None, "Form of the damped inverse: factored (default) or eigen")
    factor_decay: float | str = option(
        Approximation.factor_decay,
        "Weight ξ of the old value in the moving averages, at each update of the factors; "
        f'"{AVERAGING}" for exp(-1/τ), as in the paper, with τ that of the averaged parameters',
        parse=number_or_averaging,
        word=AVERAGING,
    )
    estimate_factors: int | None = option(
        None,
        "Training examples for a first estimate of the factors, before the first update, as in "
        "Algorithm 1; 0 for none; by default all for kfc and none for kfac, which updates its "
        "factors in every step",
    )
    inverse_placement: str = option(
        "auto", f"Which of several processes inverts which factor: {', '.join(PLACEMENTS)}"
    )
    asynchronous_inverses: bool = option(
        False, "Compute inverses in a thread while training continues"
    )
    max_staleness: int | None = option(
        None, "Largest age in steps of asynchronous inverses; by default T_f"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fisher == "empirical" and self.estimate_factors:
            raise ConfigError(
                f"estimate_factors must be 0 with fisher 'empirical', got {self.estimate_factors}: "
                "the estimate draws targets from the model"
            )

    def first_estimate(self, available: int) -> int:
        if self.estimate_factors is None:
            possible = self.estimates_first and self.fisher != "empirical"
            return available if possible else 0
        if self.estimate_factors > available:
            raise ConfigError(
                f"estimate_factors must be at most the examples used ({available}), got "
                f"{self.estimate_factors}"
            )
        return self.estimate_factors

    def _arguments(self, setup: Setup) -> dict[str, Any]:
        """Return the arguments that ``kfc.KFC`` and ``kfc.KFAC`` have in common."""
        approximation = APPROXIMATIONS[self.curvature]
        given = {name: getattr(self, name) for name in ("fisher", "inverse", "factor_decay")}
        given = {name: value for name, value in given.items() if value is not None}
        if foreign := given.keys() - {each.name for each in fields(approximation)}:
            raise ConfigError(f"{foreign.pop()} has no effect with curvature {self.curvature!r}")
        return {
            "groups": setup.groups(((name, name) for name in setup.weight_costs), key="prefix"),
            "likelihood": setup.likelihood,
            "seed": setup.seed,
            "curvature": approximation(**given).with_decay(setup.averaging_timescale),
            "schedule": Periods(
                self.statistics_period or self.periods.statistics,
                self.inverse_period or self.periods.inverse,
            ),
            "parallel": Parallel(
                placement=self.inverse_placement,  # type: ignore[arg-type]
                asynchronous=self.asynchronous_inverses,
                max_staleness=self.max_staleness,
                # A resumed run continues bit for bit, so nothing may depend on a thread's speed.
                deterministic=self.asynchronous_inverses,
            ),
        }


@dataclass(frozen=True)
class KFCOptions(CurvatureOptions):
    """Options of ``kfc.KFC``."""

    lr, estimates_first = 3e-3, True
    momentum: float = option(0.9, "Momentum μ")
    damping: float = option(1e-3, "Damping γ")
    fisher_clip: float = option(0.3, CLIP)
    overhead: float | None = option(
        None, "Time that curvature may add to a step, as a fraction: 0.25 for a quarter"
    )

    def make(self, model: nn.Module, setup: Setup) -> KFC:
        arguments = self._arguments(setup)
        if self.overhead is not None:
            periods = self.statistics_period, self.inverse_period
            arguments["schedule"] = Budget(self.overhead, *periods)
        return KFC(
            model,
            self.lr if setup.lr is None else setup.lr,
            momentum=self.momentum,
            damping=self.damping,
            clip=self.fisher_clip or None,
            **arguments,
        )


@dataclass(frozen=True)
class KFACOptions(CurvatureOptions):
    """Options of ``kfc.KFAC``."""

    lr, periods, estimates_first = None, Periods(1, Stretch(20)), False
    momentum: float | None = option(None, "Momentum μ")
    model_damping: float | None = option(None, "Fixed damping λ of the quadratic model")
    factor_damping: float | None = option(None, "Fixed damping γ of the factors")
    initial_model_damping: float = option(
        Adaptation.initial_model_damping, "Initial value of the adapted λ"
    )
    model_damping_period: int = option(
        Adaptation.model_damping_period, "Steps between adaptations of λ"
    )
    factor_damping_period: int = option(
        Adaptation.factor_damping_period, "Steps between adaptations of γ"
    )
    max_lr: float | None = option(Adaptation.max_lr, "Largest adapted learning rate")
    max_momentum: float | None = option(Adaptation.max_momentum, "Largest adapted momentum")
    fisher_clip: float = option(0.0, CLIP)

    def make(self, model: nn.Module, setup: Setup) -> KFAC:
        names = {each.name for each in fields(Adaptation)} & {each.name for each in fields(self)}
        adaptation = Adaptation(lr=setup.lr, **{name: getattr(self, name) for name in names})
        return KFAC(
            model,
            adaptation=adaptation,
            clip=self.fisher_clip or None,
            **self._arguments(setup),
        )


# Other optimizers


@dataclass(frozen=True)
class SGDOptions(OptimizerOptions):
    """Options of ``torch.optim.SGD``."""

    lr, batch_size = 1e-2, 128
    momentum: float = option(0.9, "Momentum μ")

    def make(self, model: nn.Module, setup: Setup) -> Optimizer:
        return torch.optim.SGD(
            setup.groups(model.named_parameters(), lr=setup.lr), momentum=self.momentum
        )


@dataclass(frozen=True)
class AdamOptions(OptimizerOptions):
    """Options of ``torch.optim.Adam``."""

    lr, batch_size = 1e-3, 128
    algorithm: ClassVar[type[torch.optim.Adam]] = torch.optim.Adam
    beta1: float = option(0.9, "Decay of the mean of gradients")
    beta2: float = option(0.999, "Decay of the mean of squared gradients")

    def make(self, model: nn.Module, setup: Setup) -> Optimizer:
        betas = self.beta1, self.beta2
        return self.algorithm(setup.groups(model.named_parameters(), lr=setup.lr), betas=betas)


@dataclass(frozen=True)
class AdamWOptions(AdamOptions):
    """Options of ``torch.optim.AdamW``."""

    algorithm = torch.optim.AdamW


@dataclass(frozen=True)
class SOAPOptions(OptimizerOptions):
    """Options of pytorch-optimizer's SOAP."""

    lr, batch_size = 3e-3, 256
    beta1: float = option(0.95, "Decay of the mean of gradients")
    beta2: float = option(0.95, "Decay of the mean of squared gradients")
    precondition_frequency: int = option(10, "Steps between updates of the preconditioner")

    def make(self, model: nn.Module, setup: Setup) -> Optimizer:
        if not is_installed("soap"):
            raise ValueError(
                "soap needs the package pytorch-optimizer: pip install pytorch-optimizer"
            )
        from pytorch_optimizer import SOAP

        optimizer: Optimizer = SOAP(
            setup.groups(model.named_parameters(), lr=setup.lr),
            betas=(self.beta1, self.beta2),
            precondition_frequency=self.precondition_frequency,
        )
        return optimizer


@dataclass(frozen=True)
class MuonOptions(OptimizerOptions):
    """Options of ``Muon``."""

    lr, batch_size = 2e-2, 256
    momentum: float = option(0.95, "Momentum μ")
    adamw_lr: float = option(3e-3, "Learning rate of the parameters that AdamW trains")

    def make(self, model: nn.Module, setup: Setup) -> Optimizer:
        return Muon(
            model,
            lambda named: torch.optim.Muon(
                setup.groups(named, lr=setup.lr), momentum=self.momentum
            ),
            lambda named: torch.optim.AdamW(setup.groups(named, lr=self.adamw_lr)),
        )


# All optimizers

Optimizer: TypeAlias = torch.optim.Optimizer | Muon

OPTIMIZERS: dict[str, type[OptimizerOptions]] = {
    "kfc": KFCOptions,
    "kfac": KFACOptions,
    "sgd": SGDOptions,
    "adam": AdamOptions,
    "adamw": AdamWOptions,
    "muon": MuonOptions,
    "soap": SOAPOptions,
}


def is_installed(name: str) -> bool:
    """Return whether the optimizer's package is installed and recent enough."""
    if name == "soap":
        return find_spec("pytorch_optimizer") is not None
    return name != "muon" or Muon.is_available()


def optimizer_options(name: str, values: Mapping[str, Any]) -> OptimizerOptions:
    """Return the options of an optimizer, with defaults for those that are not given."""
    known = options_of(OPTIMIZERS[name])
    if foreign := [given for given in values if given not in known]:
        raise ConfigError(
            f"{', '.join(foreign)} has no effect with the optimizer {name}, whose options are "
            f"{', '.join(known)}"
        )
    return OPTIMIZERS[name](**values)


def all_optimizer_options() -> dict[str, dict[str, Option]]:
    """Return the options of all optimizers: by option name, its declaration by optimizer."""
    found: dict[str, dict[str, Option]] = {}
    for optimizer, owner in OPTIMIZERS.items():
        for name, declared in options_of(owner).items():
            found.setdefault(name, {})[optimizer] = declared
    return found
