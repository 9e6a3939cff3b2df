"""Boundary counts, compared with counting them one by one, and factors computed from them."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

from kfc.layers.registry import layer_for
from kfc.moments.stationary import uncorrelated_factor


def counts_of(module, inputs):
    module = module.double()
    return layer_for(module).boundary_counts(inputs, module(inputs))


def counted_one_by_one(size, kernel, stride, padding, dilation):
    """Return β(d, d′) of a one-dimensional convolution, with the homogeneous coordinate."""
    locations = range(0, size + 2 * padding - dilation * (kernel - 1), stride)
    counts = torch.zeros(1 + kernel, 1 + kernel, dtype=torch.float64)
    for t in locations:
        inside = [True] + [0 <= t + dilation * d - padding < size for d in range(kernel)]
        for (a, first), (b, second) in itertools.product(enumerate(inside), repeat=2):
            counts[a, b] += first and second
    return counts


@given(
    st.integers(1, 9), st.integers(1, 4), st.integers(1, 3), st.integers(0, 4), st.integers(1, 3)
)
@settings(max_examples=60, deadline=None)
def test_counts_along_one_dimension(size, kernel, stride, padding, dilation):
    if size + 2 * padding <= dilation * (kernel - 1):
        return
    module = nn.Conv1d(2, 3, kernel, stride, padding, dilation)
    inputs = torch.randn(5, 2, size, dtype=torch.float64)
    expected = 5 * counted_one_by_one(size, kernel, stride, padding, dilation)
    assert_close(counts_of(module, inputs), expected)


@pytest.mark.parametrize(("rows", "columns"), [(5, 7), (3, 3), (2, 4)])
def test_counts_are_those_of_theorem_1(rows, columns):
    """β(d, d′) = (T₁ - max(d₁, d₁′, 0) + min(d₁, d₁′, 0)) · (the same along the other axis)."""
    counts = counts_of(nn.Conv2d(1, 1, 3, padding=1), torch.ones(1, 1, rows, columns).double())
    offsets = list(itertools.product((-1, 0, 1), repeat=2))
    assert counts[0, 0] == rows * columns
    for index, d in enumerate(offsets, start=1):
        assert counts[0, index] == (rows - abs(d[0])) * (columns - abs(d[1]))
        for other, e in enumerate(offsets, start=1):
            sides = [
                size - max(a, b, 0) + min(a, b, 0)
                for size, a, b in zip((rows, columns), d, e, strict=True)
            ]
            assert counts[index, other] == sides[0] * sides[1]


def test_padding_that_repeats_the_map_has_no_boundary():
    module = nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular")
    counts = counts_of(module, torch.randn(2, 2, 4, 5).double())
    assert_close(counts, torch.full((10, 10), 2.0 * 4 * 5, dtype=torch.float64))


def test_a_linear_layer_sees_every_row():
    counts = counts_of(nn.Linear(4, 3), torch.randn(6, 2, 4).double())
    assert_close(counts, torch.full((2, 2), 12.0, dtype=torch.float64))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(
    "make",
    [
        lambda groups: nn.Conv2d(4, 6, (3, 2), 2, padding=1, groups=groups),
        lambda groups: nn.Conv1d(4, 2, 4, dilation=2, padding=5, groups=groups),
        lambda groups: nn.Conv3d(4, 2, 2, padding=1, groups=groups),
        lambda groups: nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, groups=groups),
        lambda groups: nn.ConvTranspose1d(4, 2, 4, stride=3, output_padding=1, groups=groups),
    ],
)
def test_the_factor_of_constant_maps(make, groups):
    """Constant maps have no covariance, so Ω is the second moment of their patches."""
    module = make(groups).double()
    layer = layer_for(module)
    channels = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    inputs = channels.reshape(1, 4, *(1,) * layer.dims).expand(3, 4, *(4,) * layer.dims)
    outputs = module(inputs)
    expected = layer.activation_moment(
        layer.row_source(inputs, outputs), homogeneous=True, diagonal=False
    )
    rows = layer.pixel_rows(inputs, outputs)
    rows = torch.cat([torch.ones_like(rows[:, :, :1]), rows], dim=2)
    pixel_moment = rows.mT @ rows / rows.shape[1]
    assert_close(
        uncorrelated_factor(pixel_moment, layer.boundary_counts(inputs, outputs)), expected
    )


@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 3), st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_uncorrelated_maps_have_this_factor(kernel, channels, padding, seed):
    """Compare each entry with the expected moment of patches of white noise with a mean."""
    generator = torch.Generator().manual_seed(seed)
    mean = torch.randn(channels, generator=generator, dtype=torch.float64)
    root = torch.randn(channels, channels, generator=generator, dtype=torch.float64)
    size = max(1, kernel - 2 * padding) + 1
    counts = counted_one_by_one(size, kernel, 1, padding, 1)
    moment = torch.zeros(1, 1 + channels, 1 + channels, dtype=torch.float64)
    moment[0, 0, 0] = 1
    moment[0, 0, 1:] = moment[0, 1:, 0] = mean
    moment[0, 1:, 1:] = root @ root.T + mean.outer(mean)
    factor = uncorrelated_factor(moment, counts)[0]
    for (j, d), (k, e) in itertools.product(
        itertools.product(range(channels), range(kernel)), repeat=2
    ):
        expected = counts[1 + d, 1 + e] * (mean[j] * mean[k] + (d == e) * (root @ root.T)[j, k])
        assert_close(factor[1 + j * kernel + d, 1 + k * kernel + e], expected)
    for j, d in itertools.product(range(channels), range(kernel)):
        assert_close(factor[0, 1 + j * kernel + d], counts[0, 1 + d] * mean[j])
    assert factor[0, 0] == counts[0, 0]
    assert torch.linalg.eigvalsh(factor).min() > -1e-9 * factor.diagonal().max()
