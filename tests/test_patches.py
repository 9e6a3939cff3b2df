"""Patch moments against the layer's own Jacobian."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

import kfc
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


def test_chunks_add_up(monkeypatch):
    inputs = torch.randn(7, 2, 6, 6, dtype=torch.float64)
    whole = kfc.patches.second_moment(inputs, 3, padding=1)
    monkeypatch.setattr(kfc.patches, "CHUNK_ELEMENTS", 2 * 18 * 36)
    torch.testing.assert_close(kfc.patches.second_moment(inputs, 3, padding=1), whole)


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
        ((2, 1, 4, 4), {"kernel_size": (2, 2, 2)}, "kernel_size"),
        ((2, 1, 4), {"kernel_size": 2, "padding": "full"}, "padding"),
        ((2, 1, 4), {"kernel_size": 2, "padding_mode": "mirror"}, "padding_mode"),
    ],
)
def test_bad_arguments_are_refused(shape, arguments, match):
    with pytest.raises(ValueError, match=match):
        kfc.patches.second_moment(torch.zeros(shape), **arguments)
