"""The optimizers that are compared, each used as its documentation says.

A method is built for a model and gives a function that trains on one batch. What a library leaves
to its user (curvature without an optimizer) is completed by inverses and SGD with momentum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from networks import paper_network
from torch import Tensor, nn

import kfc

Step = Callable[[Tensor, Tensor], None]

# Small, so that nobody's loss wanders off while it is timed.
LR = 1e-4
DAMPING = 1e-3
NEVER = 10**9
# At amortised settings, how many steps one preconditioner serves.
AMORTISED = 10


@dataclass(frozen=True)
class Method:
    """
    Attributes:
        package: the distribution it comes from.
        build: of a model, or of none if it brings its own.
        cycle: how many steps make one round of its settings.
        note: what is particular about how it was run.
    """

    name: str
    package: str
    build: Callable[[nn.Module], Step]
    cycle: int = 1
    note: str = ""


def usual(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """The loop that everybody writes."""

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
    """SGD with momentum on gradients times an inverse that is renewed every few steps."""
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
    """Muon takes matrices; the rest, here every convolution, goes to AdamW."""
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


def our_kfc(**options: object) -> Callable[[nn.Module], Step]:
    return lambda model: usual(model, kfc.KFC(model, lr=LR, **options))  # type: ignore[arg-type]


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

        # Its solves take views, which channels_last gradients do not allow.
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
            # It refuses such pooling; only the paper's networks have it.
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

        # As its documentation says for quick starts: tuning takes minutes in the first step.
        library.utils.compile_mode = None
        return usual(model, getattr(library, name)(model.parameters(), lr=LR, **options))

    return build


def several(
    label: str, package: str, build: Callable[[int], Callable[[nn.Module], Step]], note: str = ""
) -> list[Method]:
    """At every-step and at amortised settings."""
    return [
        Method(f"{label}, every step", package, build(1), note=note),
        Method(f"{label}, every {AMORTISED}", package, build(AMORTISED), AMORTISED, note),
    ]


PLAIN = Method("SGD", "torch", lambda m: usual(m, sgd(m)), note="momentum 0.9")

OURS = [
    Method(
        "KFC, every step, exact clip",
        "kfc-torch",
        our_kfc(statistics_period=1, inverse_period=1, clip_period=1),
    ),
    Method(
        "KFC, every step, no clip",
        "kfc-torch",
        our_kfc(statistics_period=1, inverse_period=1, fisher_clip=None),
    ),
    Method(
        f"KFC, every {AMORTISED}, no clip",
        "kfc-torch",
        our_kfc(statistics_period=AMORTISED, inverse_period=AMORTISED, fisher_clip=None),
        AMORTISED,
    ),
    Method(
        "KFC, nothing due",
        "kfc-torch",
        our_kfc(statistics_period=NEVER, inverse_period=NEVER, fisher_clip=None),
        note="natural gradient with old inverses",
    ),
]

DEFAULT = Method("KFC, default settings", "kfc-torch", our_kfc())

PEERS = [
    Method("Adam", "torch", lambda m: usual(m, adam(m))),
    Method("Muon", "torch", muon, note="AdamW for what is not a matrix: all convolutions"),
    *several("SINGD", "singd", singd, "dense structure, empirical Fisher"),
    *several("curvlinops KFAC", "curvlinops-for-pytorch", curvlinops, "sampled targets"),
    *several("NNGeometry KFAC", "nngeometry", nngeometry, "sampled targets, contiguous maps"),
    *several(
        "BackPACK KFAC",
        "backpack-for-pytorch",
        backpack,
        "sampled targets; average pooling with padding, for it refuses the other",
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
