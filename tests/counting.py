"""What a process has counted so far of what went wrong without ending it."""

from __future__ import annotations

from tailrace.telemetry.incidents import LOOP_FAILURES, UNREADABLE


def failures_of(loop: str) -> float:
    """Return the unexpected exceptions of a loop, or of a kind of tasks."""
    return LOOP_FAILURES.labels(loop)._value.get()  # type: ignore[no-any-return]


def skipped(what: str) -> float:
    """Return how many things of a kind could not be read."""
    return UNREADABLE.labels(what)._value.get()  # type: ignore[no-any-return]
