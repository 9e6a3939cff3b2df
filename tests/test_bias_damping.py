"""Compare natural gradients with dense solves where bias and weight are damped differently."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

import kfc
from approximations import CURVATURES, FACTORED, approximation
from kfc.curvature.channels import invert_blocks
from kfc.curvature.damped import DampedInverse, Form, invert_shifted
from kfc.curvature.damping import UNDAMPED, Damping
from kfc.curvature.ekfac import MeasuredInverse
from kfc.curvature.kronecker import EigenInverse, FactoredInverse, Factors, damping_shifts
from reference import fitting_loss
from test_approximations import coordinates, dense_factors, exact_blocks, frozen_blocks, model_of
from test_kronecker import random_factor, vec
from test_layers import Locations

pytestmark = pytest.mark.usefixtures("double")

WEIGHT, BIAS = 0.5, 0.02
CASES = ("conv", "strided groups", "circular", "transposed", "linear", "linear, locations")
KINDS = {"factored": FactoredInverse, "eigen": EigenInverse}


def bias_groups(weight: float = WEIGHT, bias: float = BIAS, decay: float = 0.0) -> list[dict]:
    """Return groups that damp weights and biases by different γ, and decay the weights."""
    return [
        {"prefix": "*.bias", "damping": bias},
        {"prefix": "*.weight", "damping": weight - decay, "weight_decay": decay},
    ]


def natural_gradients(model, inputs, curvature, groups, **options):
    """Return the natural and the plain gradients, flattened, and the optimizer after two steps.

    The second moments of EKFAC are measured in the second step, in the bases of the first.
    """
    options = {"fisher": "exact", "factor_decay": 0.0, **options}
    optimizer = kfc.KFC(
        model,
        lr=0.0,
        momentum=0.0,
        clip=None,
        groups=groups,
        curvature=approximation(curvature, **options),
        schedule=kfc.Periods(1, 1),
    )
    for lr in (0.0, 1.0):
        for group in optimizer.param_groups:
            group["lr"] = lr
        before = flat(model)
        optimizer.zero_grad()
        fitting_loss(model(inputs)).backward()
        optimizer.step()
    natural = before - flat(model)
    plain = torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten()
                       for p in model.parameters()])  # fmt: skip
    with torch.no_grad():  # as it was, for the references
        torch.nn.utils.vector_to_parameters(before, model.parameters())
    optimizer.close()
    return natural, plain, optimizer


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().clone().flatten() for p in model.parameters()])


# Dense references. The coordinates of a group are those of a gradient (I, n), row by row.


def damping_of(rows: int, columns: int) -> torch.Tensor:
    """Return D of a block, as a dense matrix."""
    diagonal = torch.full((rows, columns), WEIGHT)
    diagonal[:, 0] = BIAS
    return diagonal.flatten().diag()


def scale_of(size: int) -> torch.Tensor:
    """Return S = diag(s, 1, ..., 1)."""
    diagonal = torch.ones(size)
    diagonal[0] = math.sqrt(BIAS / WEIGHT)
    return diagonal.diag()


def dense_blocks(curvature: str, model, inputs, inverse: str, wide: bool = False):
    """Return the dense damped block of each group."""
    result = []
    exact = exact_blocks(model, inputs)
    for omega, gamma, block in zip(*dense_factors(curvature, model, inputs), exact, strict=True):
        m, n = len(gamma), len(omega)
        if curvature == "diagonal":
            result.append(block.diag().diag() + damping_of(m, n))
            continue
        omega = omega.diag().diag() if wide else omega
        scale = scale_of(n)
        scaled = scale.inverse() @ omega @ scale.inverse()
        if curvature == "ekfac":
            # In the scaled coordinates; a diagonal Ω has the same eigenvectors in all of them.
            whole = torch.kron(torch.eye(m), scale)
            basis = torch.kron(torch.linalg.eigh(gamma)[1], torch.linalg.eigh(scaled)[1])
            moments = (basis.T @ whole.inverse() @ block @ whole.inverse() @ basis).diag().diag()
            result.append(whole @ basis @ moments @ basis.T @ whole + damping_of(m, n))
        elif inverse == "eigen":
            result.append(torch.kron(gamma, omega) + damping_of(m, n))
        else:
            pi = ((scaled.trace() / n) / (gamma.trace() / m)).sqrt()
            left = gamma + math.sqrt(WEIGHT) / pi * torch.eye(m)
            right = scaled + pi * math.sqrt(WEIGHT) * torch.eye(n)
            result.append(torch.kron(left, scale @ right @ scale))
    return result


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("curvature", CURVATURES)
@pytest.mark.parametrize("inverse", ["factored", "eigen"])
def test_the_natural_gradient_solves_the_dense_block(curvature, case, inverse):
    model, inputs = model_of(case)
    natural, plain, _ = natural_gradients(model, inputs, curvature, bias_groups(), inverse=inverse)
    blocks = dense_blocks(curvature, model, inputs, inverse)
    for index, dense in zip(coordinates(model[0]).flatten(1), blocks, strict=True):
        expected = torch.linalg.solve(dense, plain[index])
        assert_close(natural[index], expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("case", ["conv", "strided groups", "linear"])
@pytest.mark.parametrize("curvature", FACTORED)
@pytest.mark.parametrize("inverse", ["factored", "eigen"])
def test_a_wide_activation_factor_is_damped_coordinate_by_coordinate(curvature, case, inverse):
    model, inputs = model_of(case)
    limit = kfc.layers.layer_for(model[0]).factor_sizes()[1]
    natural, plain, _ = natural_gradients(
        model, inputs, curvature, bias_groups(), inverse=inverse, max_factor_size=limit
    )
    blocks = dense_blocks(curvature, model, inputs, inverse, wide=True)
    for index, dense in zip(coordinates(model[0]).flatten(1), blocks, strict=True):
        expected = torch.linalg.solve(dense, plain[index])
        assert_close(natural[index], expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("case", ["conv", "strided groups", "linear"])
@pytest.mark.parametrize("frozen", ["bias", "weight"])
@pytest.mark.parametrize("curvature", CURVATURES)
def test_a_single_trained_parameter_has_its_own_damping(curvature, frozen, case):
    model, inputs = model_of(case)
    layer = model[0]
    by_group = coordinates(layer).flatten(1)
    is_bias = by_group[0] >= layer.weight.numel()
    kept = ~is_bias if frozen == "bias" else is_bias
    still = getattr(layer, frozen).requires_grad_(False)
    natural, plain, optimizer = natural_gradients(
        model, inputs, curvature, bias_groups(), inverse="eigen"
    )
    still.requires_grad_(True)
    damping = WEIGHT if frozen == "bias" else BIAS
    assert optimizer.diagnostics["layers"]["0"]["damping"] == damping
    blocks = frozen_blocks(curvature, model, inputs, kept, frozen)
    for index, dense in zip(by_group[:, kept], blocks, strict=True):
        dense = dense + damping * torch.eye(len(dense))
        assert_close(natural[index], torch.linalg.solve(dense, plain[index]))


@pytest.mark.parametrize("frozen", [None, "bias", "weight"])
def test_a_normalisation_layer_damps_scale_and_shift_by_their_own_groups(frozen):
    inputs = torch.randn(6, 4, 3)
    norm = nn.GroupNorm(2, 4)
    model = nn.Sequential(norm, Locations(inputs))
    if frozen:
        getattr(norm, frozen).requires_grad_(False)
    natural, plain, optimizer = natural_gradients(model, inputs, "kfc", bias_groups())
    dampings = {"weight": WEIGHT, "bias": BIAS}
    dampings.pop(frozen, None)
    trained = [index for index, role in enumerate(("weight", "bias")) if role in dampings]
    damped = optimizer.blocks["0"] + torch.diag(torch.tensor(list(dampings.values())))
    gradient = plain.reshape(2, 4)[trained].T.unsqueeze(-1)
    expected = torch.linalg.solve(damped, gradient).squeeze(-1).T
    assert_close(natural.reshape(2, 4)[trained], expected)


positive = st.floats(1e-4, 1e2)


@given(st.integers(0, 2**20), positive, positive)
def test_blocks_of_scale_and_shift_are_inverted_exactly(seed, damping, shift_damping):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(5, 3, 2, generator=generator)
    blocks = rows.mT @ rows
    dense = blocks + torch.diag(torch.tensor([damping, shift_damping]))
    assert_close(
        invert_blocks(blocks, damping, shift_damping), torch.linalg.inv(dense), rtol=1e-7, atol=1e-9
    )


shapes = st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 4))


@given(shapes, st.sampled_from([1e-3, 1.0]), st.sampled_from([1e-3, 0.2, 50.0]))
def test_eigen_inverse_with_a_ratio_solves_the_exactly_damped_system(sizes, damping, ratio):
    groups, n, m = sizes
    factors = Factors(random_factor(groups, n), random_factor(groups, m))
    gradient = torch.randn(groups, m, n)
    natural = EigenInverse.of(factors, damping, ratio).apply(gradient)
    diagonal = torch.full((n,), damping)
    diagonal[0] = ratio * damping
    for g in range(groups):
        dense = torch.kron(factors.activation[g], factors.derivative[g])
        dense = dense + torch.kron(diagonal.diag(), torch.eye(m))
        assert_close(vec(natural[g]), torch.linalg.solve(dense, vec(gradient[g])))


@given(shapes, st.sampled_from([1e-3, 1.0]), st.sampled_from([1e-3, 0.2, 50.0]))
def test_factored_dampings_of_the_bias_multiply_to_its_damping(sizes, damping, ratio):
    groups, n, m = sizes
    factors = Factors(random_factor(groups, n), random_factor(groups, m))
    inverse = FactoredInverse.of(factors, damping, ratio)
    shifts = []
    for part, factor in zip((inverse.activation, inverse.derivative), factors, strict=True):
        dense = torch.linalg.inv(part.after(torch.eye(factor.shape[-1]).expand(groups, -1, -1)))
        shifts.append((dense - factor).diagonal(dim1=1, dim2=2))
        assert_close(dense, factor + shifts[-1].diag_embed(), rtol=1e-6, atol=1e-6)
    products = shifts[0].unsqueeze(1) * shifts[1].unsqueeze(2)
    expected = torch.full_like(products, damping)
    expected[:, :, 0] *= ratio
    assert_close(products, expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS.values())
@pytest.mark.parametrize("ratio", [1e-12, 1e-6, 1e6, 1e12])
@pytest.mark.parametrize("rank", [0, 1, 3, 40])
def test_degenerate_factors_have_finite_inverses(kind, dtype, ratio, rank):
    rows = torch.randn(1, rank, 40)
    factor = (rows.mT @ rows).to(dtype)
    for factors in (Factors(factor, factor), Factors(factor, torch.eye(3, dtype=dtype)[None])):
        gradient = torch.randn(1, factors.derivative.shape[-1], 40, dtype=dtype)
        assert torch.isfinite(kind.of(factors, 1e-3, ratio).apply(gradient)).all()


def test_explicit_inverses_are_unscaled_like_cholesky_factors():
    damped, right = random_factor(2, 4), torch.randn(2, 4, 3)
    scale = scale_of(4)
    expected = torch.linalg.solve(scale @ damped @ scale, right)
    kinds = ((torch.linalg.cholesky(damped), Form.CHOLESKY), (damped.inverse(), Form.EXPLICIT))
    for matrix, form in kinds:
        inverse = DampedInverse(matrix, form).unscaled(scale[0, 0].item())
        assert_close(inverse.times_(right.clone()), expected)


@pytest.mark.parametrize("ratio", [1e-3, 1e3])
def test_float32_inverses_are_accurate(ratio):
    rows = 1 + torch.randn(1, 200, 30)
    factors = Factors(rows.mT @ rows / 200, random_factor(1, 5) / 50)
    gradient = torch.randn(1, 5, 30)
    for kind in KINDS.values():
        exact = kind.of(factors, 0.1, ratio).apply(gradient)
        single = kind.of(Factors(*(f.float() for f in factors)), 0.1, ratio)
        error = single.apply(gradient.float()).double() - exact
        assert error.norm() < 1e-3 * exact.norm()
        assert error[:, :, 0].norm() < 1e-3 * exact[:, :, 0].norm()


# EKFAC's moments when the dampings change


@pytest.mark.parametrize("ratios", [(1.0, 0.1), (0.1, 1.0), (0.1, 0.1), (4.0, 0.3)])
def test_moments_are_carried_over_to_other_scaled_coordinates(ratios):
    """With the same factors, the block stays what it was, whichever coordinates express it."""
    factors = Factors(random_factor(2, 4), random_factor(2, 3))

    def measured(ratio: float) -> MeasuredInverse:
        return MeasuredInverse(EigenInverse.of(factors, 0.1, ratio).tensors)

    old = measured(ratios[0])
    # The true moments of Ω ⊗ Γ in the old coordinates: the eigenvalues themselves.
    old = old.averaged(old.tensors["eigenvalues"].flatten(1), 0.0)
    new = measured(ratios[1])
    carried = new.continuing(old)
    # What the old moments say about the new coordinates, by a dense product.
    for g in range(2):

        def whole(inverse, g=g):
            basis = inverse.bases
            return torch.kron(basis.derivative[g], basis.activation[g])

        back = torch.linalg.inv(whole(old))
        block = back.T @ old.tensors["eigenvalues"][g].flatten().diag() @ back
        assert_close(block, torch.kron(factors.derivative[g], factors.activation[g]))
        expected = (whole(new).T @ block @ whole(new)).diag()
        assert_close(carried.tensors["eigenvalues"][g].flatten(), expected)


# The two numbers


def test_the_ratio_of_dampings_is_one_where_there_is_no_scale():
    assert Damping(0.5, 0.1).bias_ratio == 0.2
    assert Damping(0.5, 0.5).bias_ratio == 1
    assert Damping(0.5, 0.0).bias_ratio == 1
    assert Damping(0.0, 0.5).bias_ratio == 1
    assert Damping(1.0, 1e-20).bias_ratio == 1
    assert UNDAMPED.bias_ratio == 1


@pytest.mark.parametrize("curvature", FACTORED)
@pytest.mark.parametrize(("weight", "bias"), [(0.5, 0.0), (0.0, 0.5)])
def test_kronecker_factors_use_the_weights_damping_if_one_is_zero(curvature, weight, bias):
    steps = []
    for of_bias in (bias, weight):
        torch.manual_seed(0)
        model, inputs = model_of("conv")
        groups = bias_groups(weight, of_bias)
        steps.append(natural_gradients(model, inputs, curvature, groups)[0])
        assert torch.isfinite(steps[-1]).all()
    assert torch.equal(*steps)


@pytest.mark.parametrize("curvature", CURVATURES)
@pytest.mark.parametrize("inverse", ["factored", "eigen"])
def test_equal_dampings_change_no_bit(curvature, inverse):
    """A bias in a group of its own, with the same λ and γ, changes nothing."""
    steps = []
    for prefixes in (["0"], ["0.bias", "0.weight"]):
        torch.manual_seed(0)
        model, inputs = model_of("conv")
        groups = [{"prefix": prefix, "damping": 0.25} for prefix in prefixes]
        steps.append(natural_gradients(model, inputs, curvature, groups, inverse=inverse)[0])
    assert torch.equal(*steps)


def test_equal_dampings_leave_the_factors_alone():
    factors = Factors(random_factor(2, 5), random_factor(2, 3))
    plain = invert_shifted(factors, damping_shifts(factors, 0.3))
    inverse = FactoredInverse.of(factors, 0.3, Damping(0.3, 0.3).bias_ratio)
    assert torch.equal(inverse.tensors["activation"], plain[0].explicit().matrix)
    assert torch.equal(inverse.tensors["derivative"], plain[1].explicit().matrix)
