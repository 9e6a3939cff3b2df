"""The optimizers and what they share."""

from kfc.optimizers.kfac import KFAC
from kfc.optimizers.kfc import KFC
from kfc.optimizers.preconditioner import Preconditioner
from kfc.optimizers.whitened import WhitenedAdam

__all__ = ["KFAC", "KFC", "Preconditioner", "WhitenedAdam"]
