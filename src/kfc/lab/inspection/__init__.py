"""Inspection of a network: how good the Fisher approximations are, layer by layer."""
