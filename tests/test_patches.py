"""Patch moments against the layer's own Jacobian."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import kfc
from kfc.patches import (
    Window,
    correlation_pays,
    moment_by_correlation,
    patch_chunks,
    row_moment,
)
from reference import receptive_rows

CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


@st.composite
def convolutions(draw):
    """A convolution and an input that fits it, of every kind."""
    dims = draw(st.integers(1, 3))
    sizes = st.integers(1, {1: 9, 2: 6, 3: 4}[dims])
    small = st.integers(1, {1: 4, 2: 3, 3: 2}[dims])
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    channels = groups * draw(st.integers(1, 2))

    def each(strategy):
        return tuple(draw(strategy) for _ in range(dims))

    mode = draw(st.sampled_from(["zeros", "zeros", "reflect", "replicate", "circular"]))
    stride = each(st.integers(1, 3))
    padding = draw(st.sampled_from(["number", "tuple", "same", "valid"]))
    if padding == "number":
        padding = draw(st.integers(0, 2))
    elif padding == "tuple":
        padding = each(st.integers(0, 2))
    elif padding == "same":
        stride = (1,) * dims
    size, kernel, dilation = each(sizes), each(small), each(st.integers(1, 2))
    module = CONVOLUTIONS[dims](
        channels,
        groups * draw(st.integers(1, 2)),
        kernel,
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        padding_mode=mode,
        bias=draw(st.booleans()),
        dtype=torch.float64,
    )
    inputs = torch.randn(draw(st.integers(1, 3)), channels, *size, dtype=torch.float64)
    try:
        module(inputs)
    except RuntimeError:
        assume(False)  # the map does not fit under the kernel, or the padding mode needs more of it
    return module, inputs


@given(convolutions(), st.booleans())
def test_second_moment_of_every_convolution(case, channels_last):
    module, inputs = case
    if channels_last and inputs.dim() == 4:
        inputs = inputs.to(memory_format=torch.channels_last)
    moment = kfc.patches.second_moment(
        inputs,
        module.kernel_size,
        module.stride,
        module.padding,
        module.dilation,
        module.groups,
        bias=module.bias is not None,
        padding_mode=module.padding_mode,
    )
    rows = receptive_rows(module, inputs)
    expected = rows.mT @ rows / inputs.shape[0]
    if module.groups == 1:
        expected = expected[0]
    torch.testing.assert_close(moment, expected, rtol=1e-10, atol=1e-10)


@settings(max_examples=150)
@given(convolutions())
def test_moments_by_correlation_are_the_patches_moments(case):
    """Whether it pays or not."""
    module, inputs = case
    handler = kfc.layers.ConvolutionHandler(module)
    moment, _ = moment_by_correlation(inputs, handler.window())
    rows = receptive_rows(module, inputs)
    if module.bias is not None:
        rows = rows[:, :, 1:]
    torch.testing.assert_close(moment, rows.mT @ rows, rtol=1e-10, atol=1e-10)
    assert torch.equal(moment, moment.mT)


@settings(max_examples=120)
@given(convolutions(), st.booleans())
def test_second_moment_of_every_convolution_in_float32(case, by_correlation):
    module, wide = case
    window = kfc.layers.ConvolutionHandler(module).window()
    inputs = wide.float()
    if by_correlation:
        moment, trusted = moment_by_correlation(inputs, window)
        assume(trusted)
    else:
        moment = sum(
            row_moment(rows, homogeneous=False, diagonal=False)
            for rows in patch_chunks(inputs, window)
        )
    rows = receptive_rows(module, inputs.double())
    if module.bias is not None:
        rows = rows[:, :, 1:]
    expected = rows.mT @ rows
    assert (moment - expected).abs().max() <= 1e-5 * expected.abs().max()


# (channels, size, kernel, stride, padding, groups): a few that real networks have.
USUAL = [
    (3, 32, 5, 1, 2, 1),
    (8, 8, 3, 1, 1, 1),
    (4, 14, 7, 1, 3, 1),
    (3, 24, 7, 2, 3, 1),
    (6, 9, 5, 1, 0, 3),
]


@pytest.mark.parametrize("way", ["correlation", "patches"])
@pytest.mark.parametrize("values", ["random", "constant", "rectified"])
@pytest.mark.parametrize(("channels", "size", "kernel", "stride", "padding", "groups"), USUAL)
def test_float32_moments(channels, size, kernel, stride, padding, groups, values, way, monkeypatch):
    always, never = -math.inf, math.inf
    monkeypatch.setattr(kfc.patches, "CORRELATION_START", always if way == "correlation" else never)
    inputs = torch.randn(32, channels, size, size)
    if values == "constant":
        inputs = torch.ones_like(inputs)
    elif values == "rectified":
        inputs = inputs.relu()
    window = Window.of(2, kernel, stride, padding, groups=groups)
    found = kfc.patches.second_moment(inputs, kernel, stride, padding, groups=groups)
    wide = sum(
        row_moment(rows, homogeneous=True, diagonal=False)
        for rows in patch_chunks(inputs.double(), window)
    )
    expected = (wide[0] if groups == 1 else wide) / 32
    largest = expected.abs().max()
    assert (found - expected).abs().max() < 1e-5 * largest
    assert torch.equal(found, found.mT)
    assert torch.linalg.eigvalsh(found.double()).min() > -1e-5 * largest
    channels_last = inputs.to(memory_format=torch.channels_last)
    other = kfc.patches.second_moment(channels_last, kernel, stride, padding, groups=groups)
    assert (other - found).abs().max() < 1e-6 * largest


def test_blocks_of_frequencies_add_up(monkeypatch):
    inputs = torch.randn(5, 3, 9, 8, dtype=torch.float64)
    window = Window.of(2, 3, padding=1)
    whole, trusted = moment_by_correlation(inputs, window)
    assert trusted
    monkeypatch.setattr(kfc.spectral, "BLOCK_ELEMENTS", 1)
    monkeypatch.setattr(kfc.spectral, "CHUNK_ELEMENTS", 1)
    parts, _ = moment_by_correlation(inputs, window)
    torch.testing.assert_close(parts, whole)


@pytest.mark.parametrize("brightness", [1e2, 1e4])
def test_a_bright_border_does_not_drown_the_rest(brightness):
    """Differences of large sums would: such maps are done by patches."""
    inputs = torch.randn(64, 16, 14, 14)
    inputs[..., -2:] *= brightness
    found = kfc.patches.second_moment(inputs, 5)
    expected = kfc.patches.second_moment(inputs.double(), 5)
    scale = expected.diagonal().sqrt()
    assert ((found - expected).abs() / scale.outer(scale)).max() < 1e-4


def test_a_unit_that_is_active_at_the_border_alone_is_no_reason_for_patches():
    inputs = torch.randn(64, 16, 14, 14).relu()
    inputs[:, 3] *= 1e-2
    inputs[:, 3, 1:] = 0
    inputs[:, 5] = 0
    found, trusted = moment_by_correlation(inputs, Window.of(2, 5, padding=2))
    assert trusted
    expected = kfc.patches.second_moment(inputs.double(), 5, padding=2, bias=False)
    assert (found[0] / 64 - expected).abs().max() < 1e-5 * expected.max()


def test_a_way_is_chosen_by_the_whole_batch_and_the_map():
    window = Window.of(2, 3, padding=1)
    assert correlation_pays(torch.empty(64, 64, 14, 14, device="meta"), window)
    assert not correlation_pays(torch.empty(1, 256, 14, 14, device="meta"), window)
    long = Window.of(1, 15, padding=7)
    assert not correlation_pays(torch.empty(64, 64, 4000, device="meta"), long)


class LargestTensor(TorchDispatchMode):
    """Remembers the size of the largest tensor that any operation made."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for made in result if isinstance(result, (tuple, list)) else [result]:
            # A view, however large it looks, has no elements of its own.
            if isinstance(made, torch.Tensor) and not made._is_view():
                self.elements = max(self.elements, made.numel())
        return result


def test_no_patch_matrix_is_made():
    inputs = torch.randn(256, 16, 16, 16)
    with LargestTensor() as seen:
        kfc.patches.second_moment(inputs, 5, padding=2)
    patches = 256 * 16 * 16 * 16 * 25
    assert 0 < seen.elements < patches / 12
    assert seen.elements <= 2 * inputs.numel()


def test_under_autocast_the_result_is_as_precise():
    inputs = torch.randn(8, 4, 8, 8)
    plain = kfc.patches.second_moment(inputs, 3, padding=1)
    with torch.autocast("cpu", torch.bfloat16):
        inside = kfc.patches.second_moment(inputs, 3, padding=1)
    assert torch.equal(plain, inside)


def test_one_by_one_kernels_are_a_plain_product():
    inputs = torch.randn(4, 3, 5, 5)
    assert not correlation_pays(inputs, Window.of(2, 1))
    rows = inputs.movedim(1, -1).reshape(-1, 3)
    found = kfc.patches.second_moment(inputs, 1, bias=False)
    torch.testing.assert_close(found, rows.T @ rows / 4)


def test_chunks_add_up(monkeypatch):
    inputs = torch.randn(7, 2, 6, 6, dtype=torch.float64)
    window = Window.of(2, 3, padding=1)
    whole = kfc.patches.second_moment(inputs, 3, padding=1)
    monkeypatch.setattr(kfc.patches, "CHUNK_ELEMENTS", 2 * 18 * 36)
    chunks = list(patch_chunks(inputs, window))
    assert len(chunks) == 4
    parts = sum(row_moment(rows, homogeneous=True, diagonal=False) for rows in chunks)
    torch.testing.assert_close(parts[0] / 7, whole)


def test_half_precision_accumulates_in_float32():
    inputs = torch.randn(4, 2, 5, 5, dtype=torch.bfloat16)
    moment = kfc.patches.second_moment(inputs, 3)
    assert moment.dtype == torch.float32
    wide = kfc.patches.second_moment(inputs.float(), 3)
    torch.testing.assert_close(moment, wide)


@pytest.mark.parametrize(
    ("shape", "arguments", "match"),
    [
        ((2, 3), {"kernel_size": 1}, "1 to 3 spatial"),
        ((2, 1, 4), {"kernel_size": 5}, "smaller than the kernel"),
        ((2, 1, 4, 4), {"kernel_size": 6}, "smaller than the kernel"),
        ((2, 1, 4, 4), {"kernel_size": (2, 2, 2)}, "kernel_size"),
        ((2, 1, 4), {"kernel_size": 2, "padding": "full"}, "padding"),
        ((2, 1, 4), {"kernel_size": 2, "padding_mode": "mirror"}, "padding_mode"),
        ((2, 1, 4), {"kernel_size": 0}, "kernel_size"),
        ((2, 1, 4), {"kernel_size": 2, "stride": 0}, "stride"),
        ((2, 1, 4), {"kernel_size": 2, "stride": 2, "padding": "same"}, "same"),
        ((2, 1, 4), {"kernel_size": 2, "padding": -1}, "padding"),
        ((2, 4, 4), {"kernel_size": 2, "groups": 3}, "3 groups"),
        ((0, 4, 4), {"kernel_size": 2}, "empty"),
    ],
)
def test_bad_arguments_are_refused(shape, arguments, match):
    with pytest.raises(ValueError, match=match):
        kfc.patches.second_moment(torch.zeros(shape), **arguments)
