"""Keep blocks from being freed while another thread copies from or to them."""

from __future__ import annotations

import threading
from collections.abc import Callable

from worker_agent.engine.errors import EngineRefusal


class InUse:
    """Context manager around each copy; `close` refuses new copies and reports when the last has ended."""

    def __init__(self, subject: str) -> None:
        """`subject` is named in the refusal, as in "SUBJECT has ended"."""
        self._subject = subject
        self._lock = threading.Lock()
        self._users = 0
        self._when_idle: Callable[[], None] | None = None

    def __enter__(self) -> None:
        with self._lock:
            if self._when_idle is not None:
                raise EngineRefusal(f"{self._subject} has ended")
            self._users += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            done = self._when_idle if self._users == 0 else None
        if done is not None:
            done()

    def close(self, when_idle: Callable[[], None]) -> None:
        """Call `when_idle` once no copy is in progress: now, or on the thread whose copy ends last."""
        with self._lock:
            if self._when_idle is not None:
                return
            self._when_idle = when_idle
            idle = self._users == 0
        if idle:
            when_idle()
