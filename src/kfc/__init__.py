"""Natural-gradient training of convolutional networks with Kronecker Factors for Convolution."""

import kfc_command  # noqa: F401  handles Ctrl-C while `python -m kfc` imports the rest
from kfc import fisher, layers, moments
from kfc.curvature.options import EKFAC, PRONG, SUA, Diagonal, Kronecker, Whitening
from kfc.distributed.options import Parallel
from kfc.fisher.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood
from kfc.optimizers import KFAC, KFC, Preconditioner, WhitenedAdam
from kfc.optimizers.options import Adaptation, FisherClip
from kfc.optimizers.solving import solve_fisher
from kfc.schedule import Budget, Periods, Stretch

__version__ = "0.2.0"

__all__ = [
    "EKFAC",
    "KFAC",
    "KFC",
    "PRONG",
    "SUA",
    "Adaptation",
    "Bernoulli",
    "Budget",
    "Categorical",
    "Diagonal",
    "FisherClip",
    "Gaussian",
    "Kronecker",
    "Likelihood",
    "Parallel",
    "Periods",
    "Preconditioner",
    "Stretch",
    "WhitenedAdam",
    "Whitening",
    "fisher",
    "layers",
    "moments",
    "solve_fisher",
]
