"""Activation factors of maps whose statistics are the same at every location (SH, section 3).

Offsets of the kernel are counted from 1, the homogeneous coordinate is 0. The boundary counts
β(d, d′), (1 + |D|, 1 + |D|), say at how many locations t both t + d and t + d′ lie inside the map;
β(d, 0) = β(d) and β(0, 0) = |T|. They are the second moment of the patches of a map of ones.
"""

from __future__ import annotations

import torch
from torch import Tensor


def uncorrelated_factor(pixel_moment: Tensor, counts: Tensor) -> Tensor:
    """Ω if activations at distinct locations are uncorrelated (SUA), as in Theorem 4.

    Args:
        pixel_moment: (groups, 1 + J, 1 + J), the mean of (1, a)ᵀ (1, a) over examples and pixels.
        counts: β, (1 + |D|, 1 + |D|).

    Returns:
        (groups, 1 + J|D|, 1 + J|D|), always positive semi-definite.
    """
    mean, covariance = mean_and_covariance(pixel_moment)
    constant = torch.stack([_homogeneous_kron(row, counts) for row in mean])
    constant[:, 1:, 1:] += torch.stack(
        [torch.kron(group, counts[1:, 1:].diagonal().diag()) for group in covariance]
    )
    return constant


def mean_and_covariance(pixel_moment: Tensor) -> tuple[Tensor, Tensor]:
    """M (groups, J) and Σ (groups, J, J) from the mean of (1, a)ᵀ (1, a)."""
    mean = pixel_moment[:, 0, 1:]
    return mean, pixel_moment[:, 1:, 1:] - mean.unsqueeze(2) * mean.unsqueeze(1)


def _homogeneous_kron(mean: Tensor, counts: Tensor) -> Tensor:
    """Ω of maps that are constant, M (J,): a patch is M where it lies inside the map, else 0."""
    rows = torch.cat([mean.new_ones(1), mean.repeat_interleave(counts.shape[0] - 1)])
    offsets = torch.arange(1, counts.shape[0], device=counts.device).repeat(len(mean))
    offsets = torch.cat([offsets.new_zeros(1), offsets])
    return counts[offsets][:, offsets] * rows.unsqueeze(1) * rows
