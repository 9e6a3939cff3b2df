"""Symmetric matrices kept in half of their memory, and layers whose factors are kept so."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

import kfc
from kfc._helpers import all_finite, are_finite, finite_scalars, inner_product
from kfc.curvature.factor import trace
from kfc.moments import folding

WIDE = folding.NARROWEST + 3


@given(groups=st.integers(1, 3), size=st.integers(1, 40), seed=st.integers(0, 9))
def test_folding_a_symmetric_matrix_loses_nothing(groups, size, seed):
    generator = torch.Generator().manual_seed(seed)
    square = torch.randn(groups, size, size, generator=generator)
    matrices = square + square.mT
    folded = folding.fold(matrices)
    assert folded.shape == (groups, *folding.folded_shape(size))
    assert_close(folding.unfold(folded), matrices, rtol=0, atol=0)
    diagonals = matrices.diagonal(dim1=1, dim2=2)
    assert_close(folding.diagonal_of_folded(folded), diagonals, rtol=0, atol=0)
    assert folding.is_folded(folded)
    assert folding.unfolded_shape(folded.shape) == matrices.shape
    assert folding.width(folded) == size
    assert_close(trace(folded), trace(matrices))
    right = torch.randn(groups, size, 3, generator=generator)
    assert_close(folding.times(folded, right), matrices @ right)
    assert_close(folding.times(matrices, right), matrices @ right, rtol=0, atol=0)


def test_sums_of_folded_matrices_are_those_of_the_matrices():
    one, other = (torch.randn(1, 21, 21) for _ in range(2))
    one, other = one + one.mT, other + other.mT
    found = folding.unfold(folding.fold(one).lerp(folding.fold(other), 0.3))
    assert_close(found, one.lerp(other, 0.3))


@pytest.mark.parametrize("size", [512, 577, 1025, 4608, 4609])
def test_a_folded_matrix_takes_little_more_than_half_of_the_memory(size):
    rows, columns = folding.folded_shape(size)
    assert rows * columns < 0.59 * size**2


def test_only_groups_of_square_matrices_are_folded():
    assert folding.is_symmetric((1, 3, 3))
    assert not any(map(folding.is_symmetric, [(3, 3), (2, 3, 4), (1, 2, 3, 3), ()]))
    for shape in [(1, WIDE), (1, WIDE - 4, WIDE - 4), (WIDE, WIDE), (1, WIDE, 5)]:
        assert folding.kept_shape(shape) == shape


# In training


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDE, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def trained(model, curvature, batches):
    optimizer = kfc.Preconditioner(model, curvature=curvature, schedule=kfc.Periods(1, 1), seed=0)
    for images in batches:
        model.zero_grad()
        F.cross_entropy(model(images), torch.zeros(len(images), dtype=torch.long)).backward()
        optimizer.step()
    return optimizer


def batches():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(40, WIDE, generator=generator).double() for _ in range(3)]


def test_wide_factors_are_folded_running_averages():
    curvature = kfc.Kronecker(factor_decay=0.8, fraction=1)
    optimizer = trained(network(), curvature, batches())
    rows = [torch.cat([torch.ones(40, 1).double(), images], dim=1) for images in batches()]
    first, *others = [each.mT @ each / 40 for each in rows]
    expected = first
    for moment in others:
        expected = 0.8 * expected + 0.2 * moment
    assert_close(optimizer.factors["0"].activation, expected)
    size = WIDE + 1
    saved = optimizer.state_dict()["curvature"]["layers"]["0"]["running"][0]
    assert tuple(saved.shape) == (1, *folding.folded_shape(size))
    assert f"{size}x{size}" in optimizer.describe()


@pytest.mark.parametrize("other", [kfc.SUA, kfc.EKFAC])
def test_other_approximations_have_the_same_wide_factors(other):
    """In a linear layer, there are no correlations between locations that they leave out."""
    one, two = (trained(network(), kind(fraction=1), batches()) for kind in (kfc.Kronecker, other))
    assert_close(one.factors["0"].activation, two.factors["0"].activation)
    assert_close(one.factors["0"].derivative, two.factors["0"].derivative)


# Sums over tensors


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_an_entry_that_is_not_finite_shows(bad, dtype):
    large = torch.finfo(torch.float16).max
    tensors = [torch.full((3, 5), large, dtype=dtype), torch.zeros(0), torch.ones(2, dtype=dtype)]
    assert all_finite(finite_scalars(tensors))
    assert are_finite(finite_scalars(tensors))
    tensors[0][1, 2] = bad
    assert not all_finite(finite_scalars(tensors))
    assert not are_finite(finite_scalars(tensors))


@pytest.mark.parametrize("dtypes", [(torch.bfloat16,) * 2, (torch.float32,) * 2, (None, None)])
def test_inner_products_do_not_depend_on_the_memory_format(dtypes):
    first_dtype, second_dtype = dtypes[0] or torch.bfloat16, dtypes[1] or torch.float64
    one, other = torch.randn(5, 4, 2, 5).to(first_dtype), torch.randn(5, 4, 2, 5).to(second_dtype)
    expected = (one.double()[1:4] * other.double()[1:4]).sum()
    formats = (torch.contiguous_format, torch.channels_last)
    for first in formats:
        for second in formats:
            pair = one.to(memory_format=first)[1:4], other.to(memory_format=second)[1:4]
            found = inner_product(*pair)
            assert found.dtype == torch.promote_types(second_dtype, torch.float32)
            assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
