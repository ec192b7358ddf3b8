"""Benchmarks: each prints what it measured, on what, against what, and leaves JSON in benchmarks/results/."""
