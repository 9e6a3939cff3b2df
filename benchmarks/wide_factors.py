"""Compare cheap inverses of wide activation factors: accuracy against time, on real factors.

python benchmarks/wide_factors.py --network resnet18 --updates 60

The network is trained on CIFAR-10 with SGD. Then Ω and Γ of its wide layers are estimated from some
batches, and the natural gradient of another batch is computed with every inverse of Ω + s I, in
which s = π √γ is the damping. Columns:

- refresh, apply: milliseconds to compute the inverse from Ω, and to apply it to a gradient.
- memory: elements that are kept, relative to those of the Cholesky factor.
- error: ‖v - v*‖ / ‖v*‖, with v* the exact natural gradient in float64.
- efficiency: (∇ᵀv)² / (vᵀF̂v ∇ᵀv*) with the damped F̂: the decrease of the quadratic model along v,
  at the best length, relative to that along v*. 1 is exact.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from itertools import pairwise
from time import perf_counter
from typing import NamedTuple

import torch
import torch.nn.functional as F
from networks import NETWORKS
from torch import Tensor, nn

import kfc
from kfc.curvature.factor import add_to_diagonal
from kfc.curvature.kronecker import Factors, damping_shifts
from kfc.curvature.low_rank import NARROWEST
from kfc.lab.data import Batches, Inputs, load
from kfc.layers import MatrixLayer

DAMPING = 1e-3
REPEATS = 3
# Columns that subspace iteration carries besides the wanted ones.
OVERSAMPLING = 16


class Approximate(NamedTuple):
    """An approximate inverse of Ω + s I: applies it to rows (m, n); and the elements it keeps."""

    apply: Callable[[Tensor], Tensor]
    elements: int


class Layer(NamedTuple):
    """What is known of one layer: Ω (n, n), Γ (m, m), gradient (m, n), and |D|."""

    name: str
    omega: Tensor
    gamma: Tensor
    gradient: Tensor
    offsets: int

    @property
    def has_bias(self) -> bool:
        return len(self.omega) % self.offsets == 1 or self.offsets == 1

    def shifts(self) -> tuple[Tensor, Tensor]:
        return damping_shifts(Factors(self.omega[None], self.gamma[None]), DAMPING)


# Inverses of Ω + s I


def by_cholesky(layer: Layer, shift: float) -> Approximate:
    lower = torch.linalg.cholesky(_shifted(layer.omega, shift))
    return Approximate(lambda rows: torch.cholesky_solve(rows.mT, lower).mT, lower.numel())


def by_low_rank(share: float, passes: int = 2) -> Callable[[Layer, float], Approximate]:
    """Return the inverse by the top eigenpairs, and the mean eigenvalue in place of the others.

    Subspace iteration from random columns; a refresh in training would start from the last basis.
    """

    def invert(layer: Layer, shift: float) -> Approximate:
        omega, size = layer.omega, len(layer.omega)
        rank = max(1, round(share * size))
        generator = torch.Generator().manual_seed(0)
        columns = torch.randn(size, min(size, rank + OVERSAMPLING), generator=generator).to(omega)
        for _ in range(passes):
            columns = torch.linalg.qr(omega @ columns).Q
        values, vectors = torch.linalg.eigh(columns.mT @ omega @ columns)
        basis, top = columns @ vectors[:, -rank:], values[-rank:]
        rest = (omega.trace() - top.sum()).clamp_min(0) / max(1, size - rank)
        # U (Λ + s)⁻¹ Uᵀ + (I - U Uᵀ) / (rest + s)
        floor = 1 / (rest + shift)
        scales = 1 / (top + shift) - floor
        return Approximate(
            lambda rows: floor * rows + ((rows @ basis) * scales) @ basis.mT, basis.numel()
        )

    return invert


def by_blocks(size: int) -> Callable[[Layer, float], Approximate]:
    """Return the inverse of blocks of whole input maps; the bias is a block of its own."""

    def invert(layer: Layer, shift: float) -> Approximate:
        start, width = int(layer.has_bias), len(layer.omega) - layer.has_bias
        step = max(1, size // layer.offsets) * layer.offsets
        edges = [0, *range(start or step, start + width, step), start + width]
        spans = [slice(a, b) for a, b in pairwise(edges) if b > a]
        lowers = [torch.linalg.cholesky(_shifted(layer.omega[s, s], shift)) for s in spans]

        def apply(rows: Tensor) -> Tensor:
            parts = [
                torch.cholesky_solve(rows[:, s].mT, lower).mT
                for s, lower in zip(spans, lowers, strict=True)
            ]
            return torch.cat(parts, dim=1)

        return Approximate(apply, sum(lower.numel() for lower in lowers))

    return invert


def by_split(layer: Layer, shift: float) -> Approximate:
    """Return the inverse with Ω replaced by channels ⊗ offsets, from its partial traces."""
    start, offsets = int(layer.has_bias), layer.offsets
    inner = layer.omega[start:, start:].unflatten(0, (-1, offsets)).unflatten(2, (-1, offsets))
    channels = inner.diagonal(dim1=1, dim2=3).sum(-1)
    places = inner.diagonal(dim1=0, dim2=2).sum(-1) / channels.trace()
    (a, u), (b, w) = torch.linalg.eigh(channels), torch.linalg.eigh(places)
    scales = 1 / (a[:, None] * b[None, :] + shift)
    corner = 1 / (layer.omega[0, 0] + shift)

    def apply(rows: Tensor) -> Tensor:
        maps = rows[:, start:].unflatten(1, (-1, offsets))
        inside = u.mT @ maps @ w
        result = (u @ (inside * scales) @ w.mT).flatten(1)
        return torch.cat([rows[:, :1] * corner, result], dim=1) if start else result

    return Approximate(apply, u.numel() + w.numel() + scales.numel())


INVERSES: dict[str, Callable[[Layer, float], Approximate]] = {
    "Cholesky": by_cholesky,
    "rank n/16": by_low_rank(1 / 16),
    "rank n/8": by_low_rank(1 / 8),
    "rank n/4": by_low_rank(1 / 4),
    "rank n/8, one pass": by_low_rank(1 / 8, passes=1),
    "blocks of 256": by_blocks(256),
    "blocks of 512": by_blocks(512),
    "channels ⊗ offsets": by_split,
}


def _shifted(matrix: Tensor, shift: float) -> Tensor:
    return matrix + shift * torch.eye(len(matrix), dtype=matrix.dtype)


# Measurement


def measure(layer: Layer) -> Iterator[str]:
    """Yield a row of the table for every inverse."""
    omega_shift, gamma_shift = (float(shift) for shift in layer.shifts())
    wide = layer._replace(**{n: getattr(layer, n).double() for n in ("omega", "gamma", "gradient")})
    damped_omega = add_to_diagonal(wide.omega[None], torch.tensor([omega_shift]))[0]
    damped_gamma = add_to_diagonal(wide.gamma[None], torch.tensor([gamma_shift]))[0]
    half = torch.linalg.solve(damped_gamma, wide.gradient)
    exact = torch.linalg.solve(damped_omega, half.mT).mT
    best = (wide.gradient * exact).sum()
    full = len(layer.omega) ** 2
    for name, invert in INVERSES.items():
        rows = half.float()
        refresh, inverse = _timed(lambda invert=invert: invert(layer, omega_shift))
        apply, found = _timed(lambda inverse=inverse, rows=rows: inverse.apply(rows))
        v = found.double()
        error = float((v - exact).norm() / exact.norm())
        curvature = (v * (damped_gamma @ v @ damped_omega)).sum()
        efficiency = float((wide.gradient * v).sum() ** 2 / (curvature * best))
        cells = [f"{1000 * refresh:.1f}", f"{1000 * apply:.1f}", f"{inverse.elements / full:.3f}"]
        sizes = f"{len(layer.omega)} x {len(layer.gamma)}"
        yield f"| {layer.name} | {sizes} | {name} | {' | '.join(cells)} | " + (
            f"{error:.3f} | {efficiency:.3f} |"
        )


def _timed(call: Callable[[], Approximate | Tensor]) -> tuple[float, ...]:
    seconds = []
    for _ in range(REPEATS):
        start = perf_counter()
        result = call()
        seconds.append(perf_counter() - start)
    return statistics.median(seconds), result  # type: ignore[return-value]


def layers_of(model: nn.Module, batches: Iterator[tuple[Tensor, Tensor]]) -> Iterator[Layer]:
    """Yield the wide layers with factors of four batches and the gradient of a fifth."""
    optimizer = kfc.Preconditioner(model, damping=DAMPING, schedule=kfc.Periods(10**9, 10**9))
    some = [next(batches) for _ in range(4)]
    optimizer.estimate_factors(some, lambda output, batch: F.cross_entropy(output, batch[1]))
    images, labels = next(batches)
    model.zero_grad()
    F.cross_entropy(model(images), labels).backward()
    for name, geometry in optimizer.engine.plan.layers.items():
        if not isinstance(geometry, MatrixLayer) or geometry.factor_sizes()[0] < NARROWEST:
            continue
        gradients = {role: p.grad for role, p in geometry.trained().items() if p.grad is not None}
        omega, gamma = optimizer.factors[name]
        gradient = geometry.to_matrix(gradients)[0]
        yield Layer(name, omega.squeeze(0), gamma.squeeze(0), gradient, geometry.offsets)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--network", choices=NETWORKS, default="resnet18")
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--lr", type=float, default=0.05, help="the learning rate of SGD")
    options = parser.parse_args()
    torch.manual_seed(0)
    data = load("cifar10")
    stream = Batches(data.train, Inputs.normalised(data.train), options.batch, 0).epoch(0)
    model = NETWORKS[options.network].model(torch.device("cpu"))
    sgd = torch.optim.SGD(model.parameters(), options.lr, momentum=0.9)
    for update in range(options.updates):
        images, labels = next(stream)
        sgd.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        sgd.step()
        if update % 10 == 0:
            print(f"update {update}: loss {loss.item():.3f}", flush=True)
    print("| layer | n x m | inverse | refresh | apply | memory | error | efficiency |")
    print("|---" * 8 + "|")
    for layer in layers_of(model, stream):
        for row in measure(layer):
            print(row, flush=True)


if __name__ == "__main__":
    main()
