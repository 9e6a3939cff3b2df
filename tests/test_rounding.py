"""Products in bfloat16, and natural gradients without copies of the weights."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import kfc
from kfc.curvature.damped import Form
from kfc.curvature.kronecker import Accuracy, FactoredInverse, Factors
from kfc.curvature.low_rank import LowRank, times_between
from kfc.moments.folding import fold, whole
from kfc.moments.patches import Window, row_moment, window_moment
from ranks import run_ranks
from resuming import assert_resumes

COLUMNS = (64, 64)


@pytest.fixture
def rounding(monkeypatch):
    """Multiply in bfloat16 where that is allowed, also if this machine is not faster at it."""
    for room in ("low_rank", "kfc"):
        monkeypatch.setattr(f"kfc.curvature.{room}.multiplies_bfloat16", lambda device: True)


def dense(inverse):
    """Return f I - P Pᵀ."""
    size = inverse.columns.shape[1]
    eye = torch.eye(size, dtype=torch.float64)
    return inverse.floor * eye - inverse.columns @ inverse.columns.mT


@pytest.mark.parametrize("groups", [1, 3])
def test_a_product_between_two_inverses_of_low_rank_is_the_dense_one(groups):
    torch.manual_seed(0)
    left, right = (
        LowRank(floor, torch.randn(groups, size, rank).double())
        for floor, size, rank in ((0.7, 9, 4), (1.3, 14, 5))
    )
    matrix = torch.randn(groups, 9, 14).double()
    assert_close(times_between(left, matrix, right), dense(left) @ matrix @ dense(right))
    assert_close(left.times(matrix), dense(left) @ matrix)
    assert_close(right.after(matrix), matrix @ dense(right))


# channels_last


def convolutions(bias, groups):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1, bias=bias),
        nn.Tanh(),
        nn.Conv2d(8, 6, (3, 2), groups=groups, bias=bias),
        nn.Tanh(),
        nn.Conv2d(6, 40, 3, bias=bias),
        nn.Flatten(),
        nn.Linear(800, 3),
    )


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("overhead", [None, 0.2])
def test_natural_gradients_do_not_depend_on_the_memory_format(bias, groups, overhead, monkeypatch):
    # Inverses of low rank for small factors too
    for room in ("curvature.kfc", "curvature.kronecker", "optimizers.allowance"):
        monkeypatch.setattr(f"kfc.{room}.NARROWEST", 16)
    found = []
    for layout in (torch.contiguous_format, torch.channels_last):
        model = convolutions(bias, groups)
        images = torch.randn(16, 4, 8, 8, generator=torch.Generator().manual_seed(1)).double()
        model = model.double().to(memory_format=layout)
        preconditioner = kfc.Preconditioner(
            model, seed=0, schedule=kfc.Periods(1, 1, overhead=overhead)
        )
        for _ in range(2):
            model.zero_grad()
            F.cross_entropy(model(images.to(memory_format=layout)), torch.arange(16) % 3).backward()
            preconditioner.step()
        found.append([p.grad for p in model.parameters()])
        inverses = [
            layer.state.inverse for layer in preconditioner.engine.curvature.layers.values()
        ]
        assert any(i.activation.has_low_rank for i in inverses) == (overhead is not None)
    for one, other in zip(*found, strict=True):
        assert_close(one, other.contiguous())


def test_solutions_have_the_layout_of_the_gradients():
    model = convolutions(bias=False, groups=1).to(memory_format=torch.channels_last)
    images = torch.randn(16, 4, 8, 8).to(memory_format=torch.channels_last)
    preconditioner = kfc.Preconditioner(model, seed=0)
    F.cross_entropy(model(images), torch.arange(16) % 3).backward()
    before = [p.grad.stride() for p in model.parameters()]
    preconditioner.step()
    assert [p.grad.stride() for p in model.parameters()] == before


# bfloat16


def activations(size=600, rows=800):
    """Return rows with a mean and a decaying spectrum, as those of activations."""
    torch.manual_seed(0)
    scales = torch.arange(1, size + 1) ** -0.5
    basis = torch.linalg.qr(torch.randn(size, size)).Q
    return (torch.randn(1, rows, size) * scales) @ basis + 0.3


@pytest.mark.parametrize("homogeneous", [False, True])
def test_moments_of_rounded_rows_are_accurate_to_their_precision(homogeneous):
    rows = activations()
    found = row_moment(rows.bfloat16(), homogeneous=homogeneous, diagonal=False, fold=True)
    wide = F.pad(rows, (1, 0), value=1) if homogeneous else rows
    expected = wide.double().mT @ wide.double()
    assert found.dtype == torch.float32
    assert (whole(found) - expected).norm() < 2**-8 * expected.norm()
    assert (whole(found) - expected).norm() > 0
    # Narrow moments are not rounded further.
    narrow = rows[..., :20].bfloat16()
    found = row_moment(narrow, homogeneous=homogeneous, diagonal=False)
    assert_close(found, row_moment(narrow.float(), homogeneous=homogeneous, diagonal=False))


@pytest.mark.parametrize("size", [4, 24])
def test_moments_of_rounded_maps_are_accurate_to_their_precision(size):
    torch.manual_seed(0)
    maps, window = torch.rand(3, 64, size, size), Window.of(2, 3, padding=1)
    found = window_moment(maps.bfloat16(), window, homogeneous=True, diagonal=False, fold=True)
    expected = window_moment(maps.double(), window, homogeneous=True, diagonal=False)
    assert found.dtype == torch.float32
    assert (whole(found) - expected).norm() < 2**-7 * expected.norm()


def factors(damping_ratio):
    """Return factors and a damping, the share of which in Ω is a multiple of its mean."""
    activation = activations().mT @ activations() / 800
    mean = activation.diagonal(dim1=1, dim2=2).mean()
    derivative = torch.eye(4)[None] * mean
    return Factors(activation, derivative), float((damping_ratio * mean) ** 2)


def test_inverses_from_rounded_factors_are_within_the_tolerance(rounding):
    pair, damping = factors(damping_ratio=3.0)
    exact = FactoredInverse.of(Factors(*(each.double() for each in pair)), damping)
    gradient = (torch.randn(1, 4, 800) @ activations()) / 800
    expected = exact.apply(gradient.double())
    kept = Factors(fold(pair.activation).bfloat16(), pair.derivative)
    for each in (pair, kept):
        inverse = FactoredInverse.of(each, damping, 1.0, Accuracy(0.05, COLUMNS))
        assert inverse.activation.form is Form.LOW_RANK_OF_ROUNDED
        assert inverse.tensors["activation"].dtype == torch.float32
        assert (inverse.apply(gradient) - expected).norm() < 0.05 * expected.norm()


def test_a_small_damping_forbids_rounding(rounding, monkeypatch):
    pair, damping = factors(damping_ratio=0.05)
    inverse = FactoredInverse.of(pair, damping, 1.0, Accuracy(0.05, (32, 32)))
    assert inverse.activation.form is Form.LOW_RANK
    monkeypatch.setattr("kfc.curvature.low_rank.multiplies_bfloat16", lambda device: False)
    again = FactoredInverse.of(pair, damping, 1.0, Accuracy(0.05, (32, 32)))
    assert torch.equal(inverse.tensors["activation"], again.tensors["activation"])


# In training


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1200, 8), nn.Tanh(), nn.Linear(8, 3))


def train(model, optimizer, seeds):
    for seed in seeds:
        torch.manual_seed(seed)
        images = torch.randn(64, 1200) * torch.arange(1, 1201) ** -0.75
        optimizer.zero_grad()
        F.cross_entropy(model(images), torch.randint(3, (64,))).backward()
        optimizer.step()


def new(error=0.05):
    model = network()
    curvature = kfc.Kronecker(inverse_error=error)
    return model, kfc.KFC(model, seed=0, curvature=curvature, schedule=kfc.Periods(1, 2))


def test_wide_averages_are_kept_in_half_the_memory_and_shown_in_float32(rounding):
    found = {}
    for error in (None, 0.05):
        model, optimizer = new(error)
        train(model, optimizer, range(5))
        running = optimizer.engine.curvature.layers["0"].state.running
        assert running[0].dtype == (torch.float32 if error is None else torch.bfloat16)
        assert running[1].dtype == torch.float32
        found[error] = optimizer.factors["0"].activation
        assert found[error].dtype == torch.float32
    difference = (found[0.05] - found[None]).norm()
    assert 0 < difference < 2**-6 * found[None].norm()


def test_a_run_with_rounded_averages_resumes_bit_for_bit(rounding):
    optimizer = assert_resumes(new, train, range(5), range(5, 10))
    assert optimizer.engine.curvature.layers["0"].state.running[0].dtype == torch.bfloat16


def trained_on_ranks(rank, size):
    """Train with every placement; the ranks compare their averages in every step."""
    dtypes = {}
    for placement in ("shared", "gradients", "replicated"):
        model = network()
        wrapper = DistributedDataParallel(model)
        parallel = kfc.Parallel(placement=placement, consistency_period=1)
        optimizer = kfc.KFC(wrapper, seed=0, schedule=kfc.Periods(1, 2), parallel=parallel)
        train(wrapper, optimizer, range(rank, 10, size))
        dtypes[placement] = optimizer.engine.curvature.layers["0"].state.running[0].dtype
    return dtypes


def test_ranks_round_averages_only_if_all_of_them_have_the_inverse():
    for dtypes in run_ranks(trained_on_ranks, 2, 2, timeout=120):
        assert dtypes["shared"] == dtypes["replicated"] == torch.bfloat16
        assert dtypes["gradients"] == torch.float32
