"""Second moments of patches, compared with the layer's own Jacobian."""

import gc
import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import kfc
from kfc.layers.registry import layer_for
from kfc.moments import patches
from kfc.moments.patches import (
    Window,
    correlation_pays,
    moment_by_correlation,
    patch_chunks,
    row_moment,
)
from kfc.moments.spectral import gram
from reference import receptive_rows

CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


def patch_moment(inputs, window, homogeneous=False):
    """Return the second moment of the plain patch matrix."""
    return sum(
        row_moment(rows, homogeneous=homogeneous, diagonal=False)
        for rows in patch_chunks(inputs, window)
    )


@st.composite
def convolutions(draw):
    """Draw a convolution of any kind and an input that fits it."""
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
        assume(False)  # the map is too small for the kernel or for the padding mode
    return module, inputs


@given(convolutions(), st.booleans())
def test_second_moment_of_every_convolution(case, channels_last):
    module, inputs = case
    if channels_last and inputs.dim() == 4:
        inputs = inputs.to(memory_format=torch.channels_last)
    moment = kfc.moments.second_moment(
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
def test_autocorrelations_give_the_moments_of_patches(case):
    """Also where they are not the cheaper way."""
    module, inputs = case
    moment, _ = moment_by_correlation(inputs, layer_for(module).window())
    rows = receptive_rows(module, inputs)
    if module.bias is not None:
        rows = rows[:, :, 1:]
    torch.testing.assert_close(moment, rows.mT @ rows, rtol=1e-10, atol=1e-10)
    assert torch.equal(moment, moment.mT)


@settings(max_examples=120)
@given(convolutions(), st.booleans())
def test_second_moment_of_every_convolution_in_float32(case, by_correlation):
    module, wide = case
    window = layer_for(module).window()
    inputs = wide.float()
    if by_correlation:
        moment, accurate = moment_by_correlation(inputs, window)
        assume(accurate)
    else:
        moment = patch_moment(inputs, window)
    rows = receptive_rows(module, inputs.double())
    if module.bias is not None:
        rows = rows[:, :, 1:]
    expected = rows.mT @ rows
    assert (moment - expected).abs().max() <= 1e-5 * expected.abs().max()


# (channels, size, kernel, stride, padding, groups) of layers in real networks.
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
    monkeypatch.setattr(patches, "CORRELATION_START", always if way == "correlation" else never)
    inputs = torch.randn(32, channels, size, size)
    if values == "constant":
        inputs = torch.ones_like(inputs)
    elif values == "rectified":
        inputs = inputs.relu()
    window = Window.of(2, kernel, stride, padding, groups=groups)
    found = kfc.moments.second_moment(inputs, kernel, stride, padding, groups=groups)
    wide = patch_moment(inputs.double(), window, homogeneous=True)
    expected = (wide[0] if groups == 1 else wide) / 32
    largest = expected.abs().max()
    assert (found - expected).abs().max() < 1e-5 * largest
    assert torch.equal(found, found.mT)
    assert torch.linalg.eigvalsh(found.double()).min() > -1e-5 * largest
    channels_last = inputs.to(memory_format=torch.channels_last)
    other = kfc.moments.second_moment(channels_last, kernel, stride, padding, groups=groups)
    assert (other - found).abs().max() < 1e-6 * largest


def test_blocks_of_frequencies_add_up(monkeypatch):
    inputs = torch.randn(5, 3, 9, 8, dtype=torch.float64)
    window = Window.of(2, 3, padding=1)
    whole, accurate = moment_by_correlation(inputs, window)
    assert accurate
    monkeypatch.setattr(kfc.moments.spectral, "BLOCK_ELEMENTS", 1)
    monkeypatch.setattr(kfc.moments.spectral, "CHUNK_ELEMENTS", 1)
    parts, _ = moment_by_correlation(inputs, window)
    torch.testing.assert_close(parts, whole)


def living_bytes():
    """Return the memory of all tensors that Python can reach."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize(
    ("size", "kernel"), [((30, 33, 40), 3), ((65, 20, 14), 5), ((300, 310), 7)], ids=str
)
def test_large_maps_leave_no_large_matrix_in_memory(size, kernel):
    inputs = torch.randn(1, 2, *size, dtype=torch.float64)
    window = Window.of(len(size), kernel, padding=kernel // 2)
    expected = patch_moment(inputs, window)
    before = living_bytes()
    moment, accurate = moment_by_correlation(inputs, window)
    # A matrix that inverts the transform of all dimensions at once takes 28 to 120 MB.
    assert living_bytes() - before < 10e6
    assert accurate
    torch.testing.assert_close(moment, expected, rtol=1e-11, atol=1e-9)


@pytest.mark.parametrize("limit", [1, 2**9, 2**12])
def test_dimensions_inverted_one_by_one_give_the_same_moments(limit, monkeypatch):
    inputs = torch.randn(3, 4, 6, 5, 7, dtype=torch.float64)
    window = Window.of(3, (3, 2, 3), padding=(1, 0, 2), dilation=(1, 2, 1), groups=2)
    whole, _ = moment_by_correlation(inputs, window)
    monkeypatch.setattr(kfc.moments.spectral, "INVERSE_ELEMENTS", limit)
    parts, _ = moment_by_correlation(inputs, window)
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-12)
    assert torch.equal(parts, parts.mT)


@pytest.mark.parametrize("brightness", [1e2, 1e4])
def test_a_bright_border_costs_no_accuracy(brightness):
    """Differences of large sums would be inaccurate, so patches are used."""
    inputs = torch.randn(64, 16, 14, 14)
    inputs[..., -2:] *= brightness
    found = kfc.moments.second_moment(inputs, 5)
    expected = kfc.moments.second_moment(inputs.double(), 5)
    scale = expected.diagonal().sqrt()
    assert ((found - expected).abs() / scale.outer(scale)).max() < 1e-4


def test_a_unit_active_only_at_the_border_does_not_require_patches():
    inputs = torch.randn(64, 16, 14, 14).relu()
    inputs[:, 3] *= 1e-2
    inputs[:, 3, 1:] = 0
    inputs[:, 5] = 0
    found, accurate = moment_by_correlation(inputs, Window.of(2, 5, padding=2))
    assert accurate
    expected = kfc.moments.second_moment(inputs.double(), 5, padding=2, bias=False)
    assert (found[0] / 64 - expected).abs().max() < 1e-5 * expected.max()


def test_the_method_depends_on_batch_size_and_map_size():
    window = Window.of(2, 3, padding=1)
    assert correlation_pays(torch.empty(64, 64, 14, 14, device="meta"), window)
    assert not correlation_pays(torch.empty(1, 256, 14, 14, device="meta"), window)
    long = Window.of(1, 15, padding=7)
    assert not correlation_pays(torch.empty(64, 64, 4000, device="meta"), long)


class LargestTensor(TorchDispatchMode):
    """Record the size of the largest tensor that any operation creates."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for made in result if isinstance(result, (tuple, list)) else [result]:
            # A view has no elements of its own.
            if isinstance(made, torch.Tensor) and not made._is_view():
                self.elements = max(self.elements, made.numel())
        return result


def test_no_patch_matrix_is_built():
    inputs = torch.randn(256, 16, 16, 16)
    with LargestTensor() as seen:
        kfc.moments.second_moment(inputs, 5, padding=2)
    patches = 256 * 16 * 16 * 16 * 25
    assert 0 < seen.elements < patches / 12
    assert seen.elements <= 2 * inputs.numel()


def test_autocast_does_not_change_the_result():
    inputs = torch.randn(8, 4, 8, 8)
    plain = kfc.moments.second_moment(inputs, 3, padding=1)
    with torch.autocast("cpu", torch.bfloat16):
        inside = kfc.moments.second_moment(inputs, 3, padding=1)
    assert torch.equal(plain, inside)


def test_one_by_one_kernels_are_a_plain_product():
    inputs = torch.randn(4, 3, 5, 5)
    assert not correlation_pays(inputs, Window.of(2, 1))
    rows = inputs.movedim(1, -1).reshape(-1, 3)
    found = kfc.moments.second_moment(inputs, 1, bias=False)
    torch.testing.assert_close(found, rows.T @ rows / 4)


def test_chunks_add_up(monkeypatch):
    inputs = torch.randn(7, 2, 6, 6, dtype=torch.float64)
    window = Window.of(2, 3, padding=1)
    whole = kfc.moments.second_moment(inputs, 3, padding=1)
    monkeypatch.setattr(patches, "CHUNK_ELEMENTS", 2 * 18 * 36)
    chunks = list(patch_chunks(inputs, window))
    assert len(chunks) == 4
    parts = sum(row_moment(rows, homogeneous=True, diagonal=False) for rows in chunks)
    torch.testing.assert_close(parts[0] / 7, whole)


def test_half_precision_accumulates_in_float32():
    inputs = torch.randn(4, 2, 5, 5, dtype=torch.bfloat16)
    moment = kfc.moments.second_moment(inputs, 3)
    assert moment.dtype == torch.float32
    wide = kfc.moments.second_moment(inputs.float(), 3)
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
def test_bad_arguments_raise(shape, arguments, match):
    with pytest.raises(ValueError, match=match):
        kfc.moments.second_moment(torch.zeros(shape), **arguments)


@pytest.mark.parametrize("size", [3, 512, 513, 1300])
def test_symmetric_products_are_those_of_the_rows(size):
    rows = torch.randn(2, 7, size, dtype=torch.float64)
    found = gram(rows)
    assert_close(found, rows.mT @ rows)
    assert torch.equal(found, found.mT)
