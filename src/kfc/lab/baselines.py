"""Options of the optimizers of other libraries, which `kfc train` offers for comparison."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import ClassVar

import torch
from torch import nn

from kfc.lab.method import Optimizer, OptimizerOptions, Setup
from kfc.lab.muon import Muon
from kfc.lab.options import option


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
class AdagradOptions(OptimizerOptions):
    """Options of ``torch.optim.Adagrad``."""

    lr, batch_size = 1e-2, 128

    def make(self, model: nn.Module, setup: Setup) -> Optimizer:
        return torch.optim.Adagrad(setup.groups(model.named_parameters(), lr=setup.lr))


@dataclass(frozen=True)
class RMSPropOptions(OptimizerOptions):
    """Options of ``torch.optim.RMSprop``."""

    lr, batch_size = 1e-3, 128
    momentum: float = option(0.0, "Momentum μ")
    beta2: float = option(0.9, "Decay of the mean of squared gradients")

    def make(self, model: nn.Module, setup: Setup) -> Optimizer:
        groups = setup.groups(model.named_parameters(), lr=setup.lr)
        return torch.optim.RMSprop(groups, alpha=self.beta2, momentum=self.momentum)


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
        if find_spec("pytorch_optimizer") is None:
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
