"""The value objects that only the optimizers take."""

import math
from dataclasses import dataclass, fields

from kfc._helpers import require_number, require_whole

# The part of a batch on which ν is computed by default, and the most examples.
PAPER_FRACTION, MOST_EXAMPLES = 0.25, 32
# The largest number of steps between computations of ν.
LONGEST_GAP = 32


@dataclass(frozen=True)
class FisherClip:
    """Limits on the size of an update.

    Let ν = vᵀFv + λvᵀv for an update v, with the exact Fisher matrix F. If ν > C, v is divided by
    √(ν/C).

    Args:
        limit: C; ``None``: no limit on ν.
        fraction: the part of the batch on which ν is computed, a quarter in the paper; ``None``: a
            quarter, but at most 32 examples.
        period: the number of steps between computations of ν, without clipping in between.
            ``None``: ν is computed as often as needed and the overhead of ``kfc.Periods`` allows,
            and estimated in the other steps.
        loss_bound: κ. To first order, no step may lower the objective by more than κ times its
            excess on the batch, the objective minus the least it could be; longer steps are
            shortened. ``None``: no bound, as in the paper; training can then diverge.
    """

    limit: float | None = 0.3
    fraction: float | None = None
    period: int | None = None
    loss_bound: float | None = 0.25

    def __post_init__(self) -> None:
        if self.limit is not None:
            require_number("the clip's limit", self.limit, positive=True)
        elif (self.fraction, self.period) != (FisherClip.fraction, FisherClip.period):
            raise ValueError("the clip's fraction and period have no effect without a limit")
        elif self.loss_bound is None:
            raise ValueError("a clip without limit and loss_bound has no effect; pass clip=None")
        if self.loss_bound is not None:
            require_number("the clip's loss_bound", self.loss_bound, positive=True)
        if self.fraction not in (None, 1):
            require_number("the clip's fraction", self.fraction, below=1, positive=True)
        if self.period is not None:
            require_whole("the clip's period", self.period)

    def examples_used(self, examples: int) -> int:
        """Return the number of examples of a batch on which ν is computed."""
        if self.fraction is None:
            return min(math.ceil(PAPER_FRACTION * examples), MOST_EXAMPLES)
        return math.ceil(self.fraction * examples)

    @property
    def lowest_rate(self) -> float:
        """The computations of ν per step if it is far below the limit, or the period is fixed."""
        return 0.0 if self.limit is None else 1 / (self.period or LONGEST_GAP)


def resolve_clip(clip: FisherClip | float | None) -> FisherClip | None:
    """Return the value object that a number stands for."""
    if clip is None or isinstance(clip, FisherClip):
        return clip
    require_number("clip", clip, positive=True)
    return FisherClip(float(clip))


def require_limit(clip: object) -> None:
    """Raise an error unless a clip is a number or ``None``, as for ``kfc.KFAC``."""
    if isinstance(clip, FisherClip):
        raise TypeError(
            f"clip must be a number or None for KFAC, got {clip!r}; its loss_bound is that of "
            "kfc.Adaptation"
        )
    if clip is not None:
        require_number("clip", clip, positive=True)


@dataclass(frozen=True, kw_only=True)
class Adaptation:
    """Options for the numbers that ``kfc.KFAC`` adapts, each of which can be fixed.

    Args:
        lr: a fixed learning rate α; ``None``: chosen in every step.
        momentum: a fixed momentum μ; ``None``: chosen in every step.
        model_damping: a fixed λ; ``None``: adapted by the Levenberg-Marquardt rule.
        factor_damping: a fixed γ, which enters the factors as (Ω + π γ I) ⊗ (Γ + γ/π I) and so
            adds γ² to their product; ``None``: adapted, by choosing the value for which the
            quadratic model has the lowest minimum.
        max_lr: a bound on a chosen learning rate, 0 ≤ α ≤ ``max_lr``; ``None``: no bound, as in
            the paper.
        max_momentum: a bound on a chosen momentum, |μ| ≤ ``max_momentum``; ``None``: no bound, as
            in the paper.
        loss_bound: κ: to first order, no update lowers the objective by more than κ times its
            excess, as in ``kfc.FisherClip``. With 2, the minimum of the quadratic model is not
            below the least value of the objective. ``None``: no bound, as in the paper.
        initial_model_damping: the initial λ if it adapts. γ starts at √(λ + weight decay),
            with the largest weight decay of all groups, and is never adapted to less.
        model_damping_period: the number of steps between adaptations of λ. Each evaluates the loss
            once more, to measure the effect of the update. The first step adapts λ too: it
            multiplies λ by ten until the update no longer increases the loss.
        model_damping_decrease: λ is multiplied by this number if the quadratic model predicts the
            change of the loss well (ρ > 3/4), and divided by it if badly (ρ < 1/4).
        factor_damping_period: the number of steps between adaptations of γ. The candidates are γ,
            γω and γ/ω, with ω = ``factor_damping_factor``.
        factor_damping_factor: ω.
    """

    lr: float | None = None
    momentum: float | None = None
    model_damping: float | None = None
    factor_damping: float | None = None
    max_lr: float | None = 1.0
    max_momentum: float | None = 1.0
    loss_bound: float | None = 2.0
    # The 150 of the K-FAC paper is for a loss summed over 784 pixels.
    initial_model_damping: float = 0.01
    model_damping_period: int = 5
    model_damping_decrease: float = (19 / 20) ** 5
    factor_damping_period: int = 20
    factor_damping_factor: float = (19 / 20) ** 10

    def __post_init__(self) -> None:
        for name in ("lr", "model_damping", "factor_damping"):
            if getattr(self, name) is not None:
                require_number(name, getattr(self, name))
        if self.momentum is not None:
            require_number("momentum", self.momentum, below=1)
        for name in ("max_lr", "max_momentum", "loss_bound"):
            if getattr(self, name) is not None:
                require_number(name, getattr(self, name), positive=True)
        require_number("initial_model_damping", self.initial_model_damping, positive=True)
        for name in ("model_damping_decrease", "factor_damping_factor"):
            require_number(name, getattr(self, name), below=1, positive=True)
        for name in ("model_damping_period", "factor_damping_period"):
            require_whole(name, getattr(self, name))
        # Updates whose coefficients are chosen are measured also if λ is fixed.
        measured = self.lr is None or self.momentum is None
        for fixed in ("lr", "momentum", "model_damping", "factor_damping"):
            idle = [f.name for f in fields(self) if fixed in f.name and f.name != fixed]
            changed = [n for n in idle if getattr(self, n) != getattr(Adaptation, n)]
            if measured:
                changed = [name for name in changed if name != "model_damping_period"]
            if getattr(self, fixed) is not None and changed:
                raise ValueError(f"{changed[0]} has no effect with a fixed {fixed}; remove one")
