"""Test the bounds of `KFAC`: the floor of γ and the trust region of α and μ."""

import copy
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import kfc
from kfc.optimizers.quadratic import QuadraticModel
from reference import cross_entropy, exact_fisher, flat_parameters

pytestmark = pytest.mark.usefixtures("double")

NEVER = 10**9


def problem(count: int = 20) -> tuple[nn.Module, Tensor, Tensor]:
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    return model, torch.randn(count, 5), torch.randint(3, (count,))


def closure_of(model: nn.Module, inputs: Tensor, labels: Tensor) -> Callable[[], Tensor]:
    return lambda: F.cross_entropy(model(inputs), labels)


def make(model: nn.Module, *, weight_decay=0.0, clip=None, curvature="kfc", **options) -> kfc.KFAC:
    """Return an optimizer; other options are those of ``kfc.Adaptation``."""
    adaptation = kfc.Adaptation(**options)
    return kfc.KFAC(
        model,
        weight_decay=weight_decay,
        clip=clip,
        curvature=curvature,
        adaptation=adaptation,
        likelihood="categorical",
    )


def dampings_in_use(optimizer: kfc.KFAC) -> list[float]:
    layers = optimizer.diagnostics["layers"].values()
    return [math.sqrt(layer["damping"]) for layer in layers]


# The floor of γ


@pytest.mark.parametrize("kind", ["factored", "eigen"])
@pytest.mark.parametrize("weight_decay", [0.0, 1e-2])
def test_factor_damping_is_never_below_that_of_the_model(kind, weight_decay):
    model, inputs, labels = problem(40)
    optimizer = make(
        model,
        weight_decay=weight_decay,
        curvature=kfc.Kronecker(inverse=kind),
        model_damping_period=1,
        factor_damping_period=2,
    )
    at_floor = 0
    for step in range(60):
        chosen = torch.randperm(40)[:8]
        # Other labels now and then, so that λ grows too.
        targets = labels[chosen] if step % 7 else torch.randint(3, (8,))
        before = optimizer.model_damping.value
        optimizer.step(closure_of(model, inputs[chosen], targets))
        floor = math.sqrt(before + weight_decay)
        # The update was made with the λ before it was adapted.
        assert min(dampings_in_use(optimizer)) >= floor * (1 - 1e-9) or step == 0
        present = math.sqrt(optimizer.model_damping.value + weight_decay)
        assert optimizer.factor_damping.value >= present
        at_floor += min(dampings_in_use(optimizer)) == pytest.approx(floor)
    assert at_floor > 0


@pytest.mark.parametrize("decays", [(0.0, 0.09), (0.09, 0.0), (0.09, 0.02)])
def test_the_floor_counts_the_largest_weight_decay(decays):
    model, _, _ = problem()
    optimizer = kfc.KFAC(
        model,
        weight_decay=decays[0],
        groups=[{"prefix": "*.bias", "weight_decay": decays[1]}],
        adaptation=kfc.Adaptation(initial_model_damping=0.16),
    )
    optimizer.factor_damping.choose(1e-3)
    assert optimizer.factor_damping.value == pytest.approx(0.5)
    assert optimizer.factor_damping.candidates() == pytest.approx([0.5, 0.5 / (19 / 20) ** 10])
    optimizer.factor_damping.choose(0.6)
    ratio = (19 / 20) ** 10
    assert optimizer.factor_damping.candidates() == pytest.approx([0.6, 0.5, 0.6 / ratio])
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.84
    assert optimizer.factor_damping.value == pytest.approx(1.0)


def test_inverses_are_refreshed_at_once_when_the_floor_rises():
    model, inputs, labels = problem()
    optimizer = kfc.KFAC(
        model,
        adaptation=kfc.Adaptation(initial_model_damping=0.01, model_damping_period=NEVER),
        schedule=kfc.Periods(1, NEVER),
        likelihood="categorical",
    )
    for _ in range(3):
        optimizer.step(closure_of(model, inputs, labels))
    assert dampings_in_use(optimizer) == pytest.approx([optimizer.factor_damping.value] * 2)
    before = optimizer.factor_damping.value
    optimizer.model_damping.restore(4.0)
    optimizer.step(closure_of(model, inputs, labels))
    assert dampings_in_use(optimizer) == pytest.approx([2.0, 2.0])
    optimizer.model_damping.restore(1.0)
    optimizer.step(closure_of(model, inputs, labels))
    assert dampings_in_use(optimizer) == pytest.approx([2.0, 2.0])
    assert before < 2


def test_a_fixed_factor_damping_stays_as_given():
    model, inputs, labels = problem()
    optimizer = make(model, weight_decay=1.0, factor_damping=0.1, initial_model_damping=3.0)
    for _ in range(3):
        optimizer.step(closure_of(model, inputs, labels))
    assert optimizer.factor_damping.value == 0.1
    assert dampings_in_use(optimizer) == pytest.approx([0.1, 0.1])


def test_a_resumed_factor_damping_obeys_the_floor():
    model, inputs, labels = problem()
    optimizer = make(model, initial_model_damping=1e-3)
    optimizer.step(closure_of(model, inputs, labels))
    state = optimizer.state_dict()
    state["dampings"] = {"model_damping": 0.25, "factor_damping": 1e-3}
    again = make(copy.deepcopy(model))
    again.load_state_dict(state)
    assert again.factor_damping.value == pytest.approx(0.5)
    again.step(closure_of(again.model, inputs, labels))
    assert dampings_in_use(again) == pytest.approx([0.5, 0.5])


def test_a_run_resumed_after_the_floor_rose_continues_bit_for_bit():
    """λ grew in the last step, so that the next one refreshes the inverses."""
    model, inputs, labels = problem()
    options = {"initial_model_damping": 0.1, "model_damping_period": 1}
    schedule = kfc.Periods(1, NEVER)

    def optimizer_of(network: nn.Module) -> kfc.KFAC:
        adaptation = kfc.Adaptation(**options)
        return kfc.KFAC(
            network, adaptation=adaptation, schedule=schedule, likelihood="categorical", seed=1
        )

    optimizer = optimizer_of(model)
    for _ in range(3):
        optimizer.step(closure_of(model, inputs, labels))
    optimizer.model_damping.restore(1.0)
    assert optimizer.factor_damping.is_raised()
    twin, state = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict())
    again = optimizer_of(twin)
    again.load_state_dict(state)
    for _ in range(3):
        optimizer.step(closure_of(model, inputs, labels))
        again.step(closure_of(twin, inputs, labels))
        assert again.step_diagnostics == optimizer.step_diagnostics
    assert torch.equal(flat_parameters(twin), flat_parameters(model))


# The trust region


def random_model(seed: int, size: int = 2, rank: int = 6) -> QuadraticModel:
    generator = torch.Generator().manual_seed(seed)
    root, vectors, gradient = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((6, rank), (size, 6), (6,))
    )
    matrix = root @ root.T
    products = vectors @ matrix @ vectors.T
    return QuadraticModel(vectors @ gradient, products, vectors @ vectors.T, 2.2e-16)


def values_at(model: QuadraticModel, points: Tensor, damping: float) -> Tensor:
    """Return M at each row, (n,)."""
    matrix = model.curvature + damping * model.overlaps
    return points @ model.slopes + 0.5 * ((points @ matrix) * points).sum(-1)


def grid(bounds: list[tuple[float, float]], count: int) -> Tensor:
    axes = [torch.linspace(low, high, count, dtype=torch.float64) for low, high in bounds]
    return torch.cartesian_prod(*axes).reshape(-1, len(bounds))


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    rank=st.integers(2, 6),
    damping=st.sampled_from([0.0, 0.01, 1.0]),
    alpha=st.floats(1e-3, 3),
    mu=st.floats(1e-3, 3),
)
def test_the_minimiser_in_a_box_is_that_of_a_fine_grid(seed, rank, damping, alpha, mu):
    model, bounds = random_model(seed, 2, rank), [(0.0, alpha), (-mu, mu)]
    found = model.minimiser(damping, bounds)
    for value, (low, high) in zip(found, bounds, strict=True):
        assert low <= value <= high
    # A second grid around the best point of the first has steps of 1/40000 of the box.
    coarse = grid(bounds, 201)
    best = coarse[values_at(model, coarse, damping).argmin()].tolist()
    near = [
        (max(low, c - (high - low) / 200), min(high, c + (high - low) / 200))
        for c, (low, high) in zip(best, bounds, strict=True)
    ]
    lowest = values_at(model, torch.cat([coarse, grid(near, 201)]), damping).min().item()
    value = model.change(found, damping)
    assert value <= lowest + 1e-9 * max(1, abs(lowest))
    assert value == pytest.approx(lowest, rel=1e-3, abs=1e-4)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6), size=st.integers(1, 4))
def test_the_minimiser_in_a_box_satisfies_the_optimality_conditions(seed, size):
    """The derivative is zero inside, and points out of the box at a bound."""
    model, bounds = random_model(seed, size), [(-0.3, 0.2)] * size
    c = torch.tensor(model.minimiser(0.1, bounds), dtype=torch.float64)
    slope = model.slopes + (model.curvature + 0.1 * model.overlaps) @ c
    tolerance = 1e-8 * (1 + model.slopes.abs().max())
    assert (slope[c > -0.3] <= tolerance).all()
    assert (slope[c < 0.2] >= -tolerance).all()


def test_infinite_bounds_change_nothing_and_equal_ones_fix():
    model = random_model(3)
    free = model.minimiser(0.1)
    assert model.minimiser(0.1, [(-math.inf, math.inf)] * 2) == free
    assert model.minimiser(0.1, [(c - 1, c + 1) for c in free]) == free
    first, second = model.minimiser(0.1, [(0.7, 0.7), (-math.inf, math.inf)])
    matrix = model.curvature + 0.1 * model.overlaps
    assert first == 0.7
    wanted = -(model.slopes[1] + 0.7 * matrix[1, 0]) / matrix[1, 1]
    assert second == pytest.approx(wanted.item())


def test_a_direction_without_curvature_is_not_followed_to_its_bound():
    slopes, curvature = torch.ones(2).double(), torch.diag(torch.tensor([2.0, 0.0])).double()
    model = QuadraticModel(slopes, curvature, torch.eye(2).double(), 2.2e-16)
    assert model.minimiser(0.0, [(-1.0, 1.0)] * 2) == pytest.approx([-0.5, 0.0])


@pytest.mark.parametrize(
    ("options", "clip"),
    [
        ({}, None),
        ({"max_lr": 0.3, "max_momentum": 0.4}, None),
        ({"max_lr": 0.3, "momentum": 0.4}, None),
        ({"lr": 0.2, "max_momentum": 0.3}, None),
        ({"max_lr": None, "max_momentum": 0.1}, None),
        ({"max_lr": 0.3, "max_momentum": 0.4}, 1e-2),
    ],
)
def test_steps_minimise_the_dense_model_in_the_box(options, clip):
    """The minimum over α and μ on a grid, with the directions that the steps took."""
    model, inputs, labels = problem()
    optimizer = make(
        model,
        clip=clip,
        curvature=kfc.Kronecker(fisher="exact"),
        model_damping=0.01,
        factor_damping=1.0,
        **options,
    )
    closure = closure_of(model, inputs, labels)
    adaptation, previous, at_bound = kfc.Adaptation(**options), None, 0
    for _ in range(8):
        before = flat_parameters(model)
        gradients = torch.autograd.grad(closure(), list(model.parameters()))
        gradient = torch.cat([g.flatten() for g in gradients])
        fisher = exact_fisher(model, inputs, cross_entropy())
        optimizer.step(closure)
        told, update = optimizer.step_diagnostics, flat_parameters(model) - before
        if previous is not None:
            found = told["lr"], told["momentum"]
            direction = (update - found[1] * previous) / found[0]
            vectors = torch.stack([direction, previous])
            products = vectors @ fisher @ vectors.T
            dense = QuadraticModel(vectors @ gradient, products, vectors @ vectors.T, 2.2e-16)
            bounds = dense_bounds(adaptation, clip, products[0, 0].item())
            lowest = values_at(dense, grid(bounds, 401), 0.01).min().item()
            assert dense.change(found, 0.01) <= lowest + 1e-12
            assert dense.change(found, 0.01) == pytest.approx(lowest, rel=1e-2)
            for value, (low, high) in zip(found, bounds, strict=True):
                assert low - 1e-12 <= value <= high + 1e-12
                at_bound += low < high and value == pytest.approx(high)
        previous = update
    assert at_bound > 0


def dense_bounds(
    adaptation: kfc.Adaptation, clip: float | None, norm: float
) -> list[tuple[float, float]]:
    """Return the box that α and μ must be in; without a bound, a large one."""
    lr, momentum = adaptation.lr, adaptation.momentum
    largest = 20.0 if adaptation.max_lr is None else adaptation.max_lr
    largest = largest if clip is None else min(largest, math.sqrt(clip / norm))
    limit = adaptation.max_momentum
    return [
        (0.0, largest) if lr is None else (lr, lr),
        (-(limit or 20.0), limit or 20.0) if momentum is None else (momentum, momentum),
    ]


def test_a_step_to_nan_is_shortened_also_from_the_bound():
    """α stays at its bound until λ is large enough to shorten the step."""
    model = nn.Linear(3, 1)
    inputs = torch.randn(10, 3)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)

    def closure() -> Tensor:
        barrier = (1e-4 - model.weight.square().sum()).log()
        return F.mse_loss(model(inputs), torch.full((10, 1), 30.0)) + barrier

    adaptation = kfc.Adaptation(
        initial_model_damping=1e-6, factor_damping=3.0, model_damping_period=1
    )
    optimizer = kfc.KFAC(model, likelihood="gaussian", adaptation=adaptation)
    optimizer.step(closure)
    assert math.isfinite(closure().item())
    assert 0 < optimizer.step_diagnostics["lr"] < 1
    bold = kfc.KFAC(
        model,
        likelihood="gaussian",
        adaptation=kfc.Adaptation(model_damping=1e-3, factor_damping=3.0),
    )
    model.weight.detach().zero_()
    model.bias.detach().zero_()
    with pytest.raises(FloatingPointError):
        bold.step(closure)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_lr": 0.0}, "max_lr must be"),
        ({"max_momentum": -1.0}, "max_momentum must be"),
        ({"max_momentum": math.nan}, "max_momentum must be"),
        ({"lr": 0.1, "max_lr": 0.5}, "max_lr has no effect with a fixed lr"),
        ({"lr": 0.1, "max_lr": None}, "max_lr has no effect with a fixed lr"),
        ({"momentum": 0.1, "max_momentum": 0.5}, "max_momentum has no effect with a fixed mom"),
    ],
)
def test_bad_bounds_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        kfc.Adaptation(**options)
