"""Estimate the recent transfer rate of KV from transfers of any size."""

from __future__ import annotations

from typing import Final

# Decay factor per transfer: about the last twenty count.
_DECAY: Final = 0.95


class TransferRate:
    """Recent bytes over the seconds that they took, with exponential decay of both.

    A ratio of sums gives large transfers, which measure bandwidth, more weight than small ones, which measure
    latency.
    """

    __slots__ = ("_bytes", "_seconds")

    def __init__(self) -> None:
        self._bytes = 0.0
        self._seconds = 0.0

    def add(self, size_bytes: int, seconds: float) -> None:
        """Add a finished transfer; one of no bytes or no time is ignored."""
        if size_bytes <= 0 or seconds <= 0.0:
            return
        self._bytes = _DECAY * self._bytes + size_bytes
        self._seconds = _DECAY * self._seconds + seconds

    @property
    def bytes_per_s(self) -> float | None:
        """Return the rate in bytes per second; None before the first transfer."""
        return self._bytes / self._seconds if self._seconds else None
