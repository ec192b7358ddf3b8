"""The trace context of requests that were placed here, for what happens to them later."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

_MAX: Final = 20_000


class Traceparents:
    """By request id, the last so many."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, str] = OrderedDict()

    def note(self, request_id: str, traceparent: str) -> None:
        """Remember; the empty one is none."""
        if not traceparent:
            return
        self._known[request_id] = traceparent
        if len(self._known) > _MAX:
            self._known.popitem(last=False)

    def get(self, request_id: str) -> str:
        """The traceparent, or "" when none is known."""
        return self._known.get(request_id, "")
