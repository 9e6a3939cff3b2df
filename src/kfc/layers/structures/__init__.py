"""How the Fisher block of a linear or convolutional layer is approximated: choices as values."""

from kfc.layers.structures.base import Structure
from kfc.layers.structures.diagonal import Diagonal
from kfc.layers.structures.ekfac import MeasuredEigenbasis
from kfc.layers.structures.kfc import KroneckerFactors
from kfc.layers.structures.uncorrelated import UncorrelatedActivations, WhiteDerivatives

STRUCTURES: dict[str, Structure] = {
    "kfc": KroneckerFactors(),
    "sua": UncorrelatedActivations(),
    "prong": WhiteDerivatives(),
    "diagonal": Diagonal(),
    "ekfac": MeasuredEigenbasis(),
}

__all__ = ["STRUCTURES", "Structure"]
