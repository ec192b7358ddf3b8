"""Benchmarks: each prints its results and the machine, and saves JSON in benchmarks/results/."""

# First of all, because it turns gRPC's handlers of forks off, which can hang a process that is being started.
import tailrace  # noqa: F401
