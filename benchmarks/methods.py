"""The optimizers to compare, each used as its documentation recommends.

Every method builds, for a model, a function that trains on one batch. Libraries that provide
curvature without an optimizer are completed with inverses and SGD with momentum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from networks import paper_network
from torch import Tensor, nn

import kfc

Step = Callable[[Tensor, Tensor], None]

# Small, so that no loss diverges while it is timed.
LR = 1e-4
DAMPING = 1e-3
NEVER = 10**9
# The number of steps per refresh of the preconditioner at amortised settings.
AMORTISED = 10


@dataclass(frozen=True)
class Method:
    """An optimizer with its settings.

    Attributes:
        package: the distribution that contains it.
        build: returns a function that trains a model on a batch.
        cycle: the number of steps after which its work repeats.
        note: how its use differs from that of the others.
    """

    name: str
    package: str
    build: Callable[[nn.Module], Step]
    cycle: int = 1
    note: str = ""


def usual(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """Return the usual training step."""

    def step(images: Tensor, labels: Tensor) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


def preconditioned(
    model: nn.Module,
    inverse_of: Callable[[Tensor, Tensor], Callable[[list[Tensor]], Iterable[Tensor]]],
    period: int,
) -> Step:
    """Return SGD steps on gradients times an inverse, refreshed once per period."""
    optimizer = sgd(model)
    parameters = list(model.parameters())
    inverse: Callable[[list[Tensor]], Iterable[Tensor]] | None = None
    count = 0

    def step(images: Tensor, labels: Tensor) -> None:
        nonlocal inverse, count
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        if inverse is None or count % period == 0:
            inverse = inverse_of(images, labels)
        count += 1
        gradients = [p.grad for p in parameters if p.grad is not None]
        for gradient, natural in zip(gradients, inverse(gradients), strict=True):
            gradient.copy_(natural)
        optimizer.step()

    return step


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=LR)


def muon(model: nn.Module) -> Step:
    """Use Muon for matrices and AdamW for the other parameters, here all convolutions."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    optimizers = [torch.optim.Muon(matrices, lr=LR), torch.optim.AdamW(others, lr=LR)]

    def step(images: Tensor, labels: Tensor) -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        for optimizer in optimizers:
            optimizer.step()

    return step


def our_kfc(
    name: str, period: int | None = None, cycle: int = 1, note: str = "", **options: Any
) -> Method:
    """Return KFC with options; ``period`` is that of both statistics and inverses."""
    if period is not None:
        options |= {"schedule": kfc.Periods(period, period), "lr": LR}

    def build(model: nn.Module) -> Step:
        return usual(model, kfc.KFC(model, **options))

    return Method(name, "kfc-torch", build, cycle, note)


def singd(period: int) -> Callable[[nn.Module], Step]:
    def build(model: nn.Module) -> Step:
        from singd.optim.optimizer import SINGD

        return usual(model, SINGD(model, lr=LR, T=period, damping=DAMPING, warn_unsupported=False))

    return build


def curvlinops(period: int) -> Callable[[nn.Module], Step]:
    def build(model: nn.Module) -> Step:
        from curvlinops import KFACInverseLinearOperator, KFACLinearOperator

        def inverse_of(
            images: Tensor, labels: Tensor
        ) -> Callable[[list[Tensor]], Iterable[Tensor]]:
            curvature = KFACLinearOperator(
                model,
                nn.CrossEntropyLoss(),
                list(model.parameters()),
                [(images, labels)],
                fisher_type="mc",
                mc_samples=1,
                check_deterministic=False,
                separate_weight_and_bias=False,
            )
            inverse = KFACInverseLinearOperator(
                curvature, damping=DAMPING, use_heuristic_damping=True
            )
            return lambda gradients: inverse @ gradients

        return preconditioned(model, inverse_of, period)

    return build


def nngeometry(period: int) -> Callable[[nn.Module], Step]:
    def build(model: nn.Module) -> Step:
        from nngeometry.layercollection import LayerCollection
        from nngeometry.metrics import FIM_MonteCarlo
        from nngeometry.object import PMatKFAC, PVector
        from torch.utils.data import DataLoader, TensorDataset

        # Its solves need views, which channels_last gradients do not have.
        model.to(memory_format=torch.contiguous_format)
        layers = LayerCollection.from_model(model)
        device = str(next(model.parameters()).device)

        def inverse_of(
            images: Tensor, labels: Tensor
        ) -> Callable[[list[Tensor]], Iterable[Tensor]]:
            loader = DataLoader(TensorDataset(images, labels), batch_size=len(images))
            curvature = FIM_MonteCarlo(
                model, loader, PMatKFAC, layer_collection=layers, device=device
            )

            def apply(gradients: list[Tensor]) -> Iterable[Tensor]:
                solved = curvature.solve(PVector.from_model_grad(model), regul=DAMPING)
                flat = solved.to_torch()
                return [
                    part.reshape(gradient.shape)
                    for part, gradient in zip(
                        flat.split([g.numel() for g in gradients]), gradients, strict=True
                    )
                ]

            return apply

        return preconditioned(model, inverse_of, period)

    return build


def backpack(period: int) -> Callable[[nn.Module], Step]:
    def build(model: nn.Module) -> Step:
        from backpack import backpack as recording
        from backpack import extend
        from backpack.extensions import KFAC

        if any(isinstance(m, nn.AvgPool2d) and not m.count_include_pad for m in model.modules()):
            # BackPACK does not support this pooling, which only the paper's networks use.
            convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
            first, second, third = (conv.out_channels for conv in convolutions)
            model = paper_network((first, second, third), padded_pools=True)
            model = model.to(convolutions[0].weight.device, memory_format=torch.channels_last)
        extend(model)
        loss_function = extend(nn.CrossEntropyLoss())
        optimizer = sgd(model)
        inverses: list[list[Tensor]] = []
        count = 0

        def step(images: Tensor, labels: Tensor) -> None:
            nonlocal inverses, count
            optimizer.zero_grad()
            due = count % period == 0
            count += 1
            if due:
                with recording(KFAC(mc_samples=1)):
                    loss_function(model(images), labels).backward()
                inverses = [[damped_inverse(f) for f in p.kfac] for p in model.parameters()]
            else:
                loss_function(model(images), labels).backward()
            for parameter, factors in zip(model.parameters(), inverses, strict=True):
                gradient = parameter.grad
                assert gradient is not None
                matrix = gradient.reshape(gradient.shape[0], -1)
                natural = factors[0] @ matrix
                if len(factors) > 1:
                    natural = natural @ factors[1]
                gradient.copy_(natural.reshape(gradient.shape))
            optimizer.step()

        return step

    return build


def damped_inverse(factor: Tensor) -> Tensor:
    shifted = factor + DAMPING**0.5 * torch.eye(len(factor), device=factor.device)
    return torch.cholesky_inverse(torch.linalg.cholesky(shifted))


def pytorch_optimizer(name: str, **options: object) -> Callable[[nn.Module], Step]:
    def build(model: nn.Module) -> Step:
        import pytorch_optimizer as library

        return usual(model, getattr(library, name)(model.parameters(), lr=LR, **options))

    return build


def heavyball(name: str, **options: object) -> Callable[[nn.Module], Step]:
    def build(model: nn.Module) -> Step:
        import heavyball as library

        # As its documentation recommends: compilation takes minutes in the first step.
        library.utils.compile_mode = None
        return usual(model, getattr(library, name)(model.parameters(), lr=LR, **options))

    return build


def several(
    label: str, package: str, build: Callable[[int], Callable[[nn.Module], Step]], note: str = ""
) -> list[Method]:
    """Return a method with a refresh in every step, and with amortised refreshes."""
    return [
        Method(f"{label}, every step", package, build(1), note=note),
        Method(f"{label}, every {AMORTISED}", package, build(AMORTISED), AMORTISED, note),
    ]


PLAIN = Method("SGD", "torch", lambda m: usual(m, sgd(m)), note="momentum 0.9")

OURS = [
    our_kfc("KFC, every step, exact clip", period=1, clip=kfc.FisherClip(period=1)),
    our_kfc("KFC, every step, no clip", period=1, clip=None),
    our_kfc(f"KFC, every {AMORTISED}, no clip", period=AMORTISED, cycle=AMORTISED, clip=None),
    our_kfc("KFC, nothing due", period=NEVER, clip=None, note="natural gradient with old inverses"),
]

# With the default learning rate, on which it depends how often exact norms are computed
DEFAULT = our_kfc("KFC, default settings")

PEERS = [
    Method("Adam", "torch", lambda m: usual(m, adam(m))),
    Method("Muon", "torch", muon, note="AdamW for all convolutions"),
    *several("SINGD", "singd", singd, "dense structure, empirical Fisher"),
    *several("curvlinops KFAC", "curvlinops-for-pytorch", curvlinops, "sampled targets"),
    *several("NNGeometry KFAC", "nngeometry", nngeometry, "sampled targets, contiguous maps"),
    *several(
        "BackPACK KFAC",
        "backpack-for-pytorch",
        backpack,
        "sampled targets; average pooling with padding",
    ),
    *several(
        "SOAP (pytorch-optimizer)",
        "pytorch-optimizer",
        lambda period: pytorch_optimizer("SOAP", precondition_frequency=period),
    ),
    *several(
        "Shampoo (pytorch-optimizer)",
        "pytorch-optimizer",
        lambda period: pytorch_optimizer("Shampoo", preconditioning_compute_steps=period),
    ),
    *several(
        "SOAP (heavyball)",
        "heavyball",
        lambda period: heavyball("SOAP", precondition_frequency=period),
        "compilation off",
    ),
]

METHODS: Mapping[str, Method] = {m.name: m for m in [PLAIN, *OURS, DEFAULT, *PEERS]}
