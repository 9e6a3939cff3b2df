"""The weights of a loss's terms, read from its derivative in the model's outputs.

A loss is a sum of terms c ℓ(outputs, target). For softmax outputs with probabilities p the
derivative of a term is c (p - y), y the target's distribution. A target of one class has y = 0 for
all the others, so that c is the ratio of derivative to probability there: the same for all of them.
If the ratios agree, c is certain. Whatever weights a term (the reduction, class weights,
``ignore_index``, masks, the number of micro-batches, a loss scale) is part of c.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kfc._helpers import at_least_float32

# Readings of one value agree up to rounding in the derivative.
AGREEMENT = 1e-4


class Reading(NamedTuple):
    """The weights of all terms, each (N, ...) with a dimension of size 1 for the classes.

    Attributes:
        weights: c; where it is uncertain, the least c that any target allows.
        certain: whether c is certain; where it is not, the target is a mixture of classes.
    """

    weights: Tensor
    certain: Tensor

    def filled(self, typical: Tensor) -> Tensor:
        """Return the weights, with a typical one where they are uncertain."""
        return torch.where(self.certain, self.weights, typical.to(self.weights))

    def typical(self) -> tuple[Tensor, Tensor]:
        """Return the mean of the certain weights that are not zero, and their number."""
        used = self.certain & (self.weights > 0)
        count = used.sum()
        return torch.where(used, self.weights, 0).sum() / count.clamp_min(1), count


class ClassTerms(NamedTuple):
    """The terms of a loss whose targets are one class each.

    Attributes:
        weights: c, (N, ...) with a dimension of size 1 for the classes.
        excess: Σ -c log p of the targets, a scalar.
    """

    weights: Tensor
    excess: Tensor


def tolerance(derivative: Tensor) -> float:
    """Return the relative error of ratios of a derivative that was rounded to its dtype."""
    return max(AGREEMENT, 4 * torch.finfo(derivative.dtype).eps)


def read_categorical(outputs: Tensor, derivative: Tensor, axis: int) -> Reading:
    """Read c of every term from c (p - y), or from -c y if the outputs are log-probabilities.

    A term without a derivative (ignored, or predicted with certainty) has c = 0.
    """
    p = at_least_float32(outputs).softmax(axis)
    g = derivative.to(p)
    positive, tiny = g > 0, torch.finfo(p.dtype).tiny
    above, mass = torch.where(positive, g, 0), torch.where(positive, p, 0)
    ratio = above.sum(axis, keepdim=True) / mass.sum(axis, keepdim=True).clamp_min(tiny)
    # torch.linalg.vector_norm would take 50 times as long over a few classes.
    error, size = (x.square().sum(axis, keepdim=True).sqrt() for x in (above - ratio * mass, above))
    count = positive.sum(axis, keepdim=True)
    agree = (error <= tolerance(derivative) * size) & (count > 1)
    # The ratio is at most c, and the largest ratio of a class is the best such bound.
    largest = (above / p.clamp_min(tiny)).amax(axis, keepdim=True)
    none = count == 0  # log-probabilities, or no loss at all
    weights = torch.where(agree, ratio, largest)
    return Reading(torch.where(none, -g.sum(axis, keepdim=True), weights), agree | none)


def read_classes(outputs: Tensor, derivative: Tensor, axis: int) -> ClassTerms | None:
    """Read c and the excess of every term if all targets are certain to be one class.

    This is what ``read_categorical`` and ``excess_of_categories`` return then, with less than half
    of the operations. The host waits for the device.
    """
    x = at_least_float32(outputs)
    above = derivative.to(x.dtype).relu()
    positive = above.sign()
    others = x.shape[axis] - 1
    # The derivative is positive for all classes but the target's.
    fewest, most = torch.aminmax(positive.sum(axis))
    if others < 2 or not fewest.item() == others == most.item():
        return None
    shifted = x - x.amax(axis, keepdim=True)
    scaled = shifted.exp()  # p, times its sum
    total = scaled.sum(axis, keepdim=True)
    mass = scaled * positive
    ratio = above.sum(axis, keepdim=True) / mass.sum(axis, keepdim=True)
    error = torch.addcmul(above, ratio, mass, value=-1).square().sum(axis)
    size = above.square().sum(axis)
    if not torch.sub(error, size, alpha=tolerance(derivative) ** 2).amax().item() <= 0:
        return None
    weights = ratio * total
    target = torch.addcmul(shifted, shifted, positive, value=-1).sum(axis, keepdim=True)
    return ClassTerms(weights, (weights * (total.log() - target)).sum())


def smoothed_weight(outputs: Tensor, derivative: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Return c of targets with uniform label smoothing, and whether it is certain; scalars.

    All classes but the target's have the same y, so that their derivatives lie on a line
    c p - s. Terms without a derivative are ignored.
    """
    p = at_least_float32(outputs).softmax(axis)
    g = derivative.to(p)
    other = g != g.amin(axis, keepdim=True)
    count = other.sum().clamp_min(1)
    p_mean, g_mean = (torch.where(other, v, 0).sum() / count for v in (p, g))
    dp, dg = (torch.where(other, v - m, 0) for v, m in ((p, p_mean), (g, g_mean)))
    spread = dp.square().sum()
    slope = (dp * dg).sum() / spread.clamp_min(torch.finfo(p.dtype).tiny)
    error = (dg - slope * dp).square().sum()
    close = error <= (10 * tolerance(derivative)) ** 2 * dg.square().sum()
    return slope, close & (slope > 0) & (count > 2)


def read_bernoulli(outputs: Tensor, derivative: Tensor) -> Reading:
    """Read c of every element from c (σ - y), if y is 0 or 1; otherwise the least possible c.

    Nothing in a single element tells which it is, so that no reading is certain.
    """
    z = at_least_float32(outputs)
    g = derivative.to(z)
    tiny = torch.finfo(z.dtype).tiny
    on, off = z.sigmoid().clamp_min(tiny), z.neg().sigmoid().clamp_min(tiny)
    weights = torch.where(g < 0, -g / off, g / on)
    return Reading(weights, weights == 0)


def excess_of_categories(outputs: Tensor, derivative: Tensor, weights: Tensor, axis: int) -> Tensor:
    """Return Σ c KL(y‖p), the loss minus the least it could be for these targets; a scalar.

    The targets follow from the derivative: y = p - g/c, or -g/c for log-probabilities.

    Args:
        weights: c of the terms, which broadcasts to the outputs.
    """
    log_p = at_least_float32(outputs).log_softmax(axis)
    p, c = log_p.exp(), weights.to(log_p)
    ratio = derivative.to(p) / torch.where(c > 0, c, 1)
    is_logit = (ratio > 0).any(axis, keepdim=True)
    y = (torch.where(is_logit, p, 0) - ratio).clamp_min(0)
    y = y / y.sum(axis, keepdim=True).clamp_min(torch.finfo(p.dtype).tiny)
    divergence = (torch.special.xlogy(y, y) - y * log_p).sum(axis, keepdim=True)
    total: Tensor = (c * divergence.clamp_min(0)).sum()
    return total
