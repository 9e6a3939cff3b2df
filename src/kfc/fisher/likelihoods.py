"""Output distributions, which determine the curvature of the loss in the model's outputs.

From the model's outputs, a likelihood computes what the Fisher matrix needs: a derivative for
targets drawn from the model, the complete set of such derivatives, and products with the Fisher
matrix of the outputs.

Scale. The loss is a sum of terms with weights ``c``, so its Hessian in the outputs is
``R = c · (Fisher matrix of one term)``, block-diagonal over terms. Derivatives of the
log-likelihood are multiplied by ``sqrt(c · N)``, so that their second moment, averaged over the N
examples, is R. The weights are read from the loss (``kfc.fisher.reading``) or, if unknown, the
same for all terms, as given by the reduction (``term_weight``).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kfc._helpers import at_least_float32, require_choice, require_number, require_whole
from kfc.fisher.reading import (
    Reading,
    excess_of_categories,
    read_bernoulli,
    read_categorical,
)

Reduction = Literal["mean", "batchmean", "sum"]
REDUCTIONS = ("mean", "batchmean", "sum")
# The weights of terms: a number for all, or a tensor that broadcasts to the outputs.
Weights = Tensor | float


class Likelihood(ABC):
    """A distribution over targets, given the model's outputs of shape (N, ...).

    Subclasses describe *unweighted terms* of the loss; this class applies the reduction. To add a
    distribution, implement the abstract methods and pass an instance as ``likelihood=``.

    Args:
        reduction: how the loss combines its terms. ``"mean"`` divides by their number, as torch's
            losses do by default; ``"batchmean"`` sums within an example and averages over
            examples, as in the paper; ``"sum"`` only sums.
        weight: the factor of this loss in the sum of several losses.

    Where weights of terms can be read from the loss, reduction and weight have no effect.

    Attributes:
        is_elementwise: whether every output element is the parameter of one independent target,
            so that the Fisher matrix in the outputs is diagonal.
    """

    is_elementwise: ClassVar[bool] = False

    def __init__(self, reduction: Reduction = "mean", *, weight: float = 1.0) -> None:
        require_choice("reduction", reduction, REDUCTIONS)
        require_number("weight", weight, positive=True)
        self.reduction = reduction
        self.weight = weight

    def __repr__(self) -> str:
        options = [f"reduction={self.reduction!r}"]
        options += [] if self.weight == 1 else [f"weight={self.weight:g}"]
        return f"{type(self).__name__}({', '.join([*options, *self._own_options()])})"

    def _own_options(self) -> list[str]:
        return []

    # To be implemented by each distribution

    @abstractmethod
    def terms_per_example(self, outputs: Tensor) -> int:
        """Return the number of terms of the loss for one example."""

    def columns_per_example(self, outputs: Tensor) -> int:
        """Return the number of columns from ``term_columns``; by default one per output element."""
        return outputs[0].numel()

    @abstractmethod
    def term_sample(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """Return ∂ log p / ∂ outputs, like the outputs, for targets drawn from the model."""

    @abstractmethod
    def term_columns(self, outputs: Tensor) -> Iterator[Tensor]:
        """Yield tensors like the outputs whose outer products add up to the Fisher matrix."""

    @abstractmethod
    def term_fisher_product(self, outputs: Tensor, vector: Tensor) -> Tensor:
        """Return the Fisher matrix of the terms times a vector shaped like the outputs."""

    def read(self, outputs: Tensor, derivative: Tensor) -> Reading | None:
        """Return the weights of the terms from the loss's derivative; ``None`` if it cannot."""
        return None

    def excess(self, outputs: Tensor, derivative: Tensor, weights: Weights) -> Tensor | None:
        """Return the loss minus the least it could be for these targets; ``None`` if unknown.

        Args:
            derivative: the derivative of the loss in the outputs, which determines the targets.
            weights: c of the terms.
        """
        return None

    def check_shape(self, outputs: Tensor) -> None:  # noqa: B027 - any shape fits by default
        """Raise ``ValueError`` if the outputs do not fit this distribution."""

    # Used by the rest of the library

    def validate(self, outputs: Tensor) -> None:
        """Raise an error if these outputs do not define any term of the loss."""
        validate_outputs(outputs, self)
        self.check_shape(outputs)

    def term_weight(self, outputs: Tensor, examples: int | None = None) -> float:
        """Return the weight of one term in the loss, as given by the reduction.

        Args:
            examples: the size of the whole batch, if the outputs belong to a part of it.
        """
        examples = examples or outputs.shape[0]
        if self.reduction == "mean":
            return self.weight / (examples * self.terms_per_example(outputs))
        return self.weight / examples if self.reduction == "batchmean" else self.weight

    def sample_derivative(
        self, outputs: Tensor, generator: torch.Generator, weights: Weights | None = None
    ) -> Tensor:
        """Return sqrt(c N) · ∂ log p(targets | outputs) / ∂ outputs for one draw of the targets.

        Targets are drawn from the model, independently at every output location, using only
        ``generator``.

        Args:
            weights: c of the terms; by default as given by the reduction.
        """
        sample = self.term_sample(at_least_float32(outputs), generator)
        return self._derivative_scale(outputs, weights) * sample

    def derivative_columns(
        self, outputs: Tensor, weights: Weights | None = None
    ) -> Iterator[Tensor]:
        """Yield tensors whose outer products add up to the mean of ``sample_derivative``'s."""
        scale = self._derivative_scale(outputs, weights)
        for column in self.term_columns(at_least_float32(outputs)):
            yield scale * column

    def fisher_product(
        self, outputs: Tensor, vector: Tensor, weights: Weights | None = None
    ) -> Tensor:
        """Return R, the Hessian of the loss in the outputs, times a vector like the outputs."""
        wide, wide_vector = at_least_float32(outputs), at_least_float32(vector)
        weights = self.term_weight(outputs) if weights is None else weights
        return weights * self.term_fisher_product(wide, wide_vector)

    def _derivative_scale(self, outputs: Tensor, weights: Weights | None) -> Weights:
        weights = self.term_weight(outputs) if weights is None else weights
        scaled = weights * outputs.shape[0]
        return scaled.sqrt() if isinstance(scaled, Tensor) else math.sqrt(scaled)


class Categorical(Likelihood):
    """Classes with probabilities softmax(outputs, axis), for logits (N, C) or (N, C, d1, ...).

    Matches ``torch.nn.functional.cross_entropy``, with one term per example and location.

    Args:
        axis: the dimension of the classes; -1 for logits (N, ..., C).

    The other arguments are those of ``Likelihood``.
    """

    def __init__(
        self, reduction: Reduction = "mean", *, axis: int = 1, weight: float = 1.0
    ) -> None:
        super().__init__(reduction, weight=weight)
        require_whole("axis", axis, low=None)
        self.axis = axis

    def _own_options(self) -> list[str]:
        return [] if self.axis == 1 else [f"axis={self.axis}"]

    def check_shape(self, outputs: Tensor) -> None:
        dimensions = outputs.dim()
        if dimensions < 2 or self.axis % dimensions == 0 or outputs.shape[self.axis] < 2:
            raise ValueError(
                "the categorical likelihood needs logits of shape (N, C) or (N, C, d1, ...) with "
                f"at least two classes, but the model's output has shape {tuple(outputs.shape)}; "
                'use likelihood="bernoulli" for a single logit or likelihood="gaussian" for '
                "regression, or select and reshape the logits with output="
            )

    def terms_per_example(self, outputs: Tensor) -> int:
        return outputs[0].numel() // outputs.shape[self.axis]

    def read(self, outputs: Tensor, derivative: Tensor) -> Reading:
        return read_categorical(outputs, derivative, self.axis)

    def excess(self, outputs: Tensor, derivative: Tensor, weights: Weights) -> Tensor:
        return excess_of_categories(outputs, derivative, torch.as_tensor(weights), self.axis)

    def term_sample(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        # Gumbel-argmax, because multinomial would raise on NaN inside the user's forward.
        noise = torch.empty_like(outputs).exponential_(generator=generator).log_()
        drawn = (outputs - noise).argmax(dim=self.axis, keepdim=True)
        derivative = outputs.softmax(dim=self.axis).neg_()
        return derivative.scatter_add_(self.axis, drawn, torch.ones_like(drawn).to(derivative))

    def term_columns(self, outputs: Tensor) -> Iterator[Tensor]:
        # Column (location, class): sqrt(p_class) (e_class - p) at that location, zero elsewhere.
        classes_second = outputs.movedim(self.axis, 1)
        probabilities = (
            classes_second.softmax(dim=1).flatten(2)
            if outputs.dim() > 2
            else (classes_second.softmax(dim=1).unsqueeze(2))
        )
        for location in range(probabilities.shape[2]):
            at_location = probabilities[:, :, location]
            for target in range(probabilities.shape[1]):
                column = torch.zeros_like(probabilities)
                column[:, :, location] = -at_location
                column[:, target, location] += 1
                column[:, :, location] *= at_location[:, target : target + 1].sqrt()
                yield column.reshape(classes_second.shape).movedim(1, self.axis)

    def term_fisher_product(self, outputs: Tensor, vector: Tensor) -> Tensor:
        probabilities = outputs.softmax(dim=self.axis)
        weighted = probabilities * vector
        return weighted - probabilities * weighted.sum(dim=self.axis, keepdim=True)


class _Elementwise(Likelihood):
    """A distribution in which every output element is the parameter of one independent target."""

    is_elementwise = True

    @abstractmethod
    def element_fisher(self, outputs: Tensor) -> Tensor:
        """Return the Fisher information of each element, shaped like the outputs."""

    def terms_per_example(self, outputs: Tensor) -> int:
        return outputs[0].numel()

    def term_columns(self, outputs: Tensor) -> Iterator[Tensor]:
        deviation = self.element_fisher(outputs).sqrt().reshape(outputs.shape[0], -1)
        for element in range(deviation.shape[1]):
            column = torch.zeros_like(deviation)
            column[:, element] = deviation[:, element]
            yield column.reshape(outputs.shape)

    def term_fisher_product(self, outputs: Tensor, vector: Tensor) -> Tensor:
        return self.element_fisher(outputs) * vector


class Bernoulli(_Elementwise):
    """Independent binary targets with the outputs as logits.

    Matches ``torch.nn.functional.binary_cross_entropy_with_logits``.
    """

    def read(self, outputs: Tensor, derivative: Tensor) -> Reading:
        return read_bernoulli(outputs, derivative)

    def excess(self, outputs: Tensor, derivative: Tensor, weights: Weights) -> Tensor:
        # Two classes with logits 0 and z.
        logits = torch.stack([torch.zeros_like(outputs), outputs])
        derivatives = torch.stack([-derivative, derivative])
        return excess_of_categories(logits, derivatives, torch.as_tensor(weights), 0)

    def element_fisher(self, outputs: Tensor) -> Tensor:
        probabilities = outputs.sigmoid()
        return probabilities * (1 - probabilities)

    def term_sample(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        probabilities = outputs.sigmoid()
        uniform = torch.empty_like(outputs).uniform_(generator=generator)
        return (uniform < probabilities).to(outputs.dtype) - probabilities


class Gaussian(_Elementwise):
    """Independent normal targets with the outputs as means.

    Args:
        variance: the variance of the targets. A term of the loss is
            ``(target - output)² / (2 variance)``: the default ½ matches torch's ``mse_loss``, and 1
            matches a squared error with the factor ½.

    The other arguments are those of ``Likelihood``.
    """

    def __init__(
        self, reduction: Reduction = "mean", variance: float = 0.5, *, weight: float = 1.0
    ) -> None:
        super().__init__(reduction, weight=weight)
        require_number("variance", variance, positive=True)
        self.variance = variance

    def _own_options(self) -> list[str]:
        return [f"variance={self.variance}"]

    def element_fisher(self, outputs: Tensor) -> Tensor:
        return torch.full_like(outputs, 1 / self.variance)

    def excess(self, outputs: Tensor, derivative: Tensor, weights: Weights) -> Tensor:
        # A term c (o - y)² / (2 variance) has the derivative c (o - y) / variance.
        g = at_least_float32(derivative)
        c = torch.as_tensor(weights).to(g)
        return (0.5 * self.variance * g.square() / torch.where(c > 0, c, 1)).sum()

    def term_sample(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        # (target - output) / variance with target - output ~ N(0, variance). Adding zero times the
        # outputs passes their NaNs on.
        noise = torch.empty_like(outputs).normal_(generator=generator)
        return noise / math.sqrt(self.variance) + 0 * outputs


_BY_NAME: dict[str, type[Likelihood]] = {
    "categorical": Categorical,
    "bernoulli": Bernoulli,
    "gaussian": Gaussian,
}


def resolve_likelihood(likelihood: str | Likelihood, *also: str) -> Likelihood:
    """Return the likelihood with this name, or the given one.

    Args:
        also: further names, which the error for an unknown one lists.
    """
    if isinstance(likelihood, Likelihood):
        return likelihood
    if isinstance(likelihood, str) and likelihood in _BY_NAME:
        return _BY_NAME[likelihood]()
    raise ValueError(
        f"likelihood must be one of {(*also, *_BY_NAME)} or a kfc.Likelihood, got {likelihood!r}"
    )


def validate_outputs(outputs: Tensor, owner: object) -> None:
    """Raise an error if the outputs are not real numbers with one row per example."""
    if outputs.dim() == 0:
        raise ValueError(
            f"the model's output is a scalar, but {owner} needs one row per example; "
            "return the predictions from the model and compute the loss outside it, or select "
            "them with output="
        )
    if outputs.numel() == 0:
        raise ValueError(f"the batch is empty: the model's output has shape {_shape(outputs)}")
    if not outputs.is_floating_point():
        raise TypeError(
            f"the model's output has dtype {outputs.dtype}, but {owner} needs real numbers; "
            "select the right tensor with output="
        )


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)
