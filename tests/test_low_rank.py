"""Inverses of wide factors from leading eigenpairs, compared with dense solves in float64."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import kfc
from kfc.curvature.damped import DampedInverse, Form, invert_shifted
from kfc.curvature.factor import trace
from kfc.curvature.kronecker import Accuracy, FactoredInverse, Factors
from kfc.curvature.low_rank import (
    _inverse,
    _spectrum,
    after,
    low_rank_inverse,
    most_columns,
    times_,
)
from kfc.moments.folding import fold
from ranks import run_ranks
from resuming import assert_resumes

SIZE = 300
MOST = most_columns(SIZE)
# Wide enough to be folded
WIDE = 1100
# The largest ranks of the inverses of wide_factors()
COLUMNS = most_columns(WIDE + 5), 0
DAMPING = torch.tensor([0.1, 0.02], dtype=torch.float64)


def decaying_factor(size=SIZE, groups=2, power=2.0, seed=0):
    """Return factors with the eigenvalues 1, 2^-power, 3^-power, ..., and roots of them."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(groups, size, size, generator=generator, dtype=torch.float64)
    basis = torch.linalg.qr(noise).Q
    values = torch.arange(1, size + 1, dtype=torch.float64) ** -power
    return (basis * values) @ basis.mT, basis * values.sqrt()


def damped(factor, shift=DAMPING):
    return factor + shift.view(-1, 1, 1) * torch.eye(factor.shape[-1], dtype=factor.dtype)


def relative_errors(inverse, factor, root, shift=DAMPING):
    """Return the error of solutions for right-hand sides with the second moments of the factor."""
    generator = torch.Generator().manual_seed(1)
    shape = (len(root), root.shape[-1], 400)
    noise = torch.randn(shape, generator=generator, dtype=torch.float64)
    exact = torch.linalg.solve(damped(factor, shift), root @ noise)
    difference = times_(inverse, root @ noise) - exact
    return (difference.square().sum((1, 2)) / exact.square().sum((1, 2))).sqrt()


def test_a_product_is_that_of_the_dense_matrix():
    matrix, right = torch.randn(2, 6, 1 + 3).double(), torch.randn(2, 6, 5).double()
    matrix[..., 0] = torch.tensor([[2.0], [3.0]])
    columns = matrix[..., 1:]
    dense = matrix[..., :1] * torch.eye(6) - columns @ columns.mT
    assert_close(times_(matrix, right.clone()), dense @ right)
    assert_close(after(right.mT, matrix), (dense @ right).mT)


def test_it_is_the_inverse_with_the_best_number_in_place_of_the_small_eigenvalues():
    factor, _ = decaying_factor()
    matrix = low_rank_inverse(factor, DAMPING, 1e-2, MOST)
    rank = matrix.shape[-1] - 1
    values, basis = torch.linalg.eigh(factor)
    inverses, small = 1 / (values + DAMPING.unsqueeze(-1)), values[:, :-rank]
    mean = (small * inverses[:, :-rank]).sum(1, keepdim=True) / small.sum(1, keepdim=True)
    inverses[:, :-rank] = mean
    expected = (basis * inverses.unsqueeze(1)) @ basis.mT
    found = after(torch.eye(SIZE, dtype=torch.float64).expand(2, -1, -1), matrix)
    # Subspace iteration finds the last of the eigenvectors less accurately than the first.
    assert (found - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize("tolerance", [0.2, 0.05, 0.02])
def test_the_error_is_close_to_the_tolerance(tolerance):
    factor, root = decaying_factor()
    matrix = low_rank_inverse(factor, DAMPING, tolerance, MOST)
    errors = relative_errors(matrix, factor, root)
    assert errors.max() <= tolerance
    assert errors.max() > 0.6 * tolerance


@pytest.mark.parametrize("power", [1.2, 1.5, 2.0])
@pytest.mark.parametrize("passes", [1, 2, 4])
def test_the_error_is_estimated_well(power, passes):
    factor, root = decaying_factor(power=power)
    generator = torch.Generator().manual_seed(3)
    columns = torch.randn(2, SIZE, 60, generator=generator, dtype=torch.float64)
    for _ in range(passes):
        columns = torch.linalg.qr(factor @ columns).Q
    found = _spectrum(factor, trace(factor), columns, generator)
    levels, estimates = found.levels_and_errors(DAMPING)
    for rank in (30, 60):
        inverse = _inverse(found, DAMPING, levels[:, rank - 1 : rank], rank)
        expected = relative_errors(inverse, factor, root)
        ratios = estimates[:, rank - 1] / expected
        assert ratios.min() > 0.8
        assert ratios.max() < 1.4


def test_a_refresh_starts_from_the_last_one_and_keeps_the_tolerance():
    factor, root = decaying_factor()
    other, other_root = decaying_factor(seed=5)
    matrix = low_rank_inverse(factor, DAMPING, 0.05, MOST)
    for weight in (0.1, 0.3, 0.5):
        mixed = (1 - weight) * factor + weight * other
        both = torch.cat([(1 - weight) ** 0.5 * root, weight**0.5 * other_root], dim=2)
        matrix = low_rank_inverse(mixed, DAMPING, 0.05, MOST, start=matrix)
        assert relative_errors(matrix, mixed, both).max() <= 0.05


def test_a_start_saves_products():
    factor, _ = decaying_factor(600, groups=1)
    counted = []

    class Counting(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func in (torch.Tensor.matmul, torch.Tensor.__matmul__) and args[0] is watched:
                counted.append(args[1].shape[-1])
            return super().__torch_function__(func, types, args, kwargs or {})

    watched = factor.as_subclass(Counting)
    first = low_rank_inverse(watched, DAMPING[:1], 0.05, most_columns(600))
    cold = sum(counted)
    counted.clear()
    low_rank_inverse(
        watched, DAMPING[:1], 0.05, most_columns(600), start=first.as_subclass(torch.Tensor)
    )
    assert sum(counted) < cold


def test_a_spectrum_far_above_the_damping_has_no_inverse_of_low_rank():
    values = torch.logspace(0, -9, SIZE, dtype=torch.float64)
    assert low_rank_inverse(values.diag()[None], DAMPING[:1] * 1e-9, 0.05, MOST) is None


def test_no_damping_of_a_singular_factor_leaves_it_to_the_exact_inverse():
    factor, _ = decaying_factor(groups=1)
    values, basis = torch.linalg.eigh(factor)
    values[:, :-5] = 0
    singular = (basis * values.unsqueeze(1)) @ basis.mT
    found = low_rank_inverse(singular, torch.zeros(1, dtype=torch.float64), 0.05, MOST)
    assert found is None or torch.isfinite(found).all()


def test_a_limit_by_costs_is_kept_whatever_the_error():
    """The inverse is then that of the leading eigenpairs, with a number for the others."""
    values = torch.full((SIZE,), 1e-3, dtype=torch.float64)
    values[:4] = torch.tensor([1.0, 0.8, 0.6, 0.5])
    factor, shift = values.diag()[None], DAMPING[:1] * 1e-6
    assert low_rank_inverse(factor, shift, 0.05, MOST) is None
    found = low_rank_inverse(factor, shift, 0.05, 4)
    dense = after(torch.eye(SIZE, dtype=torch.float64)[None], found)[0]
    assert_close(dense.diag(), 1 / (values + shift), rtol=0.1, atol=0)
    assert (torch.linalg.eigvalsh(dense) > 0).all()
    # A start with more columns than are allowed now
    wider = low_rank_inverse(factor, shift, 1e-6, 5, start=torch.randn(1, SIZE, 12).double())
    assert wider.shape[-1] <= 1 + 5


@pytest.mark.parametrize("groups", [1, 2])
def test_folded_factors_have_the_same_inverses(groups):
    factor, _ = decaying_factor(groups=groups)
    for tolerance in (None, 0.05):
        one, other = (
            invert_shifted([each], [DAMPING[:groups]], tolerance, [MOST], [None])[0]
            for each in (factor, fold(factor))
        )
        assert one.form is other.form
        assert_close(one.matrix.abs(), other.matrix.abs())


def test_a_factor_of_zeros_is_inverted_by_its_damping():
    zero = torch.zeros(1, SIZE, SIZE)
    found = times_(low_rank_inverse(zero, torch.tensor([0.5]), 0.05, MOST), torch.ones(1, SIZE, 1))
    assert_close(found, torch.full((1, SIZE, 1), 2.0))


def test_it_is_unscaled_like_the_dense_inverse():
    factor, _ = decaying_factor()
    matrix, right = low_rank_inverse(factor, DAMPING, 0.05, MOST), torch.randn(2, SIZE, 3).double()
    scale = torch.eye(SIZE, dtype=torch.float64)
    scale[0, 0] = 3.0
    inverse = scale.inverse()
    expected = inverse @ times_(matrix, inverse @ right)
    assert_close(DampedInverse(matrix, Form.LOW_RANK).unscaled(3.0).times_(right.clone()), expected)


def wide_factors():
    activation, _ = decaying_factor(WIDE + 5, groups=1)
    derivative, _ = decaying_factor(6, groups=1)
    return Factors(activation, derivative)


def test_only_wide_factors_are_of_low_rank():
    factors = wide_factors()
    exact, cheap = (
        FactoredInverse.of(factors, 1e-3, 1.0, Accuracy(t, COLUMNS)) for t in (None, 0.05)
    )
    assert [exact.activation.form, exact.derivative.form] == [Form.CHOLESKY, Form.EXPLICIT]
    assert [cheap.activation.form, cheap.derivative.form] == [Form.LOW_RANK, Form.EXPLICIT]
    again = FactoredInverse.of(factors, 1e-3, 1.0, Accuracy(0.05, COLUMNS, cheap))
    gradient = torch.randn(1, 6, WIDE + 5).double() @ factors.activation
    expected = exact.apply(gradient)
    for inverse in (cheap, again):
        assert (inverse.apply(gradient) - expected).norm() < 0.05 * expected.norm()


def test_the_damping_of_a_bias_is_its_own():
    factors, ratio = wide_factors(), 50.0
    exact, cheap = (
        FactoredInverse.of(factors, 1e-3, ratio, Accuracy(t, COLUMNS)) for t in (None, 0.01)
    )
    assert cheap.activation.form is Form.LOW_RANK
    gradient = torch.randn(1, 6, WIDE + 5).double() @ factors.activation
    expected = exact.apply(gradient)
    assert (cheap.apply(gradient) - expected).norm() < 0.02 * expected.norm()


# In training


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDE, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def batch(seed, rows=64):
    generator = torch.Generator().manual_seed(seed)
    scales = torch.arange(1, WIDE + 1, dtype=torch.float64) ** -0.75
    images = 3 * scales * torch.randn(rows, WIDE, generator=generator, dtype=torch.float64)
    return images, torch.randint(3, (rows,), generator=generator)


def train(model, optimizer, seeds, run=None, where=slice(None)):
    for seed in seeds:
        images, labels = (part[where] for part in batch(seed))
        optimizer.zero_grad()
        F.cross_entropy((run or model)(images), labels).backward()
        optimizer.step()


def forms(optimizer):
    layers = optimizer.engine.curvature.layers
    return {name: layer.state.inverse.activation.form for name, layer in layers.items()}


def test_natural_gradients_are_within_the_tolerance_of_exact_ones():
    found = {}
    for error in (None, 0.05):
        model = network()
        curvature = kfc.Kronecker(inverse_error=error, factor_decay=0.5)
        preconditioner = kfc.Preconditioner(
            model, curvature=curvature, seed=0, schedule=kfc.Periods(1, 1)
        )
        for seed in range(4):
            images, labels = batch(seed, rows=2048)
            model.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            preconditioner.step()
        found[error] = model[0].weight.grad.clone()
        assert (forms(preconditioner)["0"] is Form.LOW_RANK) == (error is not None)
    assert (found[0.05] - found[None]).norm() < 0.1 * found[None].norm()


@pytest.mark.parametrize("parallel", [None, kfc.Parallel(asynchronous=True, deterministic=True)])
def test_a_run_resumes_bit_for_bit(parallel):
    def new():
        model = network()
        schedule = kfc.Periods(1, 2)
        return model, kfc.KFC(model, seed=0, schedule=schedule, parallel=parallel)

    optimizer = assert_resumes(new, train, range(5), range(5, 10))
    assert forms(optimizer)["0"] is Form.LOW_RANK


def test_a_state_with_too_many_columns_is_refused():
    model = network()
    optimizer = kfc.KFC(model, seed=0)
    train(model, optimizer, range(2))
    state = optimizer.state_dict()
    inverse = state["curvature"]["curvature"]["layers"]["0"]["inverse"]
    inverse["activation"] = torch.zeros(1, WIDE + 1, most_columns(WIDE + 1) + 2)
    with pytest.raises(ValueError, match="activation"):
        optimizer.load_state_dict(state)


def trained_on_ranks(rank, size):
    found = {}
    for placement in ("shared", "gradients", "replicated"):
        model = network()
        wrapper = DistributedDataParallel(model)
        parallel = kfc.Parallel(placement=placement)
        optimizer = kfc.KFC(wrapper, seed=0, schedule=kfc.Periods(1, 2), parallel=parallel)
        train(model, optimizer, range(5), wrapper, slice(rank * 32, rank * 32 + 32))
        found[placement] = [p.detach().clone() for p in model.parameters()]
    return found


def test_ranks_share_inverses_of_low_rank():
    first, second = run_ranks(trained_on_ranks, 2, 2, timeout=120)
    for placement, parameters in first.items():
        for one, two in zip(parameters, second[placement], strict=True):
            assert torch.equal(one, two), placement
        for one, two in zip(parameters, first["replicated"], strict=True):
            assert_close(one, two)


def test_the_description_shows_the_memory_of_the_expected_inverse_and_of_that_in_use():
    sizes = {}
    for error in (None, 0.1):
        model = network()
        optimizer = kfc.KFC(model, seed=0, curvature=kfc.Kronecker(inverse_error=error))
        before = optimizer.describe()
        train(model, optimizer, range(2))
        found = [
            float(re.search(r"total curvature memory: ([\d.]+) MiB", text)[1])
            for text in (before, optimizer.describe())
        ]
        assert found[1] <= found[0]
        sizes[error] = found
    assert sizes[0.1][0] < 0.6 * sizes[None][0]
