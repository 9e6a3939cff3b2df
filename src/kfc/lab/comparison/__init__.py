"""Comparisons of several optimizers on one problem."""
