"""Show answers at the pace at which users read (PASCAL's token pacer, section V-A); off unless enabled.

Token k, ready at g(k), is shown at d(k) = max(g(k), d(k-1) + pace). Tokens made faster than that are buffered
here, so that a pause of the instance, a handover or a recovery is invisible while the buffer lasts. Pacing
only delays: outputs are accepted before they get here, and leave in order. Reasoning is not paced.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from frontend_svc.streams import Stream

# Buffered outputs of one stream, and of all. Beyond either, the stream's oldest is shown at once.
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
    # The API server's name of the request, and the fleet's id.
    name: str
    request_id: str
    pace_s: float
    # When the next token may be shown, in seconds of the clock.
    due_s: float
    # Buffered messages, each with its number of tokens and its arrival time.
    buffered: deque[tuple[Frames, int, float]] = field(default_factory=deque)
    timer: asyncio.TimerHandle | None = None
    # The last output has arrived.
    ended: bool = False


class Pacer:
    """Buffer the paced answers of one front end. Called on the event loop."""

    def __init__(self, send: Callable[[Frames], None], clock: Clock | None = None) -> None:
        """`send` sends to the API server. `clock`: the running event loop by default."""
        self._send = send
        self._clock = clock
        self._by_handle: dict[int, _Paced] = {}
        self._by_name: dict[str, int] = {}
        self._buffered = 0

    def __bool__(self) -> bool:
        """Return whether any answer is paced."""
        return bool(self._by_handle)

    @property
    def buffered(self) -> int:
        """Return the number of buffered outputs."""
        return self._buffered

    def begin(self, stream: Stream, shown_tokens: int) -> None:
        """Begin to pace an answer of which `shown_tokens` have just been shown. Does nothing for a stream
        without a pace."""
        if not stream.pace_s or stream.handle in self._by_handle:
            return
        due_s = self._now_s() + shown_tokens * stream.pace_s
        self._by_handle[stream.handle] = _Paced(stream.name, stream.request_id, stream.pace_s, due_s)
        self._by_name[stream.name] = stream.handle

    def is_paced(self, handle: int) -> bool:
        """Return whether outputs of this stream must go through the pacer."""
        return handle in self._by_handle

    def put(self, handle: int, frames: Frames, tokens: int, last: bool) -> None:
        """Show this message when it is due, at once if its stream is not paced; `last`: no message
        follows."""
        paced = self._by_handle.get(handle)
        if paced is None:
            self._send(frames)
            return
        paced.buffered.append((frames, tokens, self._now_s()))
        paced.ended = paced.ended or last
        self._buffered += 1
        if len(paced.buffered) > _STREAM_MAX or self._buffered > _ALL_MAX:
            self._send(paced.buffered.popleft()[0])
            self._buffered -= 1
        self._show_due(handle)

    def drop(self, name: str) -> str | None:
        """Discard an answer that no client reads any more; return the fleet's id of its request, None if
        there was none."""
        handle = self._by_name.get(name)
        if handle is None:
            return None
        request_id = self._by_handle[handle].request_id
        self._forget(handle)
        return request_id

    def close(self) -> None:
        """Discard all answers."""
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
        # A message without tokens, such as an error, follows the previous one at once.
        while paced.buffered and (paced.due_s <= now_s or not paced.buffered[0][1]):
            self._show(paced)
        if paced.buffered:
            paced.timer = self._loop().call_at(paced.due_s, self._show_due, handle)
        elif paced.ended:
            self._forget(handle)

    def _show(self, paced: _Paced) -> None:
        frames, tokens, ready_s = paced.buffered.popleft()
        self._buffered -= 1
        # Count from when it was due, not from now: a late timer must not delay later tokens.
        paced.due_s = max(ready_s, paced.due_s) + tokens * paced.pace_s
        self._send(frames)

    def _forget(self, handle: int) -> None:
        paced = self._by_handle.pop(handle)
        # An API server may name its next request like one of which not everything is shown yet.
        if self._by_name.get(paced.name) == handle:
            del self._by_name[paced.name]
        self._buffered -= len(paced.buffered)
        if paced.timer is not None:
            paced.timer.cancel()

    def _now_s(self) -> float:
        return self._loop().time()

    def _loop(self) -> Clock:
        if self._clock is None:
            self._clock = asyncio.get_running_loop()
        return self._clock
