"""Likelihoods, and products with the exact Fisher matrix."""

from kfc.fisher.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood
from kfc.fisher.products import quadratic_form, vector_product

__all__ = [
    "Bernoulli",
    "Categorical",
    "Gaussian",
    "Likelihood",
    "quadratic_form",
    "vector_product",
]
