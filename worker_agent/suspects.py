"""Requests that may have crashed an engine: from one front end at a time.

A front end gives an instance one of its own at a time (frontend_svc/recovery.py). It knows nothing of the
other front ends' suspects; the worker does, and turns away what would come on top of one.
"""

from __future__ import annotations

from worker_agent.carried import CarriedRequests
from worker_agent.engine.base import RequestKey


class Suspects:
    """Of one worker."""

    def __init__(self, carried: CarriedRequests) -> None:
        self._carried = carried
        self._here: set[RequestKey] = set()

    def may_come(self, client: int) -> bool:
        """Whether no other front end has one here."""
        self._here = {key for key in self._here if self._carried.get(key) is not None}
        return all(key.client == client for key in self._here)

    def add(self, key: RequestKey) -> None:
        """It is here now."""
        self._here.add(key)

    def clear(self, key: RequestKey) -> None:
        """It does no harm."""
        self._here.discard(key)
