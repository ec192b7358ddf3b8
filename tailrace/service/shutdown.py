"""What a service still does between the first signal to stop and its end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)

Drain = Callable[[], Coroutine[None, None, None]]


class Shutdown:
    """Holds the drain of a service that serves: finish or hand over what is under way, take nothing new.

    While a service starts, or once it is closing, there is nothing to drain, and a signal ends it at once.
    """

    def __init__(self) -> None:
        self._drain: Drain | None = None
        self._timeout_s = 0.0

    @contextmanager
    def draining(self, drain: Drain, timeout_s: float) -> Iterator[None]:
        """Within the block the service is drained before it is cancelled; `timeout_s` bounds the draining."""
        self._drain, self._timeout_s = drain, timeout_s
        try:
            yield
        finally:
            self._drain = None

    async def run_drain(self) -> None:
        """Drain what there is to drain. A drain that fails or takes too long is logged, and over."""
        if self._drain is None:
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._drain()
        except TimeoutError:
            log.warning("not drained within %g s", self._timeout_s)
        except Exception:
            log.exception("draining failed")
