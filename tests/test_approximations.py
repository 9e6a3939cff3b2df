"""Compare every approximation of a layer's Fisher block with dense matrices, in float64."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import kfc
from approximations import CURVATURES, FACTORED, approximation
from kfc.curvature import gradients
from kfc.curvature.ekfac import MeasuredInverse
from kfc.curvature.kronecker import EigenInverse, Factors
from kfc.curvature.layer import LayerState
from kfc.fisher.calls import suspended
from reference import (
    activation_factor,
    cross_entropy,
    derivative_factor,
    exact_fisher,
    fitting_loss,
    receptive_rows,
)
from test_layers import Locations

pytestmark = pytest.mark.usefixtures("double")

LAYERS = {
    "conv": (lambda: nn.Conv2d(2, 3, 3, padding=1), (4, 2, 4, 3)),
    "strided groups": (lambda: nn.Conv2d(4, 4, (3, 2), 2, padding=1, groups=2), (3, 4, 4, 5)),
    "no bias": (lambda: nn.Conv2d(2, 2, 2, bias=False), (5, 2, 3, 4)),
    "circular": (lambda: nn.Conv1d(2, 3, 3, padding=1, padding_mode="circular"), (6, 2, 4)),
    "dilated": (lambda: nn.Conv1d(3, 2, 2, dilation=2, padding=1), (4, 3, 5)),
    "transposed": (lambda: nn.ConvTranspose2d(2, 2, 3, stride=2, padding=1), (3, 2, 3, 2)),
    "linear": (lambda: nn.Linear(4, 3), (6, 4)),
    "linear, no bias": (lambda: nn.Linear(3, 3, bias=False), (6, 3)),
    "linear, locations": (lambda: nn.Linear(3, 2), (4, 3, 3)),
    "many maps": (lambda: nn.Conv1d(2, 10, 2, groups=2), (4, 2, 3)),
}


def model_of(case: str) -> tuple[nn.Sequential, torch.Tensor]:
    make, shape = LAYERS[case]
    layer, inputs = make(), 0.7 + torch.randn(shape)
    return nn.Sequential(layer, Locations(layer(inputs))), inputs


def preconditioned(model, inputs, curvature, *, damping=1e-3, **options):
    """Train twice on one batch; return the preconditioner and the plain gradients.

    Twice, because the second moments of EKFAC are measured in the bases of the first step.
    """
    options = {"fisher": "exact", "factor_decay": 0.0, **options}
    preconditioner = kfc.Preconditioner(
        model,
        damping=damping,
        curvature=approximation(curvature, **options),
        schedule=kfc.Periods(1, 1),
    )
    for _ in range(2):
        model.zero_grad()
        fitting_loss(model(inputs)).backward()
        plain = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        preconditioner.step()
    preconditioner.close()
    return preconditioner, plain


def layer_state(preconditioner: kfc.Preconditioner, name: str = "0") -> LayerState:
    """Return the running averages and the inverse of a layer."""
    return preconditioner.engine.curvature.layers[name].state


def kron(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return torch.kron(left.contiguous(), right.contiguous())


# Dense references. The coordinates of a group are those of a gradient (I, n), row by row.


def coordinates(layer: nn.Module) -> torch.Tensor:
    """Return the indices of a gradient (groups, I, n) in the parameters, weight before bias."""
    groups, weight = getattr(layer, "groups", 1), layer.weight
    index = torch.arange(weight.numel()).reshape(weight.shape)
    if "Transpose" in type(layer).__name__:
        index = index.reshape(groups, -1, *weight.shape[1:]).transpose(1, 2)
    else:
        index = index.reshape(groups, -1, *weight.shape[1:])
    index = index.flatten(2)
    if layer.bias is None:
        return index
    bias = weight.numel() + torch.arange(layer.bias.numel()).reshape(groups, -1, 1)
    return torch.cat([bias, index], dim=2)


def exact_blocks(model: nn.Sequential, inputs: torch.Tensor) -> torch.Tensor:
    """Return the exact Fisher blocks, (groups, I · n, I · n)."""
    with suspended():
        fisher = exact_fisher(model, inputs, cross_entropy())
    return torch.stack([fisher[g][:, g] for g in coordinates(model[0]).flatten(1)])


def boundary_counts(layer: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """Return β, (1 + |D|, 1 + |D|), the second moment of the patches of a map of ones."""
    if isinstance(layer, nn.Linear):
        locations = inputs[0].numel() // inputs.shape[-1]
        return torch.full((2, 2), float(locations))
    single = type(layer)(
        1,
        1,
        layer.kernel_size,
        stride=layer.stride,
        padding=layer.padding,
        dilation=layer.dilation,
        padding_mode=layer.padding_mode,
    )
    rows = receptive_rows(single, torch.ones_like(inputs[:1, :1]))[0]
    return rows.T @ rows


def uncorrelated_factors(layer: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """Return Ω of Theorem 4, entry by entry."""
    channels_last = inputs if isinstance(layer, nn.Linear) else inputs.movedim(1, -1)
    counts, groups = boundary_counts(layer, inputs), getattr(layer, "groups", 1)
    result = []
    for maps in channels_last.chunk(groups, dim=-1):
        pixels = maps.reshape(-1, maps.shape[-1])
        mean, covariance = pixels.mean(0), torch.atleast_2d(torch.cov(pixels.T, correction=0))
        entries = [(None, 0)] + [(j, d) for j in range(len(mean)) for d in range(1, len(counts))]
        factor = torch.zeros(len(entries), len(entries))
        for row, (j, d) in enumerate(entries):
            for column, (k, e) in enumerate(entries):
                moment = (1 if j is None else mean[j]) * (1 if k is None else mean[k])
                if j is not None and k is not None and d == e:
                    moment = moment + covariance[j, k]
                factor[row, column] = counts[d, e] * moment
        result.append(factor if layer.bias is not None else factor[1:, 1:])
    return torch.stack(result)


def dense_factors(curvature: str, model, inputs) -> tuple[torch.Tensor, torch.Tensor]:
    layer, rest = copy.deepcopy(model[0]), model[1:]
    derivative = derivative_factor(
        rest,
        layer(inputs),
        cross_entropy(),
        getattr(layer, "groups", 1),
        channels_last=isinstance(layer, nn.Linear),
    )
    if curvature in ("kfc", "ekfac"):
        return activation_factor(layer, inputs), derivative
    if curvature == "prong":
        size = derivative.shape[-1]
        level = derivative.diagonal(dim1=1, dim2=2).mean(1)
        derivative = level[:, None, None] * torch.eye(size)
    return uncorrelated_factors(layer, inputs), derivative


def damped(curvature: str, model, inputs, damping: float, inverse: str) -> list[torch.Tensor]:
    """Return the dense damped block of each group."""
    blocks = exact_blocks(model, inputs)
    identity = torch.eye(blocks.shape[-1])
    if curvature == "diagonal":
        return [block.diag().diag() + damping * identity for block in blocks]
    result = []
    for omega, gamma, block in zip(*dense_factors(curvature, model, inputs), blocks, strict=True):
        if curvature == "ekfac":
            basis = kron(torch.linalg.eigh(gamma)[1], torch.linalg.eigh(omega)[1])
            diagonal = (basis.T @ block @ basis).diag()
            result.append(basis @ diagonal.diag() @ basis.T + damping * identity)
        elif inverse == "eigen":
            result.append(kron(gamma, omega) + damping * identity)
        else:
            pi = ((omega.trace() / len(omega)) / (gamma.trace() / len(gamma))).sqrt()
            root = math.sqrt(damping)
            omega = omega + pi * root * torch.eye(len(omega))
            result.append(kron(gamma + root / pi * torch.eye(len(gamma)), omega))
    return result


@pytest.mark.parametrize("case", LAYERS)
@pytest.mark.parametrize("curvature", CURVATURES)
@pytest.mark.parametrize("inverse", ["factored", "eigen"])
def test_the_natural_gradient_solves_the_damped_dense_block(curvature, case, inverse):
    model, inputs = model_of(case)
    _, plain = preconditioned(model, inputs, curvature=curvature, inverse=inverse, damping=0.02)
    flat = torch.cat([g.flatten() for g in plain])
    natural = torch.cat([p.grad.flatten() for p in model.parameters()])
    blocks = damped(curvature, model, inputs, 0.02, inverse)
    for index, dense in zip(coordinates(model[0]).flatten(1), blocks, strict=True):
        assert_close(natural[index], torch.linalg.solve(dense, flat[index]), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("case", LAYERS)
def test_the_diagonal_is_that_of_the_exact_block(case):
    model, inputs = model_of(case)
    preconditioner, _ = preconditioned(model, inputs, curvature="diagonal")
    (diagonal,) = layer_state(preconditioner).running
    assert_close(diagonal, exact_blocks(model, inputs).diagonal(dim1=1, dim2=2))
    assert preconditioner.factors == {}


@pytest.mark.parametrize("case", LAYERS)
def test_second_moments_are_the_exact_blocks_diagonal_in_the_eigenbasis(case):
    model, inputs = model_of(case)
    curvature = kfc.EKFAC(fisher="exact", factor_decay=0.0)
    preconditioner = kfc.Preconditioner(
        model, curvature=curvature, schedule=kfc.Periods(1, kfc.Stretch(20))
    )
    for measured in (False, True):
        fitting_loss(model(inputs)).backward()
        preconditioner.step()
        inverse = layer_state(preconditioner).inverse
        assert inverse.measured == measured
        factors = dense_factors("ekfac", model, inputs)
        for group, (omega, gamma) in enumerate(zip(*factors, strict=True)):
            basis = dense_basis(inverse, group)
            # Before the moments are measured, the eigenvalues of the factors stand for them.
            block = exact_blocks(model, inputs)[group] if measured else kron(gamma, omega)
            expected = (basis.T @ block @ basis).diag()
            found = inverse.tensors["eigenvalues"][group].flatten()
            assert_close(found, expected, atol=1e-10, rtol=1e-7)


@pytest.mark.parametrize("case", LAYERS)
@pytest.mark.parametrize("curvature", FACTORED)
def test_factors_are_the_dense_ones(curvature, case):
    model, inputs = model_of(case)
    preconditioner, _ = preconditioned(model, inputs, curvature=curvature)
    factors = preconditioner.factors["0"]
    activation, derivative = dense_factors(curvature, model, inputs)
    if curvature == "prong":
        derivative = derivative.diagonal(dim1=1, dim2=2)
    if getattr(model[0], "groups", 1) == 1:
        activation, derivative = activation[0], derivative[0]
    assert_close(factors.activation, activation)
    assert_close(factors.derivative, derivative)
    summary = preconditioner.diagnostics["layers"]["0"]
    assert {"pi", "activation_trace", "derivative_trace", "damping"} <= set(summary)


# Second moments of EKFAC in successive bases


def random_factor(groups: int, size: int) -> torch.Tensor:
    rows = torch.randn(groups, size + 2, size)
    return rows.mT @ rows


def dense_basis(inverse: EigenInverse, group: int) -> torch.Tensor:
    m, n = inverse.tensors["eigenvalues"].shape[1:]
    parts = []
    for name, size in (("derivative_basis", m), ("activation_basis", n)):
        basis = inverse.tensors.get(name)
        parts.append(torch.eye(size) if basis is None else basis[group])
    return kron(*parts)


@pytest.mark.parametrize("wide", ["neither", "activation", "derivative"])
def test_second_moments_are_transformed_to_new_bases(wide):
    def some_inverse():
        factors = {"activation": random_factor(2, 4), "derivative": random_factor(2, 3)}
        if wide in factors:
            factors[wide] = factors[wide].diagonal(dim1=1, dim2=2)
        return MeasuredInverse(EigenInverse.of(Factors(**factors), 0.1).tensors)

    old, new = some_inverse(), some_inverse()
    moments = torch.rand(2, 3, 4)
    old = old.averaged(moments.flatten(1), 0.9)
    assert_close(old.tensors["eigenvalues"], moments)
    carried = new.continuing(old)
    assert carried.measured
    for group in range(2):
        turn = dense_basis(new, group).T @ dense_basis(old, group)
        expected = (turn @ moments[group].flatten().diag() @ turn.T).diag()
        assert_close(carried.tensors["eigenvalues"][group].flatten(), expected)


def test_second_moments_average_and_are_used_at_once():
    """Between refreshes of the bases, and in new bases after one."""
    model, _ = model_of("conv")
    preconditioner = kfc.Preconditioner(
        model,
        damping=0.01,
        curvature=kfc.EKFAC(fisher="exact", factor_decay=0.75),
        schedule=kfc.Periods(1, 4),
    )
    basis = expected = None
    for step in range(1, 6):
        inputs, before = torch.randn(4, 2, 4, 3), basis
        model.zero_grad()
        fitting_loss(model(inputs)).backward()
        index = coordinates(model[0]).flatten()
        flat = torch.cat([p.grad.flatten() for p in model.parameters()])[index]
        preconditioner.step()
        basis = dense_basis(layer_state(preconditioner).inverse, 0)
        if step > 1:
            block = exact_blocks(model, inputs)[0]
            new = (before.T @ block @ before).diag()
            expected = new if expected is None else 0.75 * expected + 0.25 * new
            if step == 4:
                turn = basis.T @ before
                assert not torch.allclose(turn.square(), torch.eye(len(turn)))
                expected = (turn @ expected.diag() @ turn.T).diag()
            else:
                assert torch.equal(before, basis)
            dense = basis @ (expected + 0.01).diag() @ basis.T
            natural = torch.cat([p.grad.flatten() for p in model.parameters()])[index]
            assert_close(natural, torch.linalg.solve(dense, flat), rtol=1e-7, atol=1e-9)


def test_without_damping_there_is_no_step_in_directions_without_gradients():
    """Otherwise rounding errors would dominate the inverse of a rank-deficient block."""
    model = nn.Sequential(nn.Linear(20, 3))
    inputs = torch.randn(5, 20)
    preconditioned(model, inputs, curvature="ekfac", damping=0.0)
    natural = torch.cat([model[0].bias.grad[:, None], model[0].weight.grad], dim=1)
    rows = torch.cat([torch.ones(5, 1), inputs], dim=1)
    outside = natural - natural @ torch.linalg.pinv(rows) @ rows
    assert outside.norm() < 1e-6 * natural.norm()


# Calls, rows and parts of batches


class Twice(nn.Module):
    """A layer that is called twice, and once more without an effect on the output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv1d(2, 2, 3, padding=1)
        self.register_buffer("mix", torch.randn(10, 3) / 3)

    def forward(self, x):
        first = self.layer(x)
        self.layer(x[:, :, 1:])
        second = self.layer(first.tanh()[:, :, :-1])
        return torch.cat([first.sum(2), second.flatten(1)], dim=1).sin() @ self.mix


def test_gradients_of_several_calls_add_up_before_they_are_squared():
    model, inputs = Twice(), torch.randn(5, 2, 5)
    diagonal, _ = preconditioned(model, inputs, curvature="diagonal")
    fisher = exact_fisher(model, inputs, cross_entropy())
    block = fisher[coordinates(model.layer)[0].flatten()]
    block = block[:, coordinates(model.layer)[0].flatten()]
    assert_close(layer_state(diagonal, "layer").running[0][0], block.diag())
    measured, _ = preconditioned(model, inputs, curvature="ekfac")
    inverse = layer_state(measured, "layer").inverse
    basis = dense_basis(inverse, 0)
    expected = (basis.T @ block @ basis).diag()
    assert_close(inverse.tensors["eigenvalues"].flatten(), expected)


def test_pixels_and_counts_of_several_calls_add_up():
    model, inputs = Twice(), torch.randn(5, 2, 5)
    preconditioner, _ = preconditioned(model, inputs, curvature="sua")
    pixel, counts, _ = layer_state(preconditioner, "layer").running
    with torch.no_grad():
        second = model.layer(inputs).tanh()[:, :, :-1]
    rows = torch.cat([x.movedim(1, -1).reshape(-1, 2) for x in (inputs, second)])
    rows = torch.cat([torch.ones(len(rows), 1), rows], dim=1)
    assert_close(pixel[0], rows.T @ rows / len(rows))
    expected = boundary_counts(model.layer, inputs) + boundary_counts(model.layer, second)
    assert_close(counts, expected)
    factors = kfc.Preconditioner(model, curvature=kfc.Kronecker(fisher="exact"))
    fitting_loss(model(inputs)).backward()
    factors.step()
    assert_close(preconditioner.factors["layer"].derivative, factors.factors["layer"].derivative)


class Frames(nn.Module):
    """A linear layer on the frames of (N, F, 3), in one of several orders."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.layer, self.order = nn.Linear(3, 4), order

    def forward(self, x):
        n, f, _ = x.shape
        if self.order == "folded":
            return self.layer(x.flatten(0, 1)).reshape(n, f, 4).tanh().sum(1)
        if self.order == "folded before a location":
            return self.layer(x.reshape(n * f, 1, 3)).reshape(n, f, 4).tanh().sum(1)
        if self.order == "sequence first":
            return self.layer(x.transpose(0, 1)).tanh().sum(0)
        return self.layer(x).tanh().sum(1)


@pytest.mark.parametrize("order", ["folded", "folded before a location", "sequence first"])
@pytest.mark.parametrize("frames", [1, 3, 8])
@pytest.mark.parametrize("curvature", CURVATURES)
def test_frames_are_locations_of_their_example_in_any_order(curvature, frames, order):
    """Also where the number of frames is a multiple of the number of examples."""
    inputs = torch.randn(4, frames, 3)
    direct, other = Frames("direct"), Frames(order)
    other.load_state_dict(direct.state_dict())
    for model in (direct, other):
        preconditioned(model, inputs, curvature=curvature)
    assert_close([p.grad for p in other.parameters()], [p.grad for p in direct.parameters()])


def test_rows_without_a_batch_dimension_count_on_their_own():
    class Pairs(nn.Module):
        """A linear layer that is called with one vector at a time."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 4)

        def forward(self, x):
            return torch.stack([self.layer(one) for one in x])

    model, inputs = Pairs(), torch.randn(4, 3)
    batched = nn.Sequential(copy.deepcopy(model.layer))
    one, _ = preconditioned(model, inputs, curvature="diagonal")
    other, _ = preconditioned(batched, inputs, curvature="diagonal")
    assert_close(layer_state(one, "layer").running, layer_state(other).running)
    maps, signal = nn.Conv1d(2, 3, 2), torch.randn(3, 2, 7)

    class Inside(nn.Module):
        def __init__(self, together: bool) -> None:
            super().__init__()
            self.conv, self.together = copy.deepcopy(maps), together

        def forward(self, x):
            if self.together:
                return self.conv(x).tanh().sum(-1)
            return torch.stack([self.conv(single).tanh().sum(-1) for single in x])

    results = [
        preconditioned(Inside(together), signal, curvature="diagonal")[0]
        for together in (True, False)
    ]
    assert_close(*(layer_state(result, "conv").running for result in results))


@pytest.mark.parametrize("curvature", CURVATURES)
def test_micro_batches_are_one_batch(curvature):
    whole = nn.Sequential(nn.Conv2d(1, 2, 2, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(32, 3))
    parts = copy.deepcopy(whole)
    x, y = torch.randn(6, 1, 3, 3), torch.randint(3, (6,))
    options = {"curvature": approximation(curvature, fisher="exact")}
    options["schedule"] = kfc.Periods(1, kfc.Stretch(20))
    one, other = kfc.Preconditioner(whole, **options), kfc.Preconditioner(parts, **options)
    for _ in range(3):
        whole.zero_grad()
        F.cross_entropy(whole(x), y).backward()
        one.step()
        parts.zero_grad()
        for rows in (slice(0, 4), slice(4, 6)):
            share = len(x[rows]) / len(x)
            (share * F.cross_entropy(parts(x[rows]), y[rows])).backward()
        other.step()
        assert_close([p.grad for p in parts.parameters()], [p.grad for p in whole.parameters()])


@pytest.mark.parametrize("curvature", ["diagonal", "ekfac"])
def test_a_few_examples_at_a_time_give_the_same(curvature, monkeypatch):
    model, inputs = Twice(), torch.randn(5, 2, 5)
    twin = copy.deepcopy(model)
    preconditioned(model, inputs, curvature=curvature)
    sizes = []
    real = gradients._Call.part
    monkeypatch.setattr(
        gradients._Call, "part", lambda *args: sizes.append(real(*args).examples) or real(*args)
    )
    # The rows and the gradient of an example have 9 · 7 + 2 · 7 numbers.
    monkeypatch.setattr(gradients, "CHUNK_ELEMENTS", 2 * 77)
    preconditioned(twin, inputs, curvature=curvature)
    assert set(sizes) == {2, 1}
    assert_close([p.grad for p in twin.parameters()], [p.grad for p in model.parameters()])


def test_the_empirical_diagonal_contains_squared_gradients_of_the_data():
    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(9, 3))
    x, y = torch.randn(5, 2, 4), torch.randint(3, (5,))
    preconditioner = kfc.Preconditioner(model, curvature=kfc.Diagonal(fisher="empirical"))
    F.cross_entropy(model(x), y).backward()
    preconditioner.step()
    squares = [torch.zeros_like(p) for p in model.parameters()]
    for one, label in zip(x, y, strict=True):
        model.zero_grad()
        F.cross_entropy(model(one[None]), label[None]).backward()
        for total, parameter in zip(squares, model.parameters(), strict=True):
            total += parameter.grad**2 / len(x)
    for name, weight, bias in (("0", *squares[:2]), ("3", *squares[2:])):
        (running,) = layer_state(preconditioner, name).running
        assert_close(running[0], torch.cat([bias[:, None], weight.flatten(1)], dim=1).flatten())


# Frozen parameters and wide factors


@pytest.mark.parametrize("case", ["conv", "strided groups", "linear"])
@pytest.mark.parametrize("frozen", ["bias", "weight"])
@pytest.mark.parametrize("curvature", CURVATURES)
def test_a_frozen_parameter_has_no_coordinates(curvature, frozen, case):
    model, inputs = model_of(case)
    layer = model[0]
    by_group = coordinates(layer).flatten(1)
    is_bias = by_group[0] >= layer.weight.numel()
    kept = ~is_bias if frozen == "bias" else is_bias
    still = getattr(layer, frozen).requires_grad_(False)
    _, plain = preconditioned(model, inputs, curvature=curvature, inverse="eigen", damping=0.02)
    assert still.grad is None
    still.requires_grad_(True)
    natural = flattened(model, [p.grad for p in model.parameters()])
    blocks = frozen_blocks(curvature, model, inputs, kept, frozen)
    for index, dense in zip(by_group[:, kept], blocks, strict=True):
        dense = dense + 0.02 * torch.eye(len(dense))
        expected = torch.linalg.solve(dense, flattened(model, plain)[index])
        assert_close(natural[index], expected)


def flattened(model, gradients) -> torch.Tensor:
    pairs = zip(model.parameters(), gradients, strict=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for p, g in pairs])


def frozen_blocks(curvature, model, inputs, kept, frozen):
    """Return the undamped block of the kept coordinates, for each group."""
    blocks = exact_blocks(model, inputs)[:, kept][:, :, kept]
    if curvature == "diagonal":
        return [block.diag().diag() for block in blocks]
    activation, derivative = dense_factors(curvature, model, inputs)
    part = slice(1, None) if frozen == "bias" else slice(0, 1)
    result = []
    for omega, gamma, block in zip(activation[:, part, part], derivative, blocks, strict=True):
        if curvature != "ekfac":
            result.append(kron(gamma, omega))
            continue
        basis = kron(torch.linalg.eigh(gamma)[1], torch.linalg.eigh(omega)[1])
        result.append(basis @ (basis.T @ block @ basis).diag().diag() @ basis.T)
    return result


@pytest.mark.parametrize(
    ("case", "wide"),
    [
        *((case, Factors._fields[:1]) for case in ("conv", "strided groups", "no bias", "linear")),
        ("many maps", Factors._fields[1:]),
        *((case, Factors._fields) for case in ("conv", "no bias", "linear", "many maps")),
    ],
)
@pytest.mark.parametrize("curvature", FACTORED)
def test_wide_factors_keep_their_diagonals(curvature, wide, case):
    model, inputs = model_of(case)
    sizes = dict(zip(Factors._fields, kfc.layers.layer_for(model[0]).factor_sizes(), strict=True))
    limit = max([size for name, size in sizes.items() if name not in wide], default=1)
    assert all(sizes[name] > limit for name in wide)
    preconditioner, plain = preconditioned(
        model, inputs, curvature=curvature, max_factor_size=limit, damping=0.02, inverse="eigen"
    )
    # PRONG's Γ = c I is one number, whatever its width.
    named = [name for name in wide if curvature != "prong" or name == "activation"]
    stated = f"{' and '.join(named)} factor wider than {limit}: diagonal only"
    assert (stated in preconditioner.describe()) == bool(named)
    flat = torch.cat([g.flatten() for g in plain])
    natural = torch.cat([p.grad.flatten() for p in model.parameters()])
    blocks = exact_blocks(model, inputs)
    factors = dense_factors(curvature, model, inputs)
    for index, *pair, block in zip(coordinates(model[0]).flatten(1), *factors, blocks, strict=True):
        omega, gamma = (
            factor.diag().diag() if name in wide else factor
            for name, factor in zip(Factors._fields, pair, strict=True)
        )
        dense = kron(gamma, omega)
        if curvature == "ekfac":
            basis = kron(torch.linalg.eigh(gamma)[1], torch.linalg.eigh(omega)[1])
            dense = basis @ (basis.T @ block @ basis).diag().diag() @ basis.T
        dense = dense + 0.02 * torch.eye(len(dense))
        assert_close(natural[index], torch.linalg.solve(dense, flat[index]))
