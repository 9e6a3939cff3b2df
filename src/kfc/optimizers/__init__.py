"""Optimizers built on the curvature."""

from kfc.optimizers.kfac import KFAC
from kfc.optimizers.kfc import KFC

__all__ = ["KFAC", "KFC"]
