"""Optimizers built on the curvature."""

from kfc.optimizers.kfc import KFC

__all__ = ["KFC"]
