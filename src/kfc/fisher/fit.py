"""Comparison of a loss's derivative in the outputs with those of the likelihoods."""

from typing import NamedTuple

import torch
from torch import Tensor

from kfc._helpers import at_least_float32
from kfc.fisher.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood
from kfc.fisher.reading import Reading, tolerance
from kfc.fisher.ties import NEAR, SAMPLE, TIED, WIDE, are_weights

# The part of elements with a target of exactly 0 or 1 that is enough to read their common weight.
FEWEST_HARD = 0.02
# Derivatives of at least this precision do not agree with a likelihood by chance.
FINE = 1e-4
# The number of sums over classes that is enough to see an error which they have in common.
FEWEST_SUMS = 4


class Fit(NamedTuple):
    """The outputs of a model and the derivative of the loss in them, compared with likelihoods."""

    outputs: Tensor
    derivative: Tensor

    @property
    def tie(self) -> float:
        """The relative difference of readings that agree up to rounding."""
        return max(1e-5, 4 * torch.finfo(self.derivative.dtype).eps)

    def choose(self) -> tuple[Likelihood, str, str]:
        """Return the likelihood that fits, why, and what to do if none fits with certainty."""
        for axis in self._axes():
            if self._sums_to_zero(axis):
                why = f"the derivative of the loss sums to zero over dimension {axis}"
                return Categorical(axis=axis), why, self._other_softmax(axis)
            if self._are_log_probabilities(axis):
                why = f"the outputs are log-probabilities over dimension {axis}"
                return Categorical(axis=axis), why, ""
        if self._is_bernoulli():
            why = "the derivative of the loss has equal weights if targets are 0 or 1"
            return Bernoulli(), why, self.probabilities()
        for axis in self._axes():
            if self._may_sum_to_zero(axis):
                return Categorical(axis=axis), "all classes are predicted with certainty", ""
        advice = self.probabilities() or (
            "its derivative is not that of cross-entropy with class or binary targets, so it is "
            'taken for a mean squared error; pass likelihood="gaussian", "bernoulli" or '
            '"categorical", or a kfc.Likelihood'
        )
        return Gaussian(), "no other likelihood fits the derivative of the loss", advice

    def mismatch(self, likelihood: Likelihood) -> str:
        """Return what does not fit and what to do; empty if the likelihood fits."""
        other = [axis for axis in self._axes() if self._sums_to_zero(axis)]
        if isinstance(likelihood, Categorical):
            axis = likelihood.axis
            if self._sums_to_zero(axis):
                return self._other_softmax(axis)
            if self._are_log_probabilities(axis) or self._may_sum_to_zero(axis):
                return ""
            if other:
                return (
                    f"its derivative sums to zero over dimension {other[0]} of the outputs, not "
                    f"over dimension {axis}; pass likelihood=kfc.Categorical(axis={other[0]})"
                )
            hint = 'likelihood="bernoulli"' if self._is_bernoulli() else 'likelihood="auto"'
            return self.probabilities() or (
                f"its derivative does not sum to zero over the classes (dimension {axis}), as that "
                f"of cross-entropy does; pass {hint}, or select the logits with output="
            )
        if isinstance(likelihood, (Bernoulli, Gaussian)) and other and self._is_certain(other[0]):
            return (
                f"its derivative is that of cross-entropy over dimension {other[0]}; pass "
                'likelihood="categorical"'
            )
        if isinstance(likelihood, Bernoulli):
            return self.probabilities()
        constant = isinstance(likelihood, Gaussian) and self._has_constant_size()
        if constant and self._outputs_vary():
            return (
                "many elements of its derivative have the same size, as with absolute or Huber "
                "errors, whose curvature is not that of squared errors; use mse_loss, or pass a "
                "kfc.Likelihood of your own"
            )
        return ""

    def _other_softmax(self, axis: int) -> str:
        """Return advice if the loss takes the softmax of something else than the outputs.

        Classes without a derivative, beside others that have one, are not part of the softmax. If
        it is that of outputs / T, derivatives of all classes but the target are c exp(z/T) / Z: on
        a logarithmic scale, a line in z with slope 1/T.
        """
        z = at_least_float32(self.outputs).movedim(axis, -1).flatten(0, -2)
        g = self.derivative.to(z.dtype).movedim(axis, -1).flatten(0, -2)
        p = z.softmax(-1)
        used = (g != 0).any(-1)
        # A class that is predicted with certainty may have none because of rounding.
        if bool(((g == 0) & (p > 1e-3) & (p < 0.99)).any(-1)[used].any()):
            return (
                "some classes have no derivative although the model predicts them, so that the "
                "loss ignores them; select the classes of the loss with output="
            )
        single = used & ((g < 0).sum(-1) == 1) & ((g > 0).sum(-1) > 2)
        positive = (g > 0) & (p > 1e-4) & single.unsqueeze(-1)
        count = positive.sum(-1, keepdim=True).clamp_min(1)
        x, y = (
            torch.where(positive, v - torch.where(positive, v, 0).sum(-1, keepdim=True) / count, 0)
            for v in (z, torch.where(positive, g, 1).log())
        )
        spread, slope = x.square().sum(), (x * y).sum() / x.square().sum()
        error = (y - slope * x).square().sum()
        is_line = (error <= 1e-4 * y.square().sum()) & ((slope - 1).abs() > 0.02)
        # For small logits log(c p - s), as of smoothed targets, is almost a line too.
        is_better = (slope < 1) | (error <= 0.1 * _distance_from_smoothed(p, g, positive))
        if bool(single.any()) and bool(spread > 1e-3) and bool(is_line & is_better):
            return (
                f"it computes the softmax of the outputs divided by {1 / float(slope):.3g}; divide "
                "in the model instead, or pass a kfc.Likelihood of your own"
            )
        return ""

    def probabilities(self) -> str:
        """Return advice if the outputs are probabilities instead of logits."""
        z = at_least_float32(self.outputs)
        if bool((z < 0).any()) or bool((z > 1).any()):
            return ""
        over_classes = any(bool(((z.sum(axis) - 1).abs() <= 1e-3).all()) for axis in self._axes())
        g = self.derivative.to(z)
        readings = torch.where(g < 0, -g * z, g * (1 - z)).clamp_min(0)
        if over_classes or (self._are_weights(readings) and z.std() > 1e-3):
            return (
                "the model's outputs are probabilities; return logits from the model and use "
                "cross_entropy or binary_cross_entropy_with_logits, or select the logits with "
                "output="
            )
        return ""

    def is_decisive(self, likelihood: Likelihood) -> bool:
        """Return whether another batch would lead to the same choice."""
        if isinstance(likelihood, Categorical):
            return not self._may_sum_to_zero(likelihood.axis)
        return not isinstance(likelihood, (Bernoulli, Gaussian)) or self._outputs_vary()

    def has_two_classes(self, likelihood: Likelihood) -> bool:
        if isinstance(likelihood, Categorical):
            return self.outputs.shape[likelihood.axis] == 2
        return isinstance(likelihood, Bernoulli)

    def precise(self, reading: Reading) -> Tensor:
        """Return the readings that are not zero and hardly affected by rounding."""
        return reading.weights[self._is_precise(reading)]

    def agree(self, reading: Reading) -> bool:
        """Return whether readings are weights, because targets are 0 or 1."""
        return self._are_weights(torch.where(self._is_precise(reading), reading.weights, 0))

    def _is_precise(self, reading: Reading) -> Tensor:
        weights = reading.weights
        size = self.derivative.abs().to(weights)
        if size.shape != weights.shape:  # two classes: both derivatives have the same size
            size = size.amax(_class_axis(size, weights), keepdim=True)
        used = (weights > 0) & (size > 0.1 * weights)
        return used if bool(used.any()) else weights > 0

    def _axes(self) -> list[int]:
        """Return the dimensions that may be those of classes."""
        dimensions = self.outputs.dim()
        axes = [1] if dimensions == 2 else [1, -1] if dimensions > 2 else []
        return [axis for axis in axes if self.outputs.shape[axis] > 1]

    def _may_sum_to_zero(self, axis: int) -> bool:
        """Return whether the derivative does not sum to zero, but rounding may be the reason."""
        return not self._sums_to_zero(axis) and self._sums_to_zero(axis, leniently=True)

    def _sums_to_zero(self, axis: int, *, leniently: bool = False) -> bool:
        """Return whether every term's derivative sums to zero over the axis, up to rounding.

        A class that is predicted with certainty has the derivative c (p - 1), whose rounding error
        is that of c: more than what is left. The largest derivative of a batch is about c, unless
        all classes are predicted with certainty; then c follows from the other classes.

        Args:
            leniently: also accept what may be rounding if c follows from only one other class.
        """
        g = at_least_float32(self.derivative)
        eps = torch.finfo(self.derivative.dtype).eps
        sums, sizes = g.sum(axis), g.abs().sum(axis)
        allowed = 1e-3 * sizes + 4 * eps * sizes.amax()
        if self.tie > FINE:
            # Rounding errors of different classes cancel in part: their sum is that of the norm.
            sizes = g.square().sum(axis).sqrt()
            allowed = max(1e-3, eps) * sizes + eps * sizes.amax()
        if bool((sums.abs() <= allowed).all()):
            return True
        reading = Categorical(axis=axis).read(self.outputs, self.derivative)
        weights, known = (each.squeeze(axis) for each in reading)
        if leniently:
            known = known | ((g > 0).sum(axis) == 1) | (self.tie <= FINE)
        by_weight = known & (sums.abs() <= 4 * eps * weights)
        fits = bool(((sums.abs() <= allowed) | by_weight).all())
        return fits or (self.tie > FINE and self._have_common_error(axis, sums))

    def _have_common_error(self, axis: int, sums: Tensor) -> bool:
        """Return whether sums over classes are those of a loss computed in low precision.

        Its probabilities, of rounded logarithms, do not add up to 1. The sums are what they add up
        to in excess of it, times c.
        """
        sizes = at_least_float32(self.derivative).abs().sum(axis)
        log_p = self.outputs.to(self.derivative.dtype).log_softmax(axis)
        error = torch.where(sizes > 0, at_least_float32(log_p).exp().sum(axis) - 1, 0)
        is_small = (sums.abs() <= self.tie * (sizes + sizes.amax())).all()
        slope = (sums * error).sum() / error.square().sum()
        left = (sums - slope * error).square().sum() <= 0.1 * sums.square().sum()
        return bool(is_small & (slope > 0) & left) and int((error != 0).sum()) >= FEWEST_SUMS

    def _are_log_probabilities(self, axis: int) -> bool:
        if bool((self.derivative > 0).any()):
            return False
        total = at_least_float32(self.outputs).logsumexp(axis)
        allowed = max(1e-3, 4 * torch.finfo(self.outputs.dtype).eps * self.outputs.shape[axis])
        return bool((total.abs() <= allowed).all())

    def _is_certain(self, axis: int) -> bool:
        reading = Categorical(axis=axis).read(self.outputs, self.derivative)
        return bool(reading.certain.all())

    def _is_bernoulli(self) -> bool:
        return self.agree(Bernoulli().read(self.outputs, self.derivative))

    def _are_weights(self, readings: Tensor) -> bool:
        """Return whether readings agree with each other; they are zero where unknown."""
        if self.tie > FINE:
            g = self.derivative
            if g.shape != readings.shape:
                g = g.narrow(_class_axis(g, readings), 0, 1)
            return are_weights(readings, g, self.tie)
        return _tied_part(readings[readings > 0], self.tie) >= TIED

    def _outputs_vary(self) -> bool:
        z = at_least_float32(self.outputs)
        least = max(1e-3, torch.finfo(self.derivative.dtype).eps)
        return z.numel() > 1 and bool(z.sigmoid().std() > least)

    def _has_constant_size(self) -> bool:
        sizes = self.derivative.abs().flatten()
        largest = sizes >= (1 - tolerance(self.derivative)) * sizes.amax()
        # The largest one agrees with itself, and a few others may do so by chance.
        return int(largest.sum()) > max(3, 0.1 * sizes.numel())


def _distance_from_smoothed(p: Tensor, g: Tensor, used: Tensor) -> Tensor:
    """Return the sum of squared relative errors of the closest c p - s, for each term its own.

    Args:
        used: the elements that are compared; classes are the last dimension.
    """
    count = used.sum(-1, keepdim=True).clamp_min(1)
    dp, dg = (
        torch.where(used, v - torch.where(used, v, 0).sum(-1, keepdim=True) / count, 0)
        for v in (p, g)
    )
    spread = dp.square().sum(-1, keepdim=True).clamp_min(torch.finfo(p.dtype).tiny)
    slope = (dp * dg).sum(-1, keepdim=True) / spread
    return ((dg - slope * dp) / torch.where(used, g, 1)).square().sum()


def _class_axis(wide: Tensor, narrow: Tensor) -> int:
    return next(i for i in range(wide.dim()) if wide.shape[i] != narrow.shape[i])


def _tied_part(readings: Tensor, tie: float) -> float:
    """Return the part of a sample of the readings that agree with another one up to rounding.

    Args:
        tie: the relative difference of readings that agree.
    """
    readings = readings.flatten()
    readings = readings[:: max(1, readings.numel() // SAMPLE)].double()
    if readings.numel() < 2:
        return 0.0
    ordered = readings.sort().values
    close = ordered[1:] <= (1 + tie) * ordered[:-1]
    tied = torch.zeros(len(ordered), dtype=torch.bool, device=ordered.device)
    tied[1:] |= close
    tied[:-1] |= close
    return float(tied.double().mean())


def two_class_mode(readings: Tensor, assumed: float, tie: float, *, agree: bool) -> str:
    """Return how to find weights if targets have two values; see ``kfc.fisher.loss.Loss``.

    Readings of targets between 0 and 1 are below the weight and differ from each other.

    Args:
        readings: c if targets are 0 or 1, otherwise a lower bound.
        assumed: the weight that the reduction says.
        tie: the relative difference of readings that agree.
        agree: whether they agree with each other.
    """
    if readings.numel() == 1 or agree:
        return "elements"
    largest = readings.amax()
    at_top, below = (int((readings >= (1 - d) * largest).sum()) for d in (tie, WIDE * tie))
    if at_top >= max(2, FEWEST_HARD * readings.numel(), NEAR * below):
        return "largest"
    return "elements" if float(largest) > (1 + max(1e-3, tie)) * assumed else "assumed"
