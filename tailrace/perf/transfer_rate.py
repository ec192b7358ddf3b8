"""How fast KV has been transferred lately, from transfers of any size."""

from __future__ import annotations

from typing import Final

# Weight of all transfers before the latest, relative to it: about the last twenty count.
_KEPT: Final = 0.95


class TransferRate:
    """Bytes a second: recent bytes over the seconds that they took, both forgotten alike.

    A ratio of sums, so that a large transfer, which tells of the link, counts for more than a small one,
    which tells of latency.
    """

    __slots__ = ("_bytes", "_seconds")

    def __init__(self) -> None:
        self._bytes = 0.0
        self._seconds = 0.0

    def add(self, size_bytes: int, seconds: float) -> None:
        """A transfer that has ended. One of nothing, or of no time, tells nothing."""
        if size_bytes <= 0 or seconds <= 0.0:
            return
        self._bytes = _KEPT * self._bytes + size_bytes
        self._seconds = _KEPT * self._seconds + seconds

    @property
    def bytes_per_s(self) -> float | None:
        """None: there was no transfer yet."""
        return self._bytes / self._seconds if self._seconds else None
