"""Acknowledge the reports of one stream: the latest stands for all before it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final

# Between two acknowledgements, in seconds. Workers give a monitor up when one is missing for 1.25 s.
_INTERVAL_S: Final = 0.5


class Acknowledgements:
    """Yield the sequence number of the latest report, at once if none was yielded for an interval."""

    def __init__(self) -> None:
        self._latest = 0
        self._received = asyncio.Event()
        self._ended = asyncio.Event()

    def received(self, seq: int) -> None:
        """Have a report acknowledged."""
        self._latest = seq
        self._received.set()

    def end(self) -> None:
        """End the iteration after what is left: no more reports will be received."""
        self._ended.set()
        self._received.set()

    async def __aiter__(self) -> AsyncIterator[int]:
        """Iterate until `end`."""
        acknowledged = None
        while True:
            await self._received.wait()
            self._received.clear()
            ended, latest = self._ended.is_set(), self._latest
            if not ended or latest != acknowledged:
                yield latest
            if ended:
                return
            acknowledged = latest
            try:
                async with asyncio.timeout(_INTERVAL_S):
                    await self._ended.wait()
            except TimeoutError:
                continue
