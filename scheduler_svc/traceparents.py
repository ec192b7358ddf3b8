"""The trace contexts of placed requests."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

_TRACEPARENTS_MAX: Final = 20_000


class Traceparents:
    """Remember the trace contexts of the most recently placed requests, for later events of theirs."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, str] = OrderedDict()

    def remember(self, request_id: str, traceparent: str) -> None:
        """Remember a request's traceparent unless it is empty."""
        if not traceparent:
            return
        self._known[request_id] = traceparent
        if len(self._known) > _TRACEPARENTS_MAX:
            self._known.popitem(last=False)

    def get(self, request_id: str) -> str:
        """Return the traceparent; "" if unknown."""
        return self._known.get(request_id, "")
