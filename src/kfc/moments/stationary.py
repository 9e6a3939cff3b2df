"""Activation factors of maps whose statistics are the same at every location (SH, section 3).

Offsets of the kernel are numbered from 1; number 0 is the homogeneous coordinate. The boundary
counts β, (1 + |D|, 1 + |D|), are the second moment of the patches of a map of ones. β(d, d′) is the
number of locations t with both t + d and t + d′ inside the map, β(d, 0) = β(d) the number with
t + d inside, and β(0, 0) = |T|.
"""

import torch
from torch import Tensor


def uncorrelated_factor(pixel_moment: Tensor, counts: Tensor) -> Tensor:
    """Return Ω for activations that are uncorrelated between locations (SUA), as in Theorem 4.

    Args:
        pixel_moment: (groups, 1 + J, 1 + J), the mean of (1, a)ᵀ (1, a) over examples and pixels.
        counts: β, (1 + |D|, 1 + |D|).

    Returns:
        (groups, 1 + J|D|, 1 + J|D|), always positive semi-definite.
    """
    mean = pixel_moment[:, 0, 1:]
    covariance = pixel_moment[:, 1:, 1:] - mean.unsqueeze(2) * mean.unsqueeze(1)
    offsets = torch.arange(1, len(counts), device=counts.device)
    # A patch of a constant map is (1, M) wherever it lies inside the map, and zero elsewhere.
    patch = torch.cat([torch.ones_like(mean[:, :1]), mean.repeat_interleave(len(offsets), 1)], 1)
    index = torch.cat([offsets.new_zeros(1), offsets.repeat(mean.shape[1])])
    factor = counts[index][:, index] * patch.unsqueeze(2) * patch.unsqueeze(1)
    factor[:, 1:, 1:] += torch.kron(covariance, counts.diagonal()[1:].diag().unsqueeze(0))
    return factor
