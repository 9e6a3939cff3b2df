"""Output distributions: what the loss says about the curvature in the model's outputs.

A likelihood turns the model's outputs into the three things the Fisher matrix needs: a derivative
with the targets drawn from the model, the complete set of such derivatives, and products with the
Fisher matrix of the outputs.

Scale. The loss is a sum of terms, each with the same weight ``w`` (``term_weight``), so that its
Hessian in the outputs is ``R = w · (Fisher matrix of one term)``, block-diagonal over terms. The
derivatives are the log-likelihood's, times ``sqrt(w · N)``: their second moment, averaged over the
N examples, is then R.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

Reduction = Literal["mean", "batchmean", "sum"]
REDUCTIONS = ("mean", "batchmean", "sum")


class Likelihood(ABC):
    """A distribution over targets given the model's outputs, shape (N, ...).

    Subclasses describe *one unweighted term*; this class applies the reduction. To add a
    distribution, implement the abstract methods and pass an instance as ``likelihood=``.

    Args:
        reduction: how the loss joins its terms. ``"mean"`` divides by their number, as torch's
            losses do by default; ``"batchmean"`` sums inside an example and averages over
            examples, as the paper does; ``"sum"`` only sums.
    """

    def __init__(self, reduction: Reduction = "mean") -> None:
        if reduction not in REDUCTIONS:
            raise ValueError(f"reduction must be one of {REDUCTIONS}, got {reduction!r}")
        self.reduction = reduction

    def __repr__(self) -> str:
        return f"{type(self).__name__}(reduction={self.reduction!r})"

    # What a distribution defines

    @abstractmethod
    def terms_per_example(self, outputs: Tensor) -> int:
        """How many terms of the loss belong to one example."""

    @abstractmethod
    def columns_per_example(self, outputs: Tensor) -> int:
        """How many columns ``term_columns`` yields."""

    @abstractmethod
    def term_sample(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """∂ log p / ∂ outputs with every target drawn from the model; shaped like the outputs."""

    @abstractmethod
    def term_columns(self, outputs: Tensor) -> Iterator[Tensor]:
        """Tensors shaped like the outputs whose outer products, summed, are the Fisher matrix."""

    @abstractmethod
    def term_fisher_product(self, outputs: Tensor, vector: Tensor) -> Tensor:
        """The Fisher matrix of the terms times a vector shaped like the outputs."""

    def check_shape(self, outputs: Tensor) -> None:  # noqa: B027 - any shape fits by default
        """Raise ``ValueError`` if the outputs do not fit this distribution."""

    # What the rest of the library uses

    def validate(self, outputs: Tensor) -> None:
        """Raise an error that says what is wrong if no term can be made of these outputs."""
        if outputs.dim() == 0:
            raise ValueError(
                f"the model's output is a scalar, but {self!r} needs one row per example; "
                "let the model return its predictions and compute the loss outside it"
            )
        if outputs.shape[0] == 0 or outputs.numel() == 0:
            raise ValueError(f"the batch is empty: the model's output has shape {_shape(outputs)}")
        if not outputs.is_floating_point():
            raise TypeError(
                f"the model's output has dtype {outputs.dtype}, but {self!r} needs real numbers; "
                "choose the right tensor with output="
            )
        self.check_shape(outputs)

    def term_weight(self, outputs: Tensor, examples: int | None = None) -> float:
        """w, the weight of one term in the loss.

        Args:
            examples: in the whole batch, if the outputs are of a part of it.
        """
        examples = examples or outputs.shape[0]
        if self.reduction == "mean":
            return 1.0 / (examples * self.terms_per_example(outputs))
        return 1.0 / examples if self.reduction == "batchmean" else 1.0

    def growth(self, part: float, whole: float) -> float:
        """The loss's curvature on a batch, relative to that on a part of it with like examples."""
        return whole / part if self.reduction == "sum" else 1.0

    def sample_derivative(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """One draw of sqrt(w N) · ∂ log p(targets | outputs) / ∂ outputs, targets from the model.

        Targets are independent at every output location. Draws come from ``generator`` alone.
        """
        sample = self.term_sample(_at_least_float32(outputs), generator)
        return self._derivative_scale(outputs) * sample

    def derivative_columns(self, outputs: Tensor) -> Iterator[Tensor]:
        """The exact counterpart of ``sample_derivative``: columns in place of draws."""
        scale = self._derivative_scale(outputs)
        for column in self.term_columns(_at_least_float32(outputs)):
            yield scale * column

    def fisher_product(self, outputs: Tensor, vector: Tensor) -> Tensor:
        """R times a vector shaped like the outputs; R is the Hessian of the loss in the outputs."""
        wide, wide_vector = _at_least_float32(outputs), _at_least_float32(vector)
        return self.term_weight(outputs) * self.term_fisher_product(wide, wide_vector)

    def _derivative_scale(self, outputs: Tensor) -> float:
        return math.sqrt(self.term_weight(outputs) * outputs.shape[0])


class Categorical(Likelihood):
    """Softmax over dimension 1 of the outputs: (N, C), or (N, C, d1, ...) as in segmentation.

    Matches ``torch.nn.functional.cross_entropy``; one term per example and location.
    """

    def check_shape(self, outputs: Tensor) -> None:
        if outputs.dim() < 2 or outputs.shape[1] < 2:
            raise ValueError(
                "the categorical likelihood needs logits of shape (N, C) or (N, C, d1, ...) with "
                f"at least two classes, but the model's output has shape {_shape(outputs)}; "
                'use likelihood="bernoulli" for a single logit or likelihood="gaussian" for '
                "regression, or pick and reshape the logits with output="
            )

    def terms_per_example(self, outputs: Tensor) -> int:
        return outputs[0, 0].numel()

    def columns_per_example(self, outputs: Tensor) -> int:
        return outputs[0].numel()

    def term_sample(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        # Gumbel-argmax rather than multinomial: it does not raise on NaN inside the user's forward.
        noise = torch.empty_like(outputs).exponential_(generator=generator).log_()
        drawn = (outputs - noise).argmax(dim=1, keepdim=True)
        derivative = outputs.softmax(dim=1).neg_()
        return derivative.scatter_add_(1, drawn, torch.ones_like(derivative[:, :1]))

    def term_columns(self, outputs: Tensor) -> Iterator[Tensor]:
        # Column (location, class): sqrt(p_class) (e_class - p) at that location, zero elsewhere.
        probabilities = outputs.softmax(dim=1).reshape(*outputs.shape[:2], -1)
        for location in range(probabilities.shape[2]):
            at_location = probabilities[:, :, location]
            for target in range(probabilities.shape[1]):
                column = torch.zeros_like(probabilities)
                column[:, :, location] = -at_location
                column[:, target, location] += 1
                column[:, :, location] *= at_location[:, target : target + 1].sqrt()
                yield column.reshape(outputs.shape)

    def term_fisher_product(self, outputs: Tensor, vector: Tensor) -> Tensor:
        probabilities = outputs.softmax(dim=1)
        weighted = probabilities * vector
        return weighted - probabilities * weighted.sum(dim=1, keepdim=True)


class _Elementwise(Likelihood):
    """Distributions in which every output element has a target, and a Fisher number, of its own."""

    @abstractmethod
    def element_fisher(self, outputs: Tensor) -> Tensor:
        """The Fisher information of each element; shaped like the outputs."""

    def terms_per_example(self, outputs: Tensor) -> int:
        return outputs[0].numel()

    def columns_per_example(self, outputs: Tensor) -> int:
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
    """Independent coins with logits as outputs; matches ``binary_cross_entropy_with_logits``."""

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
        reduction: see :class:`Likelihood`.
        variance: of the targets. A term of the loss is ``(target - output)² / (2 variance)``, so
            the default ½ is torch's ``mse_loss``; 1 is the loss with the factor ½.
    """

    def __init__(self, reduction: Reduction = "mean", variance: float = 0.5) -> None:
        super().__init__(reduction)
        if not (math.isfinite(variance) and variance > 0):
            raise ValueError(f"variance must be a positive number, got {variance}")
        self.variance = variance

    def __repr__(self) -> str:
        return f"Gaussian(reduction={self.reduction!r}, variance={self.variance})"

    def element_fisher(self, outputs: Tensor) -> Tensor:
        return torch.full_like(outputs, 1 / self.variance)

    def term_sample(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        # (target - output) / variance with target - output ~ N(0, variance). The outputs enter by
        # zero, so that a NaN among them is seen as one.
        noise = torch.empty_like(outputs).normal_(generator=generator)
        return noise / math.sqrt(self.variance) + 0 * outputs


_BY_NAME = {"categorical": Categorical, "bernoulli": Bernoulli, "gaussian": Gaussian}


def resolve_likelihood(likelihood: str | Likelihood) -> Likelihood:
    """The likelihood itself, or a new one by its name."""
    if isinstance(likelihood, Likelihood):
        return likelihood
    if isinstance(likelihood, str) and likelihood in _BY_NAME:
        return _BY_NAME[likelihood]()
    raise ValueError(
        f"likelihood must be one of {tuple(_BY_NAME)} or a kfc.Likelihood, got {likelihood!r}"
    )


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)
