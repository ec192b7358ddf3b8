"""Record the inputs of this scheduler's model and the decisions on them, for one reader at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Final

import grpc

from scheduler_svc.admin.errors import AdminError
from tailrace.control.answers import Answer
from tailrace.control.live import LiveControl
from tailrace.control.recording import Decided, Line, RecordingOverflow, encode, recorded_answer
from tailrace.control.runner import Asked

# Unread bytes. A reader that is slower gets the end of the recording, not one with a gap.
_BYTES_MAX: Final = 128 * 1024 * 1024


class Recorder:
    """Record on request; costs nothing otherwise."""

    def __init__(self, control: LiveControl, leading: asyncio.Event, bytes_max: int = _BYTES_MAX) -> None:
        """`leading` is set while this scheduler leads."""
        self._control = control
        self._leading = leading
        self._bytes_max = bytes_max
        self._lines: list[bytes] = []
        self._bytes = 0
        self._lines_added = asyncio.Event()
        self._recording = False
        self._overflowed = False

    async def record(self, seconds: float) -> AsyncGenerator[list[bytes]]:
        """Yield lines for `seconds` seconds.

        Raise AdminError: FAILED_PRECONDITION while another recording is in progress; ABORTED if this
        scheduler stops leading, after the lines until then.

        Starting a recording makes the model recount its state, which a replay of another recording would not
        know of.
        """
        if self._recording:
            raise AdminError(
                grpc.StatusCode.FAILED_PRECONDITION,
                "a recording is in progress already; try again when it has ended",
            )
        self._recording, self._overflowed = True, False
        self._lines, self._bytes = [], 0
        model, watchers = self._control.model, self._control.runner.watchers
        # First of all watchers: the decision is recorded before any other watcher sees it.
        lines = [encode(event) for event in self._control.state(time.monotonic())]
        model.tap = self.tap
        watchers.insert(0, self)
        try:
            yield lines
            end_s = time.monotonic() + seconds
            while not self._overflowed and (left_s := end_s - time.monotonic()) > 0:
                try:
                    async with asyncio.timeout(left_s):
                        await self._lines_added.wait()
                except TimeoutError:
                    break
                yield self._take()
                if not self._leading.is_set():
                    raise AdminError(
                        grpc.StatusCode.ABORTED,
                        "this scheduler does not lead any more; record again to follow the new leader",
                    )
            yield self._take()
        finally:
            model.tap = None
            watchers.remove(self)
            self._lines, self._bytes = [], 0
            self._recording = False

    def _take(self) -> list[bytes]:
        lines, self._lines, self._bytes = self._lines, [], 0
        self._lines_added.clear()
        return lines

    def tap(self, event: Line) -> None:
        """Record an event."""
        if self._overflowed:
            return
        if self._bytes > self._bytes_max:
            self._overflowed, event = True, RecordingOverflow()
        line = encode(event)
        self._lines.append(line)
        self._bytes += len(line)
        self._lines_added.set()

    def answered(self, policy: str, question: Asked[Answer], answer: Answer) -> None:
        """Record a decision."""
        self.tap(Decided(question.point.value, policy, question.request_id, recorded_answer(answer)))
