"""The Fisher approximation of a model: one file per approximation, and their container."""
