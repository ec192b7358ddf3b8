"""Benchmarks: each prints its results and the machine, and saves JSON in benchmarks/results/."""
