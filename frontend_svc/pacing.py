"""Shows answers at the pace at which users read (PASCAL's token pacer, section V-A); off unless asked for.

Token k, ready at g(k), is shown at d(k) = max(g(k), d(k-1) + pace). What is made faster waits here, so that a
pause of the instance, a handover or a recovery is not seen while there is something in store. It only delays:
outputs have been accepted before they come here, and leave in order. Reasoning is not paced.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from frontend_svc.streams import Stream

# Outputs in store, of one stream and in all. Beyond either a stream's oldest is shown at once.
_STREAM_MAX: Final = 4_096
_ALL_MAX: Final = 262_144

Frames = Sequence[bytes]


class Clock(Protocol):
    """The part of an event loop that is used here."""

    def time(self) -> float: ...

    def call_at(
        self, when: float, callback: Callable[[int], None], handle: int, /
    ) -> asyncio.TimerHandle: ...


@dataclass(slots=True, eq=False)
class _Paced:
    request_id: str
    pace_s: float
    # When the next token may be shown.
    due_s: float
    # Messages in store, each with the number of its tokens and when it came.
    stored: deque[tuple[Frames, int, float]] = field(default_factory=deque)
    timer: asyncio.TimerHandle | None = None
    # The last output has come.
    ended: bool = False


class Pacer:
    """All paced answers of one front end. Called on the event loop."""

    def __init__(self, send: Callable[[Frames], None], clock: Clock | None = None) -> None:
        """`send`: to the API server. `clock`: the running event loop unless given."""
        self._send = send
        self._clock = clock
        self._by_handle: dict[int, _Paced] = {}
        self._by_request: dict[str, int] = {}
        self._stored = 0

    def __bool__(self) -> bool:
        """Whether anything is paced."""
        return bool(self._by_handle)

    @property
    def stored(self) -> int:
        """Outputs in store."""
        return self._stored

    def begin(self, stream: Stream, shown_tokens: int) -> None:
        """The answer begins; so many tokens of it have just been shown. Nothing for a stream without pace."""
        if not stream.pace_s or stream.handle in self._by_handle:
            return
        due_s = self._now_s() + shown_tokens * stream.pace_s
        self._by_handle[stream.handle] = _Paced(stream.request_id, stream.pace_s, due_s)
        self._by_request[stream.request_id] = stream.handle

    def paces(self, handle: int) -> bool:
        """Whether outputs of this stream must go through here."""
        return handle in self._by_handle

    def put(self, handle: int, frames: Frames, tokens: int, last: bool) -> None:
        """Show this message when its time has come; `last`: nothing follows."""
        paced = self._by_handle[handle]
        paced.stored.append((frames, tokens, self._now_s()))
        paced.ended = paced.ended or last
        self._stored += 1
        if len(paced.stored) > _STREAM_MAX or self._stored > _ALL_MAX:
            self._send(paced.stored.popleft()[0])
            self._stored -= 1
        self._show_due(handle)

    def drop(self, request_id: str) -> None:
        """Nobody reads it any more."""
        handle = self._by_request.get(request_id)
        if handle is not None:
            self._forget(handle)

    def close(self) -> None:
        """Drop all."""
        for handle in list(self._by_handle):
            self._forget(handle)

    def _show_due(self, handle: int) -> None:
        paced = self._by_handle.get(handle)
        if paced is None:
            return
        if paced.timer is not None:
            paced.timer.cancel()
            paced.timer = None
        now_s = self._now_s()
        # What has no token, such as an error, comes right after what was before it.
        while paced.stored and (paced.due_s <= now_s or not paced.stored[0][1]):
            self._show(paced)
        if paced.stored:
            paced.timer = self._loop().call_at(paced.due_s, self._show_due, handle)
        elif paced.ended:
            self._forget(handle)

    def _show(self, paced: _Paced) -> None:
        frames, tokens, ready_s = paced.stored.popleft()
        self._stored -= 1
        # From when it was due, not from now: a late timer delays nothing after it.
        paced.due_s = max(ready_s, paced.due_s) + tokens * paced.pace_s
        self._send(frames)

    def _forget(self, handle: int) -> None:
        paced = self._by_handle.pop(handle)
        del self._by_request[paced.request_id]
        self._stored -= len(paced.stored)
        if paced.timer is not None:
            paced.timer.cancel()

    def _now_s(self) -> float:
        return self._loop().time()

    def _loop(self) -> Clock:
        if self._clock is None:
            self._clock = asyncio.get_running_loop()
        return self._clock
