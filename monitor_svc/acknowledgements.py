"""Acknowledge the reports of one stream: the latest stands for all before it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final

# Between two acknowledgements, in seconds. Workers give a monitor up when one is missing for 1.25 s. For both
# sides one costs as much as a report.
_INTERVAL_S: Final = 0.75


class Acknowledgements:
    """Yield the sequence number of the latest report, at once if none was yielded for an interval."""

    def __init__(self) -> None:
        self._latest: int | None = None
        self._yielded: int | None = None
        self._ended = False
        self._changed = asyncio.Event()
        # While it runs, a report waits for its acknowledgement.
        self._interval: asyncio.TimerHandle | None = None

    def received(self, seq: int) -> None:
        """Have a report acknowledged."""
        self._latest = seq
        if self._interval is None:
            self._changed.set()

    def end(self) -> None:
        """End the iteration after what is left: no more reports will be received."""
        self._ended = True
        if self._interval is not None:
            self._interval.cancel()
        self._changed.set()

    def _interval_ended(self) -> None:
        self._interval = None
        if self._latest != self._yielded:
            self._changed.set()

    async def __aiter__(self) -> AsyncIterator[int]:
        """Iterate until `end`."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            ended, latest = self._ended, self._latest
            if latest is not None and latest != self._yielded:
                self._yielded = latest
                if not ended:
                    loop = asyncio.get_running_loop()
                    self._interval = loop.call_later(_INTERVAL_S, self._interval_ended)
                yield latest
            if ended:
                return
