"""What every optimizer of `kfc train` has: its options, and how it is made from them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn

from kfc.lab.muon import Muon
from kfc.lab.options import check_options

Optimizer: TypeAlias = torch.optim.Optimizer | Muon


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
