"""Natural-gradient training of convolutional networks with Kronecker Factors for Convolution."""

from kfc import fisher, layers, patches
from kfc.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood
from kfc.optimizers import KFAC, KFC
from kfc.periods import Stretch
from kfc.preconditioner import Preconditioner

__version__ = "0.1.0"

__all__ = [
    "KFAC",
    "KFC",
    "Bernoulli",
    "Categorical",
    "Gaussian",
    "Likelihood",
    "Preconditioner",
    "Stretch",
    "fisher",
    "layers",
    "patches",
]
