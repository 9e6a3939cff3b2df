"""Linear systems with the exact Fisher matrix of a batch, preconditioned by its approximation."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from kfc._helpers import inner_product, require_number, require_whole
from kfc.curvature.damping import Damping
from kfc.curvature.options import CurvatureChoice, Kronecker, resolve_curvature
from kfc.fisher.heads import LikelihoodChoice, Output
from kfc.fisher.products import by_name, vector_product
from kfc.optimizers.preconditioner import Preconditioner

Vector = TypeVar("Vector", Mapping[str, Tensor], Sequence[Tensor])
Vectors = dict[str, Tensor]


class FisherSolution(NamedTuple, Generic[Vector]):
    """What ``solve_fisher`` returns.

    Attributes:
        solution: x, in the structure of the vector.
        residuals: ‖v - (F + δI) x‖ / ‖v‖ before each iteration and after the last one.
        converged: whether the last of them is within the tolerance.
    """

    solution: Vector
    residuals: list[float]
    converged: bool


@torch.no_grad()
def solve_fisher(
    model: nn.Module,
    inputs: Any,
    vector: Vector,
    *,
    damping: float = 1e-3,
    likelihood: LikelihoodChoice = "categorical",
    output: Output | None = None,
    preconditioner: Preconditioner | CurvatureChoice | None = Kronecker(inverse="eigen"),  # noqa: B008 - immutable
    tolerance: float = 1e-3,
    max_iterations: int = 250,
    progress: Callable[[int, float], None] | None = None,
) -> FisherSolution[Vector]:
    """Solve (F + δI) x = v with the exact Fisher matrix F of a batch, by conjugate gradients.

    The approximate Fisher matrix of the batch is the preconditioner, as section 3.2 of the paper
    suggests. With v = ∇h, -x is the update of Hessian-free optimization. Parameters, gradients,
    buffers and the random state stay as they were.

    Examples:
        >>> gradient = {name: p.grad for name, p in model.named_parameters()}
        >>> update = kfc.solve_fisher(model, images, gradient, damping=1e-3).solution

    Args:
        model: any module, called as ``model(inputs)``, as ``model(*inputs)`` for a tuple and as
            ``model(**inputs)`` for a dict, in its current mode.
        inputs: one batch.
        vector: v, as in ``kfc.fisher.vector_product``.
        damping: δ > 0.
        likelihood: the distribution that the outputs parametrise; see ``kfc.Likelihood``.
        output: selects the outputs from what the model returns.
        preconditioner: the approximation that is estimated from the batch, by default KFC's with
            exact damping; or a ``kfc.Preconditioner`` of the model, with the statistics and
            inverses that it has; or ``None`` for none.
        tolerance: the iterations end when ‖v - (F + δI) x‖ ≤ tolerance · ‖v‖.
        max_iterations: the largest number of iterations; each takes one product with F.
        progress: called after each iteration with its number and the relative residual.
    """
    require_number("damping", damping, positive=True)
    require_number("tolerance", tolerance)
    require_whole("max_iterations", max_iterations)
    right = {name: tensor.detach() for name, tensor in by_name(model, vector).items()}

    def times(x: Vectors) -> Vectors:
        product = vector_product(model, inputs, x, likelihood=likelihood, output=output)
        return {name: product[name].add(x[name], alpha=damping) for name in x}

    with _approximation(model, inputs, preconditioner, damping, likelihood, output) as found:
        precondition = _inverse_of(found, model, times, right)
        x, residuals = conjugate_gradients(
            times, precondition, right, tolerance, max_iterations, progress
        )
    solution: Any = x if isinstance(vector, Mapping) else type(vector)(x.values())  # type: ignore[call-arg]
    return FisherSolution(solution, residuals, residuals[-1] <= tolerance)


@contextmanager
def _approximation(
    model: nn.Module,
    inputs: Any,
    choice: Preconditioner | CurvatureChoice | None,
    damping: float,
    likelihood: LikelihoodChoice,
    output: Output | None,
) -> Iterator[Preconditioner | None]:
    """Estimate the chosen approximation from the batch, unless it is a preconditioner already."""
    if choice is None or isinstance(choice, Preconditioner):
        yield choice
        return
    options = replace(resolve_curvature(choice), gather_in_eval=True)
    own = Preconditioner(
        model, damping=damping, likelihood=likelihood, output=output, curvature=options, seed=0
    )
    try:
        own.estimate_factors([(inputs,)])
        own.engine.refresh_inverses(lambda _: Damping.uniform(damping), at_once=True)
        yield own
    finally:
        own.close()


def _inverse_of(
    preconditioner: Preconditioner | None,
    model: nn.Module,
    times: Callable[[Vectors], Vectors],
    like: Vectors,
) -> Callable[[Vectors], Vectors]:
    """Return the function that multiplies by the damped inverse of an approximate Fisher matrix.

    The entries of parameters without curvature are divided by the mean of their diagonal of
    F + δI, which is estimated with one random vector of signs z as zᵀ(F + δI)z.
    """
    if preconditioner is None:
        return dict
    if preconditioner.model is not model:
        raise ValueError("the preconditioner belongs to another model")
    curvature = preconditioner.engine.curvature
    if curvature.is_empty() or curvature.lacks_inverses():
        raise ValueError(
            "the preconditioner has no inverses yet; take a step with it, or leave "
            "preconditioner out"
        )
    covered = preconditioner.engine.plan.layer_of
    plain = [name for name in like if name not in covered]
    scale = 1.0
    if plain:
        generator = torch.Generator().manual_seed(0)
        signs = {
            name: (2 * torch.randint(2, like[name].shape, generator=generator) - 1).to(like[name])
            for name in plain
        }
        zeros = {name: torch.zeros_like(like[name]) for name in like if name in covered}
        product = times({**zeros, **signs})
        scale = inner(signs, product) / sum(like[name].numel() for name in plain)

    def precondition(vector: Vectors) -> Vectors:
        result = dict(vector)
        curvature.solve_(result)
        return {name: result[name] / scale if name in plain else result[name] for name in vector}

    return precondition


def conjugate_gradients(
    times: Callable[[Vectors], Vectors],
    precondition: Callable[[Vectors], Vectors],
    right: Vectors,
    tolerance: float,
    max_iterations: int,
    progress: Callable[[int, float], None] | None = None,
) -> tuple[Vectors, list[float]]:
    """Return x with A x = b, and ‖b - A x‖ / ‖b‖ before each iteration and after the last one.

    Args:
        times: multiplies by A, which is symmetric and positive definite.
        precondition: multiplies by an approximation of A⁻¹ with the same properties.
        right: b.
        tolerance: the relative residual at which the iterations end.
    """
    x = {name: torch.zeros_like(b) for name, b in right.items()}
    norm = math.sqrt(inner(right, right))
    if norm == 0:
        return x, [0.0]
    residual, residuals = right, [1.0]
    preconditioned = precondition(residual)
    direction, decrease = preconditioned, inner(residual, preconditioned)
    for iteration in range(1, max_iterations + 1):
        product = times(direction)
        curvature = inner(direction, product)
        if not (math.isfinite(curvature) and curvature > 0):
            raise FloatingPointError(
                f"iteration {iteration} of conjugate gradients found dᵀ(F + δI)d = {curvature}, "
                "which should be positive; the inputs or parameters are not finite, or the "
                "precision does not suffice: use float64 or a larger damping"
            )
        length = decrease / curvature
        for name, entries in x.items():
            entries.add_(direction[name], alpha=length)
        # New tensors, because the direction may share the old ones
        residual = {name: r.sub(product[name], alpha=length) for name, r in residual.items()}
        residuals.append(math.sqrt(inner(residual, residual)) / norm)
        if progress is not None:
            progress(iteration, residuals[-1])
        if residuals[-1] <= tolerance:
            break
        preconditioned = precondition(residual)
        before, decrease = decrease, inner(residual, preconditioned)
        direction = {
            name: z.add(direction[name], alpha=decrease / before)
            for name, z in preconditioned.items()
        }
    return x, residuals


def inner(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> float:
    """Return the sum of products of all entries."""
    return math.fsum(inner_product(x, right[name]).item() for name, x in left.items())
