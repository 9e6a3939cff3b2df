"""Experiments: data, networks and the training loop that the command line runs."""
