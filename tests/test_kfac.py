"""Compare `KFAC` with dense references: conjugate gradient, quadratic model, adaptation."""

import copy
import gc
import math
import weakref
from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close

import kfc
from approximations import CURVATURES
from kfc.curvature.kronecker import Factors
from kfc.optimizers.quadratic import QuadraticModel
from reference import cross_entropy, exact_fisher, flat_parameters, squared_error

pytestmark = pytest.mark.usefixtures("double")

NEVER = 10**9
EXACT = kfc.Kronecker(fisher="exact")


def make(
    model: nn.Module, *, weight_decay=0.0, curvature="kfc", schedule=None, clip=None, **options
):
    """Return an optimizer; other options are those of ``kfc.Adaptation``."""
    return kfc.KFAC(
        model,
        weight_decay=weight_decay,
        curvature=curvature,
        schedule=schedule or kfc.Periods(1, kfc.Stretch(20)),
        clip=clip,
        adaptation=kfc.Adaptation(**options),
    )


def linear_problem() -> tuple[nn.Module, Tensor, Tensor]:
    """Return a model that is linear in its parameters, so that its squared error is quadratic."""
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.AvgPool2d(2), nn.Flatten())
    inputs = torch.randn(12, 2, 4, 4)
    return model, inputs, torch.randn(12, 12)


def small_problem() -> tuple[nn.Module, Tensor, Tensor]:
    model = nn.Sequential(
        nn.Conv2d(1, 2, 2, padding=1), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(18, 3)
    )
    return model, torch.randn(20, 1, 5, 5), torch.randint(3, (20,))


def closure_of(model: nn.Module, inputs: Tensor, labels: Tensor) -> Callable[[], Tensor]:
    return lambda: F.cross_entropy(model(inputs), labels)


def flat_gradient(model: nn.Module, loss: Tensor) -> Tensor:
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([g.flatten() for g in gradients])


def damped_block(factors: Factors, gamma: float, kind: str) -> Tensor:
    """Return the dense block in the coordinates of vec(bias, weight), columns stacked."""
    omega, derivative = factors
    eye_a, eye_d = torch.eye(len(omega)), torch.eye(len(derivative))
    if kind == "eigen":
        return torch.kron(omega, derivative) + gamma**2 * torch.kron(eye_a, eye_d)
    pi = ((omega.trace() / len(omega)) / (derivative.trace() / len(derivative))).sqrt()
    return torch.kron(omega + pi * gamma * eye_a, derivative + gamma / pi * eye_d)


def dense_direction(
    model: nn.Module,
    factors: Mapping[str, Factors],
    gradient: Tensor,
    gamma: float,
    kind: str = "factored",
) -> Tensor:
    """Return minus the natural gradient of all layers, in the order of the parameters."""
    parts, rest = [], gradient
    for name, module in model.named_modules():
        if name not in factors:
            continue
        shape, outputs = module.weight.shape, module.bias.numel()
        weight, bias, rest = rest.split(
            [shape.numel(), outputs, len(rest) - shape.numel() - outputs]
        )
        matrix = torch.cat([bias[:, None], weight.reshape(outputs, -1)], dim=1)
        block = damped_block(factors[name], gamma, kind)
        solved = torch.linalg.solve(block, matrix.mT.flatten()).reshape(matrix.mT.shape).mT
        parts += [solved[:, 1:].flatten(), solved[:, 0]]
    return -torch.cat(parts)


def preconditioned_conjugate_gradient(
    matrix: Tensor, right: Tensor, start: Tensor, solve: Callable[[Tensor], Tensor], steps: int
) -> list[Tensor]:
    """Return the iterates for matrix x = right, as in textbooks."""
    x, residual = start.clone(), right - matrix @ start
    z = solve(residual)
    direction, iterates = z.clone(), []
    for _ in range(steps):
        product = matrix @ direction
        alpha = (residual @ z) / (direction @ product)
        x = x + alpha * direction
        new = residual - alpha * product
        new_z = solve(new)
        direction = new_z + (new @ new_z) / (residual @ z) * direction
        residual, z = new, new_z
        iterates.append(x)
    return iterates


# The claim of appendix A.2


@pytest.mark.parametrize("kind", ["factored", "eigen"])
def test_on_a_quadratic_it_is_preconditioned_conjugate_gradient(kind):
    model, inputs, targets = linear_problem()
    decay, gamma = 0.03, 0.2
    optimizer = kfc.KFAC(
        model,
        weight_decay=decay,
        adaptation=kfc.Adaptation(
            model_damping=0.0,
            factor_damping=gamma,
            max_lr=None,
            max_momentum=None,
            model_damping_period=1,
        ),
        likelihood="gaussian",
        curvature=kfc.Kronecker(fisher="exact", inverse=kind),
        schedule=kfc.Periods(NEVER, NEVER),
    )
    start = flat_parameters(model)
    # The conv is first in the model; its own factors do for dense_direction's order of parameters.
    matrix = exact_fisher(model, inputs, squared_error) + decay * torch.eye(len(start))
    loss = F.mse_loss(model(inputs), targets)
    right = matrix @ start - (flat_gradient(model, loss) + decay * start)
    iterates = []
    for _ in range(8):
        optimizer.step(lambda: F.mse_loss(model(inputs), targets))
        assert optimizer.diagnostics["reduction_ratio"] == pytest.approx(1, abs=1e-6)
        iterates.append(flat_parameters(model))
    expected = preconditioned_conjugate_gradient(
        matrix,
        right,
        start,
        lambda residual: -dense_direction(model, optimizer.factors, residual, gamma, kind),
        steps=8,
    )
    for found, wanted in zip(iterates, expected, strict=True):
        assert_close(found, wanted, rtol=1e-7, atol=1e-9)


# One step


@pytest.mark.parametrize("kind", ["factored", "eigen"])
@pytest.mark.parametrize(("lr", "momentum"), [(None, None), (0.3, None), (None, 0.5), (0.3, 0.5)])
def test_coefficients_and_predictions_against_a_dense_model(kind, lr, momentum):
    model, inputs, labels = small_problem()
    decay = 0.02
    unbounded = {"max_lr": None} if lr is None else {}
    unbounded |= {"max_momentum": None} if momentum is None else {}
    optimizer = kfc.KFAC(
        model,
        weight_decay=decay,
        adaptation=kfc.Adaptation(
            **unbounded,
            lr=lr,
            momentum=momentum,
            initial_model_damping=0.5,
            model_damping_period=1,
            factor_damping_period=NEVER,
        ),
        curvature=kfc.Kronecker(fisher="exact", inverse=kind),
        schedule=kfc.Periods(1, 1),
    )
    closure = closure_of(model, inputs, labels)
    previous, gamma = None, math.sqrt(0.5 + decay)
    for _ in range(4):
        before = flat_parameters(model)
        objective = closure() + 0.5 * decay * sum(p.square().sum() for p in model.parameters())
        gradient = flat_gradient(model, objective)
        curvature = exact_fisher(model, inputs, cross_entropy()) + decay * torch.eye(len(before))
        optimizer.step(closure)
        after, told = flat_parameters(model), optimizer.step_diagnostics
        direction = dense_direction(model, optimizer.factors, gradient, gamma, kind)
        vectors = torch.stack([direction] if previous is None else [direction, previous])
        damped = curvature + told["model_damping"] * torch.eye(len(before))
        coefficients = _dense_minimiser(vectors, damped, gradient, lr, momentum)
        found = [told["lr"], told["momentum"]][: len(vectors)]
        assert_close(torch.tensor(found), coefficients, rtol=1e-8, atol=1e-10)
        update = coefficients @ vectors
        assert_close(after - before, update, rtol=1e-8, atol=1e-10)
        predicted = gradient @ update + 0.5 * update @ curvature @ update
        assert told["model_change"] == pytest.approx(predicted.item(), rel=1e-8)
        new = closure() + 0.5 * decay * sum(p.square().sum() for p in model.parameters())
        change = (new - objective).item()
        assert told["objective_change"] == pytest.approx(change, rel=1e-8)
        assert told["reduction_ratio"] == pytest.approx(change / predicted.item(), rel=1e-8)
        previous = after - before


def _dense_minimiser(vectors, damped, gradient, lr, momentum):
    matrix, slopes = vectors @ damped @ vectors.T, vectors @ gradient
    given = [lr, momentum][: len(vectors)]
    c = torch.tensor([0.0 if value is None else value for value in given])
    free = [i for i, value in enumerate(given) if value is None]
    if free:
        right = -(slopes + matrix @ c)[free]
        c[free] = torch.linalg.solve(matrix[free][:, free], right)
    return c


def test_with_everything_fixed_it_is_kfc():
    model, inputs, labels = small_problem()
    twin = copy.deepcopy(model)
    options = {"weight_decay": 0.01, "seed": 3, "averaging_timescale": 4.0}
    options["schedule"] = kfc.Periods(2, 3)
    fixed = kfc.Adaptation(
        lr=0.3, momentum=0.8, model_damping=0.0, factor_damping=math.sqrt(0.06), loss_bound=None
    )
    adaptive = kfc.KFAC(model, adaptation=fixed, clip=0.002, **options)
    clip = kfc.FisherClip(0.002, fraction=1, period=1, loss_bound=None)
    plain = kfc.KFC(twin, 0.3, momentum=0.8, damping=0.05, clip=clip, **options)
    for _ in range(6):
        adaptive.step(closure_of(model, inputs, labels))
        plain.zero_grad()
        closure_of(twin, inputs, labels)().backward()
        plain.step()
        assert_close(flat_parameters(model), flat_parameters(twin), rtol=1e-9, atol=1e-12)
    assert plain.diagnostics["clip_factor"] < 1
    with adaptive.averaged_parameters(), plain.averaged_parameters():
        assert_close(flat_parameters(model), flat_parameters(twin), rtol=1e-9, atol=1e-12)


def test_without_clip_and_adaptation_nothing_is_measured():
    model, inputs, labels = small_problem()
    optimizer = make(model, lr=0.1, momentum=0.5, model_damping=0.1, factor_damping=0.3)
    optimizer.step(closure_of(model, inputs, labels))
    assert optimizer.step_diagnostics["model_change"] is None
    assert optimizer.step_diagnostics["reduction_ratio"] is None


def test_clipping_bounds_the_rate_and_momentum_is_chosen_for_it():
    model, inputs, labels = small_problem()
    limit = 1e-3
    optimizer = make(model, initial_model_damping=0.1, clip=limit)
    clipped = 0
    for _ in range(6):
        optimizer.step(closure_of(model, inputs, labels))
        norm = optimizer.step_diagnostics["fisher_norm"]
        assert norm <= limit * (1 + 1e-9)
        clipped += norm == pytest.approx(limit)
    assert clipped >= 2


def test_micro_batches_are_one_batch():
    model, inputs, labels = small_problem()
    twin = copy.deepcopy(model)
    options = {"initial_model_damping": 0.5, "model_damping_period": 1, "curvature": EXACT}
    whole, split = make(model, **options), make(twin, **options)
    parts = ((0, 8), (8, 20))

    def in_parts() -> Tensor:
        losses = [F.cross_entropy(twin(inputs[a:b]), labels[a:b]) * (b - a) / 20 for a, b in parts]
        return sum(losses)

    for _ in range(4):
        whole.step(closure_of(model, inputs, labels))
        split.step(in_parts)
        assert_close(flat_parameters(twin), flat_parameters(model), rtol=1e-9, atol=1e-12)
    assert split.step_diagnostics == pytest.approx(whole.step_diagnostics, rel=1e-7)


def test_parameters_with_the_plain_gradient_get_a_rate_of_their_own():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.full((6,), 10.0))
            self.layer = nn.Linear(6, 3)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.layer(inputs * self.scale)

    model = Scaled()
    inputs, labels = torch.randn(30, 6), torch.randint(3, (30,))
    optimizer = make(model, initial_model_damping=1.0, curvature=EXACT)
    losses = [optimizer.step(closure_of(model, inputs, labels)).item() for _ in range(40)]
    assert losses[-1] < 0.5 * losses[0]
    assert not torch.equal(model.scale, torch.full((6,), 10.0))


# The same batch, again


def test_evaluating_again_sees_the_same_masks_and_leaves_no_trace():
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.Dropout(),
        nn.Flatten(),
        nn.LazyLinear(3),
    )
    inputs, labels = torch.randn(20, 1, 5, 5), torch.randint(3, (20,))
    model(inputs)
    twin = copy.deepcopy(model)
    optimizer = make(model, initial_model_damping=0.1, model_damping_period=1, weight_decay=0.1)
    optimizer.step(closure_of(model, inputs, labels))
    twin.load_state_dict(model.state_dict())
    state = torch.get_rng_state()
    optimizer.step(closure_of(model, inputs, labels))
    told, after = optimizer.step_diagnostics, torch.get_rng_state()

    def objective(parameters: nn.Module) -> float:
        torch.set_rng_state(state)
        loss = F.cross_entropy(twin(inputs), labels)
        return (loss + 0.05 * sum(p.square().sum() for p in parameters.parameters())).item()

    first = objective(twin)
    assert torch.equal(torch.get_rng_state(), after)
    for name, buffer in twin.named_buffers():
        assert torch.equal(buffer, dict(model.named_buffers())[name]), name
    twin.load_state_dict(model.state_dict())
    assert told["objective_change"] == pytest.approx(objective(model) - first, rel=1e-9)


def test_the_model_sees_the_masks_of_the_closures_forward():
    """The exact Fisher of the thinned network, with the mask drawn after other random numbers."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(), nn.Linear(8, 3))
    inputs, labels = torch.randn(20, 6), torch.randint(3, (20,))
    optimizer = make(model, initial_model_damping=0.1, curvature=EXACT)

    def closure() -> Tensor:
        noise = 0.1 * torch.randn(20, 6)
        return F.cross_entropy(model(inputs + noise), labels)

    state, before = torch.get_rng_state(), copy.deepcopy(model)
    start = flat_parameters(model)
    optimizer.step(closure)
    torch.set_rng_state(state)
    noisy = inputs + 0.1 * torch.randn(20, 6)
    mask = F.dropout(torch.ones(20, 8))

    class Thinned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = before[0], before[3]

        def forward(self, values: Tensor) -> Tensor:
            return self.second(torch.tanh(self.first(values)) * mask)

    thinned = Thinned()
    gradient = flat_gradient(thinned, F.cross_entropy(thinned(noisy), labels))
    update = flat_parameters(model) - start
    fisher = exact_fisher(thinned, noisy, cross_entropy())
    predicted = gradient @ update + 0.5 * update @ fisher @ update
    assert optimizer.step_diagnostics["model_change"] == pytest.approx(predicted.item(), rel=1e-7)


# Adaptation


@pytest.mark.parametrize(("part", "power"), [(1.0, 1), (0.5, 0), (0.1, -1), (-1.0, -1)])
def test_model_damping_follows_the_reduction_ratio(part, power):
    """The objective changes by a part of what the model predicts."""
    model, inputs, targets = linear_problem()
    optimizer = kfc.KFAC(
        model,
        likelihood="gaussian",
        adaptation=kfc.Adaptation(initial_model_damping=2.0, model_damping_period=3),
        curvature=EXACT,
    )
    seen = []

    def closure() -> Tensor:
        loss = F.mse_loss(model(inputs), targets)
        if torch.is_grad_enabled():
            seen.append(loss.detach())
            return loss
        return seen[-1] + (part if len(seen) > 1 else 1.0) * (loss - seen[-1])

    for step in range(1, 7):
        optimizer.step(closure)
        told = optimizer.step_diagnostics
        if step in (3, 6):
            assert told["reduction_ratio"] == pytest.approx(part, abs=1e-6)
        elif step > 1:
            assert told["reduction_ratio"] is None
        expected = 2.0 * (19 / 20) ** (5 * power * (step // 3))
        assert optimizer.model_damping.value == pytest.approx(expected)


@pytest.mark.parametrize(("part", "bound"), [(1.0, 1e-10), (-1.0, 1e10)])
def test_model_damping_is_bounded(part, bound):
    model, _, _ = linear_problem()
    damping = make(model, initial_model_damping=bound).model_damping
    for _ in range(3):
        damping.adapt(part)
    assert damping.value == bound
    damping.adapt(-part)
    assert damping.value != bound


def test_model_damping_recovers_from_a_value_that_is_too_large():
    """In float32, rounding hides the effect of a tiny update on the loss."""
    torch.set_default_dtype(torch.float32)
    model, inputs, labels = small_problem()
    optimizer = make(model, initial_model_damping=1e8, model_damping_period=1)
    for _ in range(20):
        optimizer.step(closure_of(model, inputs, labels))
    assert optimizer.model_damping.value < 1e6


@pytest.mark.parametrize("kind", ["factored", "eigen"])
@pytest.mark.parametrize("start", [math.sqrt(0.05), 0.3, 30.0])
def test_factor_damping_is_the_best_of_three(kind, start):
    model, inputs, labels = small_problem()
    curvature = kfc.Kronecker(fisher="exact", inverse=kind)
    optimizer = make(
        model, initial_model_damping=0.05, factor_damping_period=3, curvature=curvature
    )
    optimizer.factor_damping.choose(start)
    closure = closure_of(model, inputs, labels)
    for _ in range(2):
        optimizer.step(closure)
    assert optimizer.factor_damping.value == start
    weights, state = copy.deepcopy(model.state_dict()), optimizer.state_dict()
    outcomes = {}
    lower = max(start * (19 / 20) ** 10, math.sqrt(0.05))
    for candidate in (start, lower, start / (19 / 20) ** 10):
        twin, _, _ = small_problem()
        twin.load_state_dict(weights)
        # As if γ had been the candidate, and inverses were due.
        other = make(
            twin, factor_damping=candidate, curvature=curvature, schedule=kfc.Periods(1, 1)
        )
        other.load_state_dict(state)
        before = flat_parameters(twin)
        gradient = flat_gradient(twin, closure_of(twin, inputs, labels)())
        fisher = exact_fisher(twin, inputs, cross_entropy()) + 0.05 * torch.eye(len(before))
        other.step(closure_of(twin, inputs, labels))
        update = flat_parameters(twin) - before
        value = gradient @ update + 0.5 * update @ fisher @ update
        outcomes[value.item()] = candidate, flat_parameters(twin)
    best, parameters = outcomes[min(outcomes)]
    optimizer.step(closure)
    assert optimizer.factor_damping.value == pytest.approx(best)
    assert_close(flat_parameters(model), parameters, rtol=1e-8, atol=1e-10)
    # The inverses in use are those with the chosen damping.
    dampings = [layer["damping"] for layer in optimizer.diagnostics["layers"].values()]
    assert dampings == pytest.approx([best**2] * 2)


def test_factor_damping_begins_at_the_root_of_all_other_damping():
    model, _, _ = small_problem()
    both = make(model, weight_decay=0.09, initial_model_damping=0.16)
    assert both.factor_damping.value == pytest.approx(0.5)
    groups = [{"prefix": "*.weight", "weight_decay": 0.09}]
    adaptation = kfc.Adaptation(initial_model_damping=0.16)
    grouped = kfc.KFAC(model, groups=groups, adaptation=adaptation)
    assert grouped.factor_damping.value == pytest.approx(0.5)
    fixed = make(model, weight_decay=0.09, model_damping=0.4)
    assert fixed.factor_damping.value == pytest.approx(0.7)
    assert make(model, model_damping=0.0).factor_damping.value > 0


# The quadratic model


def model_of(vectors: Tensor, matrix: Tensor, gradient: Tensor) -> QuadraticModel:
    products = vectors @ matrix @ vectors.T
    return QuadraticModel(vectors @ gradient, products, vectors @ vectors.T, 2.2e-16)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6), damping=st.floats(0, 10))
def test_the_minimiser_is_that_of_the_dense_system(seed, damping):
    generator = torch.Generator().manual_seed(seed)
    root, vectors, gradient = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((6, 6), (2, 6), (6,))
    )
    matrix = root @ root.T
    model = model_of(vectors, matrix, gradient)
    eye = torch.eye(6, dtype=torch.float64)
    system = vectors @ (matrix + damping * eye) @ vectors.T
    wanted = torch.linalg.solve(system, -vectors @ gradient)
    found = model.minimiser(damping)
    assert_close(torch.tensor(found, dtype=torch.float64), wanted, rtol=1e-6, atol=1e-9)
    update = wanted @ vectors
    change = gradient @ update + 0.5 * update @ (matrix + damping * eye) @ update
    assert model.change(found, damping) == pytest.approx(change.item(), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("factor", [0.0, 1.0, -3.0, 1 + 1e-15, 1e8, 1e-8])
def test_vanishing_and_parallel_directions_change_nothing(factor):
    matrix, direction, gradient = torch.diag(torch.tensor([1.0, 4.0])), torch.ones(2), torch.ones(2)
    alone = model_of(direction[None], matrix, gradient).minimiser(0.1)
    vectors = torch.stack([direction, factor * direction])
    both = model_of(vectors, matrix, gradient).minimiser(0.1)
    assert_close(torch.tensor(both) @ vectors, alone[0] * direction)


def test_a_direction_without_curvature_is_not_followed():
    vectors, matrix = torch.eye(2), torch.diag(torch.tensor([2.0, 0.0]))
    found = model_of(vectors, matrix, torch.ones(2)).minimiser(0.0)
    assert found == pytest.approx([-0.5, 0.0])


# Losses that are not finite


def barrier_problem() -> tuple[nn.Module, Callable[[], Tensor]]:
    """Return a loss that is steep, and not a number beyond a short distance."""
    model = nn.Linear(3, 1)
    inputs = torch.randn(10, 3)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)

    def closure() -> Tensor:
        return (model(inputs) - 30).square().mean() + (0.01 - model.weight.square().sum()).log()

    return model, closure


def test_a_step_to_nan_is_repeated_with_more_damping():
    model, closure = barrier_problem()
    optimizer = kfc.KFAC(
        model,
        likelihood="gaussian",
        adaptation=kfc.Adaptation(initial_model_damping=1e-3, model_damping_period=1),
    )
    optimizer.step(closure)
    assert math.isfinite(closure().item())
    assert optimizer.model_damping.value > 1e-3
    assert flat_parameters(model).abs().max() > 0


def test_nan_found_at_the_next_step_undoes_the_last_update():
    model, inputs, labels = small_problem()
    optimizer = make(model, initial_model_damping=1.0, model_damping_period=NEVER)
    plain = closure_of(model, inputs, labels)
    optimizer.step(plain)
    good = flat_parameters(model)
    optimizer.step(plain)
    bad = flat_parameters(model)
    optimizer.step(lambda: plain() * (math.nan if torch.equal(flat_parameters(model), bad) else 1))
    assert optimizer.model_damping.value == pytest.approx(10.0)
    assert 0 < (flat_parameters(model) - good).norm() < (bad - good).norm()
    optimizer.step(plain)


@pytest.mark.parametrize("initial", [1e-8, 1e-4])
def test_the_first_update_does_not_raise_the_objective(initial):
    """Saturated outputs have little curvature, so that a small initial damping fails."""
    model = nn.Linear(4, 3)
    with torch.no_grad():
        model.weight.mul_(30)
    inputs, labels = torch.randn(50, 4), torch.randint(3, (50,))
    closure = closure_of(model, inputs, labels)
    bold = make(copy.deepcopy(model), model_damping=initial)
    bold.step(closure_of(bold.model, inputs, labels))
    before = closure().item()
    assert closure_of(bold.model, inputs, labels)().item() > before
    optimizer = make(model, initial_model_damping=initial)
    optimizer.step(closure)
    assert closure().item() < before
    assert optimizer.model_damping.value > initial


@pytest.mark.parametrize("when", ["at once", "after the update", "after going back"])
def test_a_failed_step_leaves_the_parameters_as_they_were(when):
    """The third step, which also chooses γ, fails."""
    model, inputs, labels = small_problem()
    model.insert(3, nn.Dropout(0.1))
    optimizer = make(
        model, initial_model_damping=1.0, model_damping_period=1, factor_damping_period=3
    )
    plain = closure_of(model, inputs, labels)
    optimizer.step(plain)
    optimizer.step(plain)
    before, state = flat_parameters(model), copy.deepcopy(optimizer.state_dict())

    def closure() -> Tensor:
        here = torch.equal(flat_parameters(model), before)
        bad = {
            "at once": torch.is_grad_enabled(),
            "after the update": not torch.is_grad_enabled(),
            "after going back": here or not torch.is_grad_enabled(),
        }
        return plain() * (math.nan if bad[when] else 1.0)

    random_state = torch.get_rng_state()
    with pytest.raises(FloatingPointError, match="The parameters are as they were"):
        optimizer.step(closure)
    assert torch.equal(flat_parameters(model), before)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert optimizer.state_dict()["dampings"] == state["dampings"]
    for key, values in state["state"].items():
        for name, value in values.items():
            assert torch.equal(value, optimizer.state_dict()["state"][key][name]), name
    optimizer.step(plain)
    assert closure_of(model, inputs, labels)().item() < 2


def test_with_fixed_lr_and_momentum_nan_is_an_error_at_once():
    model, inputs, labels = small_problem()
    optimizer = make(model, lr=0.1, momentum=0.9)
    evaluations = []

    def closure() -> Tensor:
        evaluations.append(0)
        return closure_of(model, inputs, labels)() * math.nan

    with pytest.raises(FloatingPointError, match="lr, momentum or model_damping is fixed"):
        optimizer.step(closure)
    assert len(evaluations) == 1


def test_an_error_in_the_second_evaluation_leaves_everything_as_it_was():
    model, inputs, labels = small_problem()
    optimizer = make(model, model_damping_period=1)
    before = flat_parameters(model)

    def closure() -> Tensor:
        if not torch.is_grad_enabled():
            raise ArithmeticError("checked by the user")
        return closure_of(model, inputs, labels)()

    with pytest.raises(ArithmeticError, match="checked by the user"):
        optimizer.step(closure)
    assert torch.equal(flat_parameters(model), before)
    assert optimizer.diagnostics["step"] == 0
    optimizer.step(closure_of(model, inputs, labels))


@pytest.mark.parametrize("unfrozen", [True, False])
@pytest.mark.parametrize("inverse_period", [1, 10])
@pytest.mark.parametrize("curvature", CURVATURES)
def test_training_continues_after_an_error_just_after_unfreezing_or_freezing(
    curvature, inverse_period, unfrozen
):
    model, inputs, labels = small_problem()
    bias = next(p for n, p in model.named_parameters() if n.endswith("bias"))
    bias.requires_grad_(not unfrozen)
    optimizer = kfc.KFAC(
        model,
        curvature=curvature,
        schedule=kfc.Periods(1, inverse_period),
        adaptation=kfc.Adaptation(model_damping_period=1),
        seed=0,
    )
    for _ in range(3):
        optimizer.step(closure_of(model, inputs, labels))
    bias.requires_grad_(unfrozen)

    def failing() -> Tensor:
        if not torch.is_grad_enabled():
            raise ArithmeticError("while the update is measured")
        return closure_of(model, inputs, labels)()

    before = flat_parameters(model)
    with pytest.raises(ArithmeticError):
        optimizer.step(failing)
    assert torch.equal(flat_parameters(model), before)
    start = bias.detach().clone()
    losses = [optimizer.step(closure_of(model, inputs, labels)).item() for _ in range(3)]
    assert losses[-1] < losses[0]
    assert torch.equal(start, bias) != unfrozen


@pytest.mark.parametrize(("scale", "skipped"), [(1e8, 0), (1e13, 1)])
@pytest.mark.filterwarnings("ignore:step 3 was skipped")
def test_a_step_with_curvature_beyond_floating_point_is_skipped(scale, skipped):
    """In float32 the gradient is finite, but its square may not be."""
    torch.set_default_dtype(torch.float32)
    model = nn.Linear(4, 1)
    inputs, targets = torch.randn(20, 4), torch.randn(20, 1)
    optimizer = kfc.KFAC(
        model,
        likelihood="gaussian",
        schedule=kfc.Periods(10, kfc.Stretch(20)),
        averaging_timescale=5,
    )
    for step in range(1, 6):
        rows = torch.cat([inputs[:1] * (scale if step == 3 else 1.0), inputs[1:]])
        optimizer.step(lambda rows=rows: F.mse_loss(model(rows), targets))
    assert optimizer.diagnostics["skipped_steps"] == skipped
    with optimizer.averaged_parameters():
        assert torch.isfinite(flat_parameters(model)).all()
    assert torch.isfinite(flat_parameters(model)).all()


def test_a_fixed_rate_that_is_too_large_does_not_raise_the_damping():
    model, inputs, labels = small_problem()
    evaluations = []

    def closure() -> Tensor:
        evaluations.append(0)
        return closure_of(model, inputs, labels)()

    optimizer = make(model, lr=50.0)
    loss = optimizer.step(closure).item()
    assert closure_of(model, inputs, labels)().item() > loss
    assert len(evaluations) == 2
    assert optimizer.model_damping.value <= 0.1


def test_undoing_an_update_leaves_unused_parameters_alone():
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.heads = nn.Linear(5, 4), nn.ModuleList([nn.Linear(4, 3)] * 1)
            self.heads.append(nn.Linear(4, 3))

        def forward(self, inputs: Tensor, head: int) -> Tensor:
            return self.heads[head](torch.tanh(self.body(inputs)))

    model = TwoHeads()
    inputs, labels = torch.randn(20, 5), torch.randint(3, (20,))
    optimizer = make(model, initial_model_damping=1.0, model_damping_period=NEVER)

    def closure(head: int) -> Tensor:
        return F.cross_entropy(model(inputs, head), labels)

    for head in (0, 0, 1, 1):
        optimizer.step(lambda head=head: closure(head))
    resting = model.heads[0].weight.detach().clone()
    bad = flat_parameters(model)
    optimizer.step(
        lambda: closure(1) * (math.nan if torch.equal(flat_parameters(model), bad) else 1.0)
    )
    assert torch.equal(model.heads[0].weight, resting)
    optimizer.step(lambda: closure(0))


def test_the_update_is_measured_inside_autocast():
    torch.set_default_dtype(torch.float32)
    model, inputs, labels = small_problem()
    optimizer = make(model, initial_model_damping=0.1, model_damping_period=1)
    for _ in range(10):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = optimizer.step(closure_of(model, inputs, labels))
        assert optimizer.step_diagnostics["objective_change"] != 0
    assert loss.item() < 0.9


def test_batches_of_other_loops_are_released():
    model, inputs, labels = small_problem()
    optimizer = kfc.KFAC(model, likelihood="categorical")
    held = []

    def batch() -> Tensor:
        copied = inputs.clone()
        held.append(weakref.ref(copied))
        return copied

    def count() -> int:
        gc.collect()
        return sum(reference() is not None for reference in held)

    for _ in range(3):
        closure_of(model, batch(), labels)()
    optimizer.estimate_factors(batch() for _ in range(3))
    assert count() <= 1
    optimizer.step(closure_of(model, batch(), labels))
    assert count() == 0


# Use


@pytest.mark.parametrize("fisher", ["sampled", "exact", "empirical"])
def test_it_trains_without_a_learning_rate(fisher):
    model, inputs, labels = small_problem()
    optimizer = kfc.KFAC(model, curvature=kfc.Kronecker(fisher=fisher))
    losses = [optimizer.step(closure_of(model, inputs, labels)).item() for _ in range(50)]
    assert losses[-1] < 1e-2 < losses[0]


@pytest.mark.parametrize("kind", ["factored", "eigen"])
def test_a_resumed_run_continues_bit_for_bit(kind):
    model, inputs, labels = small_problem()
    model.insert(3, nn.Dropout(0.2))
    adaptation = kfc.Adaptation(
        initial_model_damping=1.0, model_damping_period=2, factor_damping_period=3
    )
    options = {"adaptation": adaptation, "averaging_timescale": 3.0}
    options["curvature"] = kfc.Kronecker(inverse=kind)
    optimizer = kfc.KFAC(model, **options)
    for _ in range(7):
        optimizer.step(closure_of(model, inputs, labels))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), torch.get_rng_state()))
    told = []
    for _ in range(7):
        optimizer.step(closure_of(model, inputs, labels))
        told.append(optimizer.step_diagnostics)
    twin = copy.deepcopy(model)
    again = kfc.KFAC(twin, **options)
    twin.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    torch.set_rng_state(saved[2])
    for wanted in told:
        again.step(closure_of(twin, inputs, labels))
        assert again.step_diagnostics == wanted
    assert torch.equal(flat_parameters(twin), flat_parameters(model))


def test_a_scheduler_changes_a_fixed_rate():
    model, inputs, labels = small_problem()
    groups = [{"prefix": "4", "weight_decay": 0.1}]
    optimizer = kfc.KFAC(model, adaptation=kfc.Adaptation(lr=0.2), groups=groups)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    optimizer.step(closure_of(model, inputs, labels))
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.1]
    assert optimizer.step_diagnostics["lr"] == pytest.approx(0.2)
    twin = copy.deepcopy(model)
    other = kfc.KFAC(twin, adaptation=kfc.Adaptation(lr=0.1), groups=groups)
    other.load_state_dict(optimizer.state_dict())
    optimizer.step(closure_of(model, inputs, labels))
    other.step(closure_of(twin, inputs, labels))
    assert torch.equal(flat_parameters(twin), flat_parameters(model))
    assert other.step_diagnostics["lr"] == pytest.approx(0.1)
    adaptive = kfc.KFAC(copy.deepcopy(model), groups=groups)
    adaptive.load_state_dict(optimizer.state_dict())
    assert all("lr" not in group for group in adaptive.param_groups)
    other.load_state_dict(adaptive.state_dict())
    assert other.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model_damping": -1.0}, "model_damping must be"),
        ({"factor_damping": math.nan}, "factor_damping must be"),
        ({"lr": -1.0}, "lr must be"),
        ({"momentum": 1.0}, "momentum must be"),
        ({"initial_model_damping": 0.0}, "initial_model_damping must be"),
        ({"model_damping_decrease": 1.0}, "model_damping_decrease must be"),
        ({"factor_damping_factor": 0.0}, "factor_damping_factor must be"),
        ({"model_damping_period": 0}, "model_damping_period must be"),
        ({"factor_damping_period": 2.5}, "factor_damping_period must be"),
        (
            {"model_damping": 0.1, "initial_model_damping": 0.2},
            "initial_model_damping has no effect with a fixed model_damping",
        ),
        (
            {"lr": 0.1, "momentum": 0.9, "model_damping": 0.1, "model_damping_period": 2},
            "model_damping_period has no effect with a fixed model_damping",
        ),
        (
            {"factor_damping": 0.1, "factor_damping_period": 3},
            "factor_damping_period has no effect with a fixed factor_damping",
        ),
    ],
)
def test_bad_adaptations_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        kfc.Adaptation(**options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"clip": 0.0}, ValueError, "clip must be"),
        ({"groups": [{"prefix": "0", "lr": 0.1}]}, ValueError, "unknown options"),
        (
            {"groups": [{"prefix": "0", "damping": 0.1}], "adaptation": kfc.Adaptation(lr=0.1)},
            ValueError,
            "unknown options",
        ),
        ({"adaptation": {"lr": 0.1}}, TypeError, "adaptation must be a kfc.Adaptation"),
        ({"schedule": kfc.Budget(0.5)}, TypeError, "schedule must be kfc.Periods"),
    ],
)
def test_bad_options_are_refused_by_name(options, error, message):
    model, _, _ = small_problem()
    with pytest.raises(error, match=message):
        kfc.KFAC(model, **options)
    assert not model._forward_hooks


def test_unusable_closures_are_refused():
    model, inputs, labels = small_problem()
    optimizer = kfc.KFAC(model)
    loss = closure_of(model, inputs, labels)

    def with_backward() -> Tensor:
        value = loss()
        value.backward()
        return value

    for closure, error, message in (
        (None, TypeError, "needs a closure"),
        (with_backward, RuntimeError, "without calling backward"),
        (lambda: loss().item(), TypeError, "returned a float"),
        (lambda: loss().detach(), TypeError, "without a graph"),
        (lambda: model(inputs), TypeError, r"of shape \(20, 3\)"),
    ):
        with pytest.raises(error, match=message):
            optimizer.step(closure)
    model.eval()
    with pytest.raises(RuntimeError, match="training mode"):
        optimizer.step(loss)
    model.train()
    optimizer.step(loss)
    with pytest.raises(ValueError, match="dampings"):
        optimizer.load_state_dict(
            {k: v for k, v in optimizer.state_dict().items() if k != "dampings"}
        )


# Against tuned first-order methods


def updates_to(goal: float, step: Callable[[], Tensor], most: int) -> int | None:
    """Return the number of updates until the loss reaches the goal, or ``None``."""
    return next((count for count in range(most + 1) if step().item() <= goal), None)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_a_deep_autoencoder_takes_a_fifth_of_the_updates_of_tuned_sgd_and_adam(seed):
    """Full batches of real digits; the other methods with several learning rates."""
    from kfc.lab.data import Inputs, load
    from kfc.lab.networks import build

    torch.set_default_dtype(torch.float32)
    data = load("digits").train
    images = Inputs.unit(data)(data.images[:])

    def fresh() -> nn.Module:
        return build("digits-autoencoder", image=(1, 8, 8), classes=10, init=None, seed=seed)

    def loss_of(model: nn.Module) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(images), images)

    def descent(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], Tensor]:
        def step() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model)
            loss.backward()
            optimizer.step()
            return loss

        return step

    model, goal = fresh(), 0.24
    adaptive = kfc.KFAC(model, likelihood="bernoulli")
    own = updates_to(goal, lambda: adaptive.step(lambda: loss_of(model)), 300)
    assert own is not None
    rivals = [(torch.optim.SGD, lr, {"momentum": 0.9}) for lr in (0.3, 1.0, 3.0)]
    rivals += [(torch.optim.Adam, lr, {}) for lr in (0.003, 0.01, 0.03)]
    for kind, lr, options in rivals:
        other = fresh()
        step = descent(other, kind(other.parameters(), lr=lr, **options))
        assert updates_to(goal, step, 5 * own) is None, (kind.__name__, lr)


@pytest.mark.slow
def test_rate_and_momentum_settle_on_cifar10(tmp_path):
    """As in the paper."""
    from kfc.lab.config import make_config
    from kfc.lab.data import DataError, load
    from kfc.lab.runs import read_record
    from kfc.lab.training import Trainer

    torch.set_default_dtype(torch.float32)
    try:
        data = load("cifar10")
    except DataError as error:
        pytest.skip(str(error))
    options = {"data": "cifar10", "init": "kaiming", "optimizer": "kfac", "batch_size": 512}
    options |= {"updates": 60, "log_period": 1, "evaluation_examples": 500}
    trainer = Trainer.start(tmp_path / "run", make_config(**options), data, name="run")
    trainer.advance()
    trainer.close()
    rows = read_record(tmp_path / "run").progress
    early, late = rows[:20], rows[20:]
    assert rows[-1]["loss"] < 1.3
    rates = sorted(row["lr"] for row in late)
    middle = rates[len(rates) // 2]
    assert 1e-3 < middle < 3e-2
    # Nine of ten within a factor of three, while the first ones fall by more than that.
    within = [rate for rate in rates if middle / 3 < rate < 3 * middle]
    assert len(within) >= 0.9 * len(rates)
    assert max(row["lr"] for row in early) > 3 * middle
    momenta = sorted(row["momentum"] for row in late)
    assert 0.1 < momenta[len(momenta) // 2] < 1
    ratios = [row["reduction_ratio"] for row in late if row["reduction_ratio"] is not None]
    assert ratios
    assert all(0.5 < ratio < 1.5 for ratio in ratios)


def test_schedulers_need_a_fixed_rate():
    """Without one, there is no rate that a scheduler could change."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    with pytest.raises(KeyError, match="lr"):
        torch.optim.lr_scheduler.StepLR(kfc.KFAC(model), 1)
    optimizer = kfc.KFAC(model, adaptation=kfc.Adaptation(lr=0.1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    inputs, targets = torch.randn(8, 4), torch.randint(2, (8,))
    rates = []
    for _ in range(2):
        optimizer.step(lambda: F.cross_entropy(model(inputs), targets))
        rates.append(optimizer.step_diagnostics["lr"])
        scheduler.step()
    assert_close(rates[1], 0.5 * rates[0])
