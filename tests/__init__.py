"""Tests, and checks that have a `make` target of their own."""

# First of all, because it turns gRPC's handlers of forks off, which can hang a process that is being started.
import tailrace  # noqa: F401
