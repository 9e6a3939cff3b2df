"""Batch statistics from forward passes: hooks, the sampled backward, the collector."""
