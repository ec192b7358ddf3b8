"""Holds new requests back while enough prompts are under way, and lets them through tenant by tenant.

What an engine has it serves in its own order: a tenant whose burst is there already goes first whatever came
after it. So no more than a bounded backlog is given to the engines, and the rest waits here.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from frontend_svc.admission import NO_INSTANCE, NO_TURN, Refusal
from frontend_svc.streams import Stream
from tailrace.tenancy.fair_queue import Entry, FairQueue, TenantQueueFull
from tailrace.tenancy.share import Share


@dataclass(slots=True)
class _Waiting:
    entry: Entry[Stream]
    timer: asyncio.TimerHandle


class FairGate:
    """What is under way is whatever passed here and has no first token yet; its cost is its prompt.

    Every new request is queued, and goes on at once where the backlog has room: what a tenant had counts also
    if nobody waited then. One request may exceed the backlog, or the largest would never have its turn.
    """

    def __init__(
        self,
        backlog_tokens: int,
        most_waiting: int,
        patience_s: float,
        start: Callable[[Stream], None],
        give_up: Callable[[Stream, Refusal], None],
        observe_wait: Callable[[float], None],
    ) -> None:
        """`backlog_tokens`: of prompts, for each instance; `most_waiting`: requests of one tenant, each for
        `patience_s` seconds. `start` is told of each that goes on, `give_up` of each that waited in vain,
        `observe_wait` how many seconds one that goes on has waited."""
        self._per_instance = backlog_tokens
        self._patience_s = patience_s
        self._start = start
        self._give_up = give_up
        self._observe_wait = observe_wait
        self._instances = 0
        self._queue = FairQueue[Stream](most_waiting)
        self._waiting: dict[int, _Waiting] = {}
        # Costs of those under way, by handle.
        self._under_way: dict[int, int] = {}
        self.backlog_tokens = 0
        # How many were not let through: the tenant's line was "full", or the "deadline" passed.
        self.refused: Counter[str] = Counter()

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._queue)

    @property
    def limit_tokens(self) -> int:
        """Of prompts under way, from which on requests wait."""
        return self._per_instance * self._instances

    def waiting(self) -> dict[str, int]:
        """Requests by tenant, of those who have any."""
        return self._queue.waiting()

    def arrive(self, stream: Stream, share: Share, priority: int) -> None:
        """A new request, whose time to find an instance begins. Raises TenantQueueFull."""
        try:
            entry = self._queue.push(stream, share.tenant, share.weight, _cost(stream), priority)
        except TenantQueueFull:
            self.refused["full"] += 1
            raise
        stream.placing_since_s = time.monotonic()
        timer = asyncio.get_running_loop().call_later(self._patience_s, partial(self._expire, stream))
        self._waiting[stream.handle] = _Waiting(entry, timer)
        self._let_through()

    def release(self, handle: int) -> None:
        """It has its first token, or is over: others may go on. One that is not known here is ignored."""
        waiting = self._waiting.pop(handle, None)
        if waiting is not None:
            waiting.timer.cancel()
            self._queue.remove(waiting.entry)
        cost = self._under_way.pop(handle, 0)
        self.backlog_tokens -= cost
        if cost:
            self._let_through()
        if not self._under_way and not self._queue:
            self._queue.begin_anew()

    def set_instances(self, count: int) -> None:
        """So many take prompts now."""
        self._instances = count
        self._let_through()

    def close(self) -> None:
        """Let nobody through any more."""
        self._instances = 0
        for waiting in self._waiting.values():
            waiting.timer.cancel()

    def _let_through(self) -> None:
        while self._queue and self.backlog_tokens < self.limit_tokens:
            entry = self._queue.pop()
            stream = entry.item
            self._waiting.pop(stream.handle).timer.cancel()
            self._under_way[stream.handle] = _cost(stream)
            self.backlog_tokens += _cost(stream)
            self._observe_wait(time.monotonic() - stream.placing_since_s)
            self._start(stream)

    def _expire(self, stream: Stream) -> None:
        waiting = self._waiting.pop(stream.handle)
        self._queue.remove(waiting.entry)
        self.refused["deadline"] += 1
        self._give_up(stream, NO_TURN if self._instances else NO_INSTANCE)


def _cost(stream: Stream) -> int:
    """A prompt of embeddings has no tokens."""
    return max(1, stream.prompt_tokens)
