"""Records what this scheduler's model is fed and what is decided, for one reader at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Final

import grpc

from scheduler_svc.admin.errors import Refused
from tailrace.actions import Action, Placement
from tailrace.control.live import LiveControl
from tailrace.control.recording import (
    Decided,
    Event,
    TooMuch,
    encode,
    recorded_actions,
    recorded_placement,
)
from tailrace.control.runner import PlaceQuestion, Point, Question

# Not read yet. A reader that is slower than that gets no recording with a gap, but the end of it.
_BYTES_MAX: Final = 128 * 1024 * 1024


class Recorder:
    """Costs nothing while nobody records."""

    def __init__(self, control: LiveControl, bytes_max: int = _BYTES_MAX) -> None:
        self._control = control
        self._bytes_max = bytes_max
        self._lines: list[bytes] = []
        self._bytes = 0
        self._more = asyncio.Event()
        self._recording = False
        self._full = False

    async def record(self, seconds: float) -> AsyncGenerator[list[bytes]]:
        """Lines as they come, for so long. Raises Refused while there is a recording under way: to begin one,
        the model counts anew, which another's replay would know nothing of."""
        if self._recording:
            raise Refused(grpc.StatusCode.FAILED_PRECONDITION, "a recording is under way already")
        self._recording, self._full = True, False
        self._lines, self._bytes = [], 0
        model, watchers = self._control.model, self._control.runner.watchers
        # First of all watchers: the replay has the decision before any other sees it.
        lines = [encode(event) for event in self._control.state(time.monotonic())]
        model.tap = self.tap
        watchers.insert(0, self)
        try:
            yield lines
            end_s = time.monotonic() + seconds
            while not self._full and (left_s := end_s - time.monotonic()) > 0:
                try:
                    async with asyncio.timeout(left_s):
                        await self._more.wait()
                except TimeoutError:
                    break
                yield self._take()
            yield self._take()
        finally:
            model.tap = None
            watchers.remove(self)
            self._lines, self._bytes = [], 0
            self._recording = False

    def _take(self) -> list[bytes]:
        lines, self._lines, self._bytes = self._lines, [], 0
        self._more.clear()
        return lines

    def tap(self, event: Event) -> None:
        """Something happened."""
        if self._full:
            return
        if self._bytes > self._bytes_max:
            self._full, event = True, TooMuch()
        line = encode(event)
        self._lines.append(line)
        self._bytes += len(line)
        self._more.set()

    def placed(self, policy: str, question: PlaceQuestion, placement: Placement) -> None:
        """A request was placed."""
        request_id = question.arrival.request_id
        self.tap(Decided(Point.PLACE.value, policy, request_id, recorded_placement(placement)))

    def decided(self, policy: str, question: Question, actions: Sequence[Action] | None) -> None:
        """Anything else was decided."""
        request_id = "" if question.request is None else question.request.request_id
        self.tap(Decided(question.point.value, policy, request_id, recorded_actions(actions)))
