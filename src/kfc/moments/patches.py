"""Second moments of the patches that a convolution sees, mostly without building the patches.

A patch is the receptive field of one output location, flattened in the order of
``weight.reshape(out_channels, -1)``. A leading 1, the homogeneous coordinate, stands for the bias.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kfc._helpers import at_least_float32, require_choice, require_whole
from kfc.moments.correlation import (
    Axis,
    coarse_axis,
    patch_moment,
    patch_moment_cost,
    phases_to_channels,
    places_in_phases,
)
from kfc.moments.folding import NARROWEST, folded_gram, to_keep
from kfc.moments.spectral import PASS, gram

PaddingMode = Literal["zeros", "reflect", "replicate", "circular"]
PADDING_MODES = ("zeros", "reflect", "replicate", "circular")

# Elements of the patches that are held at a time.
CHUNK_ELEMENTS = 2**23

# Cost of a multiply-add in the many small products of the autocorrelations, relative to one in a
# large product; and the fixed cost of starting their many operations, in multiply-adds.
CORRELATION_HANDICAP = 2.0
CORRELATION_START = 1.3e8


@dataclass(frozen=True)
class Window:
    """The geometry of a convolution: how its receptive fields lie on the input.

    Each tuple has one entry per spatial dimension; ``padding`` holds (before, after) pairs. A
    transposed convolution reads its kernel ``backwards``.
    """

    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int = 1
    padding_mode: PaddingMode = "zeros"
    backwards: bool = False

    @classmethod
    def of(
        cls,
        dims: int,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: int | str | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        padding_mode: str = "zeros",
    ) -> Window:
        """Create a window from the arguments of ``torch.nn.Conv*d``."""
        require_choice("padding_mode", padding_mode, PADDING_MODES)
        kernel = _per_dimension(kernel_size, dims, "kernel_size")
        steps = _per_dimension(stride, dims, "stride")
        spacing = _per_dimension(dilation, dims, "dilation")
        if padding == "same":
            if max(steps) > 1:
                raise ValueError(f'padding="same" needs a stride of 1, got {stride!r}')
            overhang = [d * (k - 1) for k, d in zip(kernel, spacing, strict=True)]
            pairs = tuple((total // 2, total - total // 2) for total in overhang)
        elif isinstance(padding, str) and padding != "valid":
            raise ValueError(
                f'padding must be a number, a tuple, "same" or "valid", got {padding!r}'
            )
        else:
            amounts = 0 if isinstance(padding, str) else padding
            pairs = tuple((p, p) for p in _per_dimension(amounts, dims, "padding", low=0))
        mode: PaddingMode = padding_mode  # type: ignore[assignment]
        return cls(kernel, steps, pairs, spacing, groups, mode)

    @property
    def dims(self) -> int:
        """The number of spatial dimensions."""
        return len(self.kernel_size)

    def locations(self, size: Sequence[int]) -> tuple[int, ...]:
        """Return |T| along each dimension; raise ``ValueError`` if the kernel does not fit."""
        padded = [n + sum(pair) for n, pair in zip(size, self.padding, strict=True)]
        spans = [d * (k - 1) + 1 for d, k in zip(self.dilation, self.kernel_size, strict=True)]
        if any(length < span for length, span in zip(padded, spans, strict=True)):
            raise ValueError(
                f"the padded map {tuple(padded)} is smaller than the kernel, which spans {spans}"
            )
        parts = zip(padded, spans, self.stride, strict=True)
        return tuple((length - span) // step + 1 for length, span, step in parts)

    def pad(self, inputs: Tensor) -> Tensor:
        """Return the inputs with their padding made explicit."""
        if all(pair == (0, 0) for pair in self.padding):
            return inputs
        # torch lists the last dimension's padding first.
        flat = [amount for pair in reversed(self.padding) for amount in pair]
        mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
        return F.pad(inputs, flat, mode=mode)

    def in_kernel_order(self, values: Tensor, dims: Iterable[int]) -> Tensor:
        """Return values with the columns of patches, along some dimensions, as in the weight."""
        if not self.backwards:
            return values
        index = torch.arange(values.shape[-1], device=values.device)
        # The homogeneous coordinate, if there is one, stays first.
        head, rest = index.tensor_split([len(index) % prod(self.kernel_size)])
        index = torch.cat([head, rest.reshape(-1, prod(self.kernel_size)).flip(1).flatten()])
        for dim in dims:
            values = values.index_select(dim, index)
        return values

    def axes(self, size: Sequence[int]) -> tuple[Axis, ...]:
        """Return the axes with stride 1 that ``moment_by_correlation`` works along."""
        if max(self.stride) > 1:
            strided = (self.locations(size), self.kernel_size, self.stride, self.dilation)
            return tuple(coarse_axis(*axis) for axis in zip(*strided, strict=True))
        padding = self.padding
        if self.padding_mode != "zeros":
            size = [n + sum(pair) for n, pair in zip(size, padding, strict=True)]
            padding = ((0, 0),) * self.dims
        plain = zip(size, self.kernel_size, self.dilation, padding, strict=True)
        return tuple(Axis(*axis) for axis in plain)


def second_moment(
    inputs: Tensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] = 1,
    padding: int | str | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    bias: bool = True,
    padding_mode: str = "zeros",
) -> Tensor:
    """Return Ω, the activation factor of a convolution (eqn 26).

    Ω is the second moment of the patches, summed over locations and averaged over examples. All
    arguments except ``inputs`` and ``bias`` are those of ``torch.nn.Conv*d``.

    Args:
        inputs: (M, J, *map) with one to three spatial dimensions.
        bias: whether patches start with the homogeneous coordinate.

    Returns:
        (n, n), or (groups, n, n) for several groups, with n = bias + J/groups · ∏ kernel_size; in
        float32 at least.
    """
    if not 3 <= inputs.dim() <= 5:
        raise ValueError(
            f"inputs must be (examples, channels, *map) with 1 to 3 spatial dimensions, got shape "
            f"{tuple(inputs.shape)}"
        )
    if inputs.shape[0] == 0:
        raise ValueError(f"the batch is empty: inputs has shape {tuple(inputs.shape)}")
    require_whole("groups", groups)
    if inputs.shape[1] % groups:
        raise ValueError(f"{inputs.shape[1]} channels cannot be split into {groups} groups")
    window = Window.of(
        inputs.dim() - 2, kernel_size, stride, padding, dilation, groups, padding_mode
    )
    with torch.autocast(inputs.device.type, enabled=False):
        total = window_moment(at_least_float32(inputs), window, homogeneous=bias, diagonal=False)
    total = total / inputs.shape[0]
    return total[0] if groups == 1 else total


def window_moment(
    inputs: Tensor, window: Window, *, homogeneous: bool, diagonal: bool, fold: bool = False
) -> Tensor:
    """Return Σ patchᵀ patch over examples and locations, or only its diagonal.

    Uses the cheaper way, counted in multiply-adds: patches, a few examples at a time, or the
    autocorrelations of the maps.

    Args:
        fold: return a wide moment folded, see ``kfc.moments.folding``.

    Returns:
        (groups, n, n), or (groups, n) if ``diagonal``.
    """
    if not diagonal and correlation_pays(inputs, window):
        precise = at_least_float32(inputs)
        moment, accurate = moment_by_correlation(precise, window)
        if accurate:
            total = _with_first_moment(moment, precise, window) if homogeneous else moment
            whole = window.in_kernel_order(total, [1, 2])
            return to_keep(whole) if fold else whole
    chunks = (window.in_kernel_order(rows, [2]) for rows in patch_chunks(inputs, window))
    total = row_moment(next(chunks), homogeneous=homogeneous, diagonal=diagonal, fold=fold)
    for rows in chunks:
        total += row_moment(rows, homogeneous=homogeneous, diagonal=diagonal, fold=fold)
    return total


def correlation_pays(inputs: Tensor, window: Window) -> bool:
    """Return whether autocorrelations take fewer multiply-adds than patches."""
    # All costs are those of one group; the groups share the start.
    channels = inputs.shape[1] // window.groups
    width = channels * prod(window.kernel_size)
    size = inputs.shape[2:]
    # Patches are written once and read once.
    by_patches = len(inputs) * prod(window.locations(size)) * width * (width + 2.0 * PASS)
    by_patches *= inputs.element_size() / at_least_float32(inputs[:0]).element_size()
    start = CORRELATION_START / window.groups
    if by_patches <= start:
        return False
    phases = channels * prod(window.stride)
    by_correlation = patch_moment_cost(len(inputs), phases, window.axes(size))
    return start + CORRELATION_HANDICAP * by_correlation < by_patches


def moment_by_correlation(inputs: Tensor, window: Window) -> tuple[Tensor, Tensor]:
    """Return Σ patchᵀ patch, (groups, n, n), from autocorrelations, and whether it is accurate.

    See ``kfc.moments.correlation``.
    """
    axes = window.axes(inputs.shape[2:])
    strided = max(window.stride) > 1
    if strided or window.padding_mode != "zeros":
        inputs = window.pad(inputs)
    maps = inputs.reshape(len(inputs), window.groups, -1, *inputs.shape[2:])
    if not strided:
        return patch_moment(maps, axes)
    places = places_in_phases(maps.shape[2], window.kernel_size, window.stride, window.dilation)
    places = places.to(maps.device)
    moment, accurate = patch_moment(phases_to_channels(maps, axes, window.stride), axes)
    return moment[:, places][:, :, places], accurate


def _with_first_moment(moment: Tensor, inputs: Tensor, window: Window) -> Tensor:
    """Add the homogeneous coordinate to the moment (groups, n, n) of these inputs' patches."""
    (sums,) = patch_chunks(_sum_over_examples(inputs), window)
    return _bordered(moment, sums.sum(1), count=len(inputs) * sums.shape[1])


def _sum_over_examples(inputs: Tensor) -> Tensor:
    """Return (1, J, *map), computed as a product with ones: one pass in either memory format."""
    ones = inputs.new_ones(1, len(inputs))
    channels_last = inputs.movedim(1, -1)
    if channels_last.is_contiguous():
        return (ones @ channels_last.flatten(1)).reshape(1, *channels_last.shape[1:]).movedim(-1, 1)
    return (ones @ inputs.flatten(1)).reshape(1, *inputs.shape[1:])


def row_moment(rows: Tensor, *, homogeneous: bool, diagonal: bool, fold: bool = False) -> Tensor:
    """Return Σ rowᵀ row for rows (groups, R, n), each with a leading 1 if ``homogeneous``.

    The result has float32 at least. Only folded moments of rows in a narrower dtype are computed in
    that dtype.

    Args:
        fold: return a wide moment folded, see ``kfc.moments.folding``.
    """
    if fold and not diagonal and rows.shape[-1] + homogeneous >= NARROWEST:
        return folded_gram(F.pad(rows, (1, 0), value=1) if homogeneous else rows)
    rows = at_least_float32(rows)
    moment = rows.square().sum(1) if diagonal else gram(rows)
    if not homogeneous:
        return moment
    count = rows.shape[1]
    if diagonal:
        return F.pad(moment, (1, 0), value=count)
    return _bordered(moment, rows.sum(1), count)


def _bordered(moment: Tensor, sums: Tensor, count: int) -> Tensor:
    """Add the homogeneous coordinate to the moment (groups, n, n) of rows, given their sums."""
    result = F.pad(moment, (1, 0, 1, 0))
    result[:, 0, 0] = count
    result[:, 0, 1:] = result[:, 1:, 0] = sums
    return result


def patch_chunks(inputs: Tensor, window: Window) -> Iterator[Tensor]:
    """Yield the patches of a few examples at a time: (groups, examples · |T|, J/groups · |D|)."""
    padded = window.pad(inputs)
    per_example = _windows(padded[:1], window).numel()
    dims, groups = window.dims, window.groups
    for some in padded.split(max(1, CHUNK_ELEMENTS // max(1, per_example))):
        windows = _windows(some, window).unflatten(1, (groups, -1))
        # (M, groups, J/groups, *T, *D) -> (groups, M, *T, J/groups, *D)
        windows = windows.movedim(2, 2 + dims).movedim(1, 0)
        yield windows.reshape(groups, -1, windows.shape[2 + dims :].numel())


def _windows(padded: Tensor, window: Window) -> Tensor:
    """Return a view (M, J, *T, *D) of every receptive field."""
    view = padded
    steps = zip(window.kernel_size, window.stride, window.dilation, strict=True)
    for axis, (size, step, spacing) in enumerate(steps):
        view = view.unfold(2 + axis, spacing * (size - 1) + 1, step)[..., ::spacing]
    return view


def _per_dimension(
    value: int | Sequence[int], dims: int, name: str, low: int = 1
) -> tuple[int, ...]:
    values = (value,) * dims if isinstance(value, int) else tuple(value)
    if len(values) == 1:
        values = values * dims
    if len(values) != dims:
        raise ValueError(f"{name} must be a number or {dims} of them, got {value!r}")
    for number in values:
        require_whole(name, number, low)
    return values
