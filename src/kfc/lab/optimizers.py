"""The optimizers that `kfc train` offers, and the options of each."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from importlib.util import find_spec
from typing import Any, ClassVar

from torch import nn

from kfc.curvature.options import APPROXIMATIONS, AVERAGING, Kronecker, Whitening
from kfc.distributed.options import PLACEMENTS, Parallel
from kfc.lab.baselines import (
    AdagradOptions,
    AdamOptions,
    AdamWOptions,
    MuonOptions,
    RMSPropOptions,
    SGDOptions,
    SOAPOptions,
)
from kfc.lab.method import OptimizerOptions, Setup
from kfc.lab.options import (
    ConfigError,
    Option,
    config_errors,
    from_flat,
    number_or,
    option,
    options_of,
    section,
)
from kfc.optimizers import KFAC, KFC, WhitenedAdam
from kfc.optimizers.options import Adaptation, FisherClip
from kfc.schedule import Budget, Periods, Stretch

# Our optimizers


def number_or_averaging(text: str) -> float | str:
    """Return a number, or the word "averaging"."""
    return number_or(AVERAGING, text)


def decay_option(default: float | str) -> Any:
    return option(
        default,
        "Weight ξ of the old value in the moving averages, at each update of the factors; "
        f'"{AVERAGING}" for exp(-1/τ), as in the paper, with τ that of the averaged parameters',
        parse=number_or_averaging,
        word=AVERAGING,
    )


def default_of(method: type, name: str) -> Any:
    """Return the default of an argument of an optimizer, which is declared there only."""
    return inspect.signature(method).parameters[name].default


CLIP = "Limit C of the Fisher norm of an update; 0: no limit on the norm (the loss bound stays)"
BOUND = (
    "Largest predicted change of the loss in one step, as a fraction κ of the excess loss "
    "(whitened-adam also lengthens steps below half of it, and allows up to 2κ where the loss "
    "falls fast); 0: no bound"
)
PERIODS: dict[str, Periods] = {
    name: default_of(method, "schedule")
    for name, method in (("kfc", KFC), ("kfac", KFAC), ("whitened-adam", WhitenedAdam))
}


def described_defaults(kind: str) -> str:
    """Return a phrase with each optimizer's default of a period, ``statistics`` or ``inverse``."""
    periods = {name: getattr(each, kind) for name, each in PERIODS.items()}
    texts = {
        name: f"rising to {period.limit}" if isinstance(period, Stretch) else str(period)
        for name, period in periods.items()
    }
    return "by default " + ", ".join(f"{text} for {name}" for name, text in texts.items())


@dataclass(frozen=True)
class ParallelOptions:
    """Options of ``kfc.Parallel``."""

    inverse_placement: str = option(
        "auto", f"Which of several processes inverts which factor: {', '.join(PLACEMENTS)}"
    )
    asynchronous_inverses: bool = option(
        False, "Compute inverses in a thread while training continues"
    )
    max_staleness: int | None = option(
        None, "Largest age in steps of asynchronous inverses; by default T_f"
    )

    def make(self) -> Parallel:
        return Parallel(
            placement=self.inverse_placement,  # type: ignore[arg-type]
            asynchronous=self.asynchronous_inverses,
            max_staleness=self.max_staleness,
            # A resumed run continues bit for bit, so nothing may depend on a thread's speed.
            deterministic=self.asynchronous_inverses,
        )


@dataclass(frozen=True)
class RefreshOptions(OptimizerOptions):
    """Options that KFC, KFAC and WhitenedAdam have in common."""

    periods: ClassVar[Periods]  # where no period is given
    statistics_period: int | None = option(
        None,
        f"Steps T_s between updates of the factors; {described_defaults('statistics')}",
        positive=True,
    )
    inverse_period: int | None = option(
        None,
        f"Steps T_f between updates of the inverses; {described_defaults('inverse')}",
        positive=True,
    )
    factor_decay: float | str = decay_option(Kronecker.factor_decay)
    parallel: ParallelOptions = section(ParallelOptions)

    def _shared_arguments(self, setup: Setup) -> dict[str, Any]:
        """Return the arguments that all of them have in common."""
        return {
            "groups": setup.groups(((name, name) for name in setup.weight_costs), key="prefix"),
            "schedule": Periods(
                self.statistics_period or self.periods.statistics,
                self.inverse_period or self.periods.inverse,
                # Periods that are given are kept.
                None if self.statistics_period or self.inverse_period else self.periods.overhead,
            ),
            "parallel": self.parallel.make(),
        }


@dataclass(frozen=True)
class CurvatureOptions(RefreshOptions):
    """Options that KFC and KFAC have in common."""

    batch_size = 512
    estimates_first: ClassVar[bool]  # whether to make a first estimate if no number is given
    curvature: str = option(
        "kfc",
        f"Approximation of the Fisher matrix: {', '.join(APPROXIMATIONS)}",
        choices=tuple(APPROXIMATIONS),
    )
    fisher: str | None = option(
        None, "Targets of the Fisher matrix: sampled (default), exact or empirical"
    )
    inverse: str | None = option(None, "Form of the damped inverse: factored (default) or eigen")
    fraction: float | None = option(
        None,
        "Part of the batch that statistics are gathered from, at least 32 examples; by default a "
        "quarter; 1 for the whole batch, as in the paper",
        positive=True,
    )
    estimate_factors: int | None = option(
        None,
        "Training examples for a first estimate of the factors, before the first update, as in "
        "Algorithm 1; 0 for none; by default all for kfc and none for kfac, which updates its "
        "factors in every step",
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
        names = ("fisher", "inverse", "factor_decay", "fraction")
        given = {name: getattr(self, name) for name in names}
        given = {name: value for name, value in given.items() if value is not None}
        if foreign := given.keys() - {each.name for each in fields(approximation)}:
            raise ConfigError(f"{foreign.pop()} has no effect with curvature {self.curvature!r}")
        draws_targets = self.fisher in (None, "sampled")
        return {
            **self._shared_arguments(setup),
            "likelihood": setup.likelihood,
            "seed": setup.seed if draws_targets else None,
            "curvature": approximation(**given).with_decay(setup.averaging_timescale),
        }


@dataclass(frozen=True)
class KFCOptions(CurvatureOptions):
    """Options of ``kfc.KFC``."""

    lr, periods, estimates_first = default_of(KFC, "lr"), PERIODS["kfc"], True
    momentum: float = option(default_of(KFC, "momentum"), "Momentum μ")
    damping: float = option(default_of(KFC, "damping"), "Damping γ")
    clip: float = option(default_of(KFC, "clip").limit, CLIP)
    loss_bound: float = option(default_of(KFC, "clip").loss_bound, BOUND)
    overhead: float | None = option(
        None, "Choose periods by measured times, so that curvature adds this fraction to a step"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        with config_errors():
            self._budget()

    def _budget(self) -> Budget | None:
        if self.overhead is None:
            return None
        return Budget(self.overhead, self.statistics_period, self.inverse_period)

    def make(self, model: nn.Module, setup: Setup) -> KFC:
        arguments = self._arguments(setup)
        arguments["schedule"] = self._budget() or arguments["schedule"]
        return KFC(
            model,
            self.lr if setup.lr is None else setup.lr,
            momentum=self.momentum,
            damping=self.damping,
            clip=self._clip(),
            **arguments,
        )

    def _clip(self) -> FisherClip | None:
        limit, bound = self.clip or None, self.loss_bound or None
        return None if limit is bound is None else FisherClip(limit, loss_bound=bound)


@dataclass(frozen=True)
class AdaptationOptions:
    """Options of ``kfc.Adaptation``."""

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
    loss_bound: float = option(Adaptation.loss_bound, BOUND)

    def make(self, lr: float | None) -> Adaptation:
        return Adaptation(lr=lr, **{**asdict(self), "loss_bound": self.loss_bound or None})


@dataclass(frozen=True)
class KFACOptions(CurvatureOptions):
    """Options of ``kfc.KFAC``."""

    lr, periods, estimates_first = None, PERIODS["kfac"], False
    adaptation: AdaptationOptions = section(AdaptationOptions)
    clip: float = option(default_of(KFAC, "clip") or 0.0, CLIP)

    def make(self, model: nn.Module, setup: Setup) -> KFAC:
        return KFAC(
            model,
            adaptation=self.adaptation.make(setup.lr),
            clip=self.clip or None,
            **self._arguments(setup),
        )


@dataclass(frozen=True)
class WhitenedAdamOptions(RefreshOptions):
    """Options of ``kfc.WhitenedAdam``."""

    lr, batch_size, periods = default_of(WhitenedAdam, "lr"), 128, PERIODS["whitened-adam"]
    beta1: float = option(
        default_of(WhitenedAdam, "betas")[0], "Weight of the running average in the parameters"
    )
    beta2: float = option(
        default_of(WhitenedAdam, "betas")[1], "Decay of the mean of squared gradients"
    )
    damping: float = option(
        default_of(WhitenedAdam, "damping"),
        "Damping δ, as a fraction of the factor's mean eigenvalue",
    )
    factor_decay: float | str = decay_option(Whitening.factor_decay)
    rotation_period: int = option(
        default_of(WhitenedAdam, "rotation_period"),
        "Steps between updates of the eigenbases of the outputs; 0 for no rotation",
    )
    loss_bound: float = option(default_of(WhitenedAdam, "loss_bound"), BOUND)

    def make(self, model: nn.Module, setup: Setup) -> WhitenedAdam:
        whitening = Whitening(factor_decay=self.factor_decay)  # type: ignore[arg-type]
        return WhitenedAdam(
            model,
            self.lr if setup.lr is None else setup.lr,
            betas=(self.beta1, self.beta2),
            weight_decay=0.0,  # the groups have that of the command line
            damping=self.damping,
            loss_bound=self.loss_bound or None,
            rotation_period=self.rotation_period or None,
            whitening=whitening.with_decay(setup.averaging_timescale),
            **self._shared_arguments(setup),
        )


# All optimizers

OPTIMIZERS: dict[str, type[OptimizerOptions]] = {
    "kfc": KFCOptions,
    "kfac": KFACOptions,
    "whitened-adam": WhitenedAdamOptions,
    "sgd": SGDOptions,
    "adagrad": AdagradOptions,
    "rmsprop": RMSPropOptions,
    "adam": AdamOptions,
    "adamw": AdamWOptions,
    "muon": MuonOptions,
    "soap": SOAPOptions,
}


def is_installed(name: str) -> bool:
    """Return whether the optimizer's package is installed."""
    return name != "soap" or find_spec("pytorch_optimizer") is not None


def optimizer_options(name: str, values: Mapping[str, Any]) -> OptimizerOptions:
    """Return the options of an optimizer, with defaults for those that are not given."""
    known = options_of(OPTIMIZERS[name])
    if foreign := [given for given in values if given not in known]:
        raise ConfigError(
            f"{', '.join(foreign)} has no effect with the optimizer {name}, whose options are "
            f"{', '.join(known)}"
        )
    return from_flat(OPTIMIZERS[name], values)


def all_optimizer_options() -> dict[str, dict[str, Option]]:
    """Return the options of all optimizers: by option name, its declaration by optimizer."""
    found: dict[str, dict[str, Option]] = {}
    for optimizer, owner in OPTIMIZERS.items():
        for name, declared in options_of(owner).items():
            found.setdefault(name, {})[optimizer] = declared
    return found
