"""Approximations of one layer's Fisher block, and what each of them assumes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kfc.analysis.blocks import (
    Block,
    DiagonalBlock,
    EigenvalueCorrectedBlock,
    KroneckerBlock,
    UnitBlock,
)
from kfc.analysis.exact import ExactBlock, IndependentBlock
from kfc.analysis.recording import LayerRecord
from kfc.kronecker import Factors, mean_eigenvalue
from kfc.layers import ConvolutionHandler, TransposedConvolutionHandler
from kfc.patches import Window
from kfc.stationary import uncorrelated_factor

CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


# Factors


def activation_factor(record: LayerRecord) -> Tensor:
    """Ω of Theorem 2, (groups, n, n): mean over examples of Σ_t a_tᵀ a_t."""
    total: Tensor | None = None
    for _, rows, _ in record.row_chunks():
        stacked = rows.transpose(0, 1).flatten(1, 2)
        part = stacked.mT @ stacked
        total = part if total is None else total + part
    assert total is not None
    return total / record.examples


def derivative_factor(record: LayerRecord) -> Tensor:
    """Γ of Theorem 2, (groups, I, I): mean over examples and locations of Ds_tᵀ Ds_t."""
    groups, rows, _ = record.shape
    total = torch.zeros(groups, rows, rows, dtype=record.dtype, device=record.device)
    for part in record.chunks(groups * rows * record.draws * record.rows_per_example):
        derivatives = record.derivative_rows(part).permute(2, 0, 1, 3, 4).flatten(1, 3)
        total += derivatives.mT @ derivatives
    return total / (record.examples * record.rows_per_example)


def boundary_counts(record: LayerRecord) -> Tensor:
    """β, (1 + |D|, 1 + |D|): see :mod:`kfc.stationary`."""
    counts = [record.handler.offset_counts(call.inputs, call.outputs) for call in record.calls]
    return torch.stack(counts).sum(0) / record.examples


def pixel_moment(record: LayerRecord) -> Tensor:
    """(groups, 1 + J, 1 + J): the mean of (1, a)ᵀ (1, a) over examples and pixels."""
    rows = torch.cat(
        [
            record.handler.pixel_rows(call.inputs.to(record.dtype), call.outputs)
            for call in record.calls
        ],
        dim=1,
    )
    rows = F.pad(rows, (1, 0), value=1.0)
    return rows.mT @ rows / rows.shape[1]


@dataclass(frozen=True)
class Autocovariances:
    """Estimates of SH's functions from all pairs of pixels of a map.

    Attributes:
        mean: M, (groups, J).
        offsets: Ω(j, j′, δ), (groups, J, J, *offsets): the mean of a_j(u) a_j′(u + δ) over examples
            and the u for which both lie in the map. Offsets are differences of kernel offsets,
            and the middle is δ = 0; 0 where a map is too small for any pair.
    """

    mean: Tensor
    offsets: Tensor


def autocovariances(record: LayerRecord) -> Autocovariances:
    """Uncentred, as in section 3; of convolutions only."""
    handler = record.handler
    assert isinstance(handler, ConvolutionHandler)
    window = handler.window()
    sums: list[Tensor] = []
    pairs: list[Tensor] = []
    means: list[tuple[Tensor, Tensor]] = []
    for call in record.calls:
        inputs = call.inputs.to(record.dtype)
        maps = window.pad(handler.row_source(inputs, call.outputs))
        # Inside the map is where a map of ones is one, however it was padded and spread out.
        ones = torch.ones_like(inputs[:1, :1])
        inside = window.pad(handler.row_source(ones, call.outputs))
        by_group = maps.unflatten(1, (handler.groups, -1)).transpose(0, 1)
        sums.append(torch.stack([_correlations(group, window) for group in by_group]))
        pairs.append(len(maps) * _correlations(inside, window)[0, 0])
        dims = tuple(range(3, by_group.dim()))
        means.append((by_group.sum((1, *dims)), len(maps) * inside.sum()))
    total, count = torch.stack(sums).sum(0), torch.stack(pairs).sum(0)
    mean = torch.stack([s for s, _ in means]).sum(0) / torch.stack([n for _, n in means]).sum()
    seen = count > 0.5
    return Autocovariances(mean, torch.where(seen, total / torch.where(seen, count, 1), 0))


def _correlations(maps: Tensor, window: Window) -> Tensor:
    """Σ over examples and u of a_j(u) a_j′(u + δ), (J, J, *offsets)."""
    reach = [d * (k - 1) for k, d in zip(window.kernel_size, window.dilation, strict=True)]
    padding = [amount for extent in reversed(reach) for amount in (extent, extent)]
    still = maps.transpose(0, 1)
    moved = F.pad(still, padding)
    convolve = CONVOLUTIONS[window.dims]
    # moved[j′] at u + δ against still[j] at u
    return convolve(moved, still, stride=window.dilation).transpose(0, 1)


def stationary_activation_factor(record: LayerRecord, *, boundaries: bool) -> Tensor:
    """Ω of Theorem 1, eqn (21), from estimated autocovariances; it may be indefinite.

    Args:
        boundaries: whether to count them, β; or as if every location saw all of its patch, |T|.
    """
    if not isinstance(record.handler, ConvolutionHandler):
        return activation_factor(record)  # a single offset: nothing is assumed
    window, found = record.handler.window(), autocovariances(record)
    counts = boundary_counts(record)
    if not boundaries:
        counts = torch.full_like(counts, float(counts[0, 0]))
    groups, channels = found.mean.shape
    offsets = found.offsets
    if isinstance(record.handler, TransposedConvolutionHandler):
        offsets = offsets.flip(list(range(3, offsets.dim())))  # it reads its kernel backwards
    by_pair = offsets.flatten(3)[..., _difference_index(window).to(offsets.device)]
    # (groups, J, J, |D|, |D|) -> (groups, J, |D|, J, |D|)
    weights = (by_pair * counts[1:, 1:]).transpose(2, 3)
    size = channels * (len(counts) - 1)
    border = found.mean.unsqueeze(2) * counts[0, 1:]
    factor = found.mean.new_empty(groups, 1 + size, 1 + size)
    factor[:, 1:, 1:] = weights.reshape(groups, size, size)
    factor[:, 0, 1:] = factor[:, 1:, 0] = border.reshape(groups, size)
    factor[:, 0, 0] = counts[0, 0]
    return trained_part(record, factor)


def _difference_index(window: Window) -> Tensor:
    """(|D|, |D|): where d′ - d is among the offsets of autocovariances, for all pairs."""
    index = torch.zeros(1, 1, dtype=torch.long)
    for kernel in window.kernel_size:
        along = torch.arange(kernel)
        difference = along.unsqueeze(0) - along.unsqueeze(1) + kernel - 1
        # As torch.kron does, with sums in place of products.
        index = index[:, None, :, None] * (2 * kernel - 1) + difference[None, :, None, :]
        index = index.flatten(2, 3).flatten(0, 1)
    return index


def trained_part(record: LayerRecord, factor: Tensor) -> Tensor:
    """Of an Ω with the homogeneous coordinate, what belongs to trained parameters."""
    trained = record.handler.trained()
    start = 0 if "bias" in trained else 1
    stop = None if "weight" in trained else 1
    return factor[:, start:stop, start:stop]


def second_moment_in(
    record: LayerRecord, activation_basis: Tensor, derivative_basis: Tensor
) -> Tensor:
    """(groups, I, n): the mean square of each coordinate of the gradients in the given bases."""
    total = torch.zeros(record.shape, dtype=record.dtype, device=record.device)
    for _, gradients in record.gradient_chunks():
        total += (derivative_basis.mT @ gradients @ activation_basis).square().sum((0, 1))
    return total / record.examples


# Blocks


def independent(record: LayerRecord) -> Block:
    """IAD alone: Lemma 1."""
    return IndependentBlock(record)


def kfc(record: LayerRecord) -> KroneckerBlock:
    """IAD, SH and SUD: Theorem 2's Ω ⊗ Γ, which KFC trains with."""
    return KroneckerBlock(Factors(activation_factor(record), derivative_factor(record)))


def autocovariance(record: LayerRecord) -> Block:
    """IAD, SH and SUD: Theorem 1's factors from estimated autocovariances; maybe indefinite."""
    activation = stationary_activation_factor(record, boundaries=True)
    return KroneckerBlock(Factors(activation, derivative_factor(record)))


def without_boundaries(record: LayerRecord) -> Block:
    """As if every location saw all of its patch: Theorem 1 with |T| in place of β."""
    activation = stationary_activation_factor(record, boundaries=False)
    return KroneckerBlock(Factors(activation, derivative_factor(record)))


def uncorrelated_activations(record: LayerRecord) -> Block:
    """IAD, SH, SUD and SUA."""
    activation = uncorrelated_factor(pixel_moment(record), boundary_counts(record))
    return KroneckerBlock(Factors(trained_part(record, activation), derivative_factor(record)))


def prong(record: LayerRecord) -> Block:
    """IAD, SH, SUA and WD: Theorem 4, with the scale of the derivatives that it leaves open."""
    activation = uncorrelated_factor(pixel_moment(record), boundary_counts(record))
    derivative = derivative_factor(record)
    white = mean_eigenvalue(derivative).reshape(-1, 1, 1) * torch.eye(
        derivative.shape[-1], dtype=record.dtype, device=record.device
    )
    return KroneckerBlock(Factors(trained_part(record, activation), white))


def diagonal(record: LayerRecord) -> Block:
    """The diagonal of the exact block."""
    return DiagonalBlock(ExactBlock(record).diagonal())


def unit_wise(record: LayerRecord) -> Block:
    """The exact block of every output map, and nothing between maps."""
    groups, rows, columns = record.shape
    total = torch.zeros(groups, rows, columns, columns, dtype=record.dtype, device=record.device)
    for _, gradients in record.gradient_chunks():
        by_unit = gradients.flatten(0, 1).permute(1, 2, 0, 3)
        total += by_unit.mT @ by_unit
    return UnitBlock(total / record.examples)


def eigenvalue_corrected(record: LayerRecord) -> Block:
    """KFC's eigenbases with the exact second moments in them (EKFAC; George et al. 2018)."""
    _, *bases = kfc(record).eigen()
    activation, derivative = (basis.to(record.dtype) for basis in bases)
    moments = second_moment_in(record, activation, derivative)
    return EigenvalueCorrectedBlock(activation, derivative, moments)


@dataclass(frozen=True)
class Approximation:
    """A way to approximate a block.

    Attributes:
        title: for tables.
        assumes: the assumptions that it makes of those the paper names.
        build: makes it of a record.
        invariant: the affine changes under which its undamped natural gradient is the same step
            (Theorem 3; with padding 0 or circular): of "activations", of "derivatives".
        elements: how many numbers it holds, where these are many more than two factors.
    """

    title: str
    assumes: str
    build: Callable[[LayerRecord], Block]
    invariant: frozenset[str]
    elements: Callable[[LayerRecord], int] = lambda record: 0


def _independent_elements(record: LayerRecord) -> int:
    """Of all derivatives, and of the moments between locations that its trace takes."""
    (groups, rows, _), locations = record.shape, record.rows_per_example
    return groups * locations * (record.draws * record.examples * rows + 2 * locations)


def _unit_elements(record: LayerRecord) -> int:
    groups, rows, columns = record.shape
    return groups * rows * columns**2


def _changes(*names: str) -> frozenset[str]:
    return frozenset(names)


BOTH = _changes("activations", "derivatives")
APPROXIMATIONS = {
    "iad": Approximation("IAD alone", "IAD", independent, BOTH, _independent_elements),
    "kfc": Approximation("KFC", "IAD, SH, SUD", kfc, BOTH),
    "ekfac": Approximation("EKFAC", "KFC's eigenvectors", eigenvalue_corrected, _changes()),
    # Estimated means and autocovariances are not of the same pixels, so an offset tells.
    "autocovariance": Approximation(
        "autocovariances", "IAD, SH, SUD", autocovariance, _changes("derivatives")
    ),
    "no-boundaries": Approximation(
        "without boundaries",
        "IAD, SH, SUD, no boundaries",
        without_boundaries,
        _changes("derivatives"),
    ),
    "sua": Approximation("SUA", "IAD, SH, SUD, SUA", uncorrelated_activations, BOTH),
    "prong": Approximation("PRONG", "IAD, SH, SUA, WD", prong, _changes("activations")),
    "unit-wise": Approximation(
        "unit-wise", "independent output maps", unit_wise, _changes("activations"), _unit_elements
    ),
    "diagonal": Approximation("diagonal", "independent parameters", diagonal, _changes()),
}
