"""The benchmark of `kfc compare suite`: time to target over workloads that differ."""
