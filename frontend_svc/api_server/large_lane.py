"""Keep one client's requests from delaying others while vLLM parses, renders, tokenizes and submits them.

Parsing and validation hold the event loop, and tokenizing a thread of vLLM's renderer, of which there is one.
So large requests get a thread of their own, enter one at a time, by turns of their tenants, and no sooner
than leaves most of the event loop's time to the others. Their sequences are submitted one by one, with as
much time in between. Of a tenant's small requests one enters at a time, so that many of them that come at
once are not all before another tenant's next one, and while other tenants send some, no sooner than leaves
them most of the event loop's time.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, Final

from tailrace.tenancy.fair_queue import FairQueue, Queued
from tailrace.tenancy.pace import ALONE_AFTER_S, TENANT_SHARE, Arrivals

LARGE_BYTES: Final = 32 << 10
"""Text of more bytes is large, whatever it costs the event loop."""
LARGE_LOOP_S: Final = 0.005
"""So is what occupies the event loop for longer than this, by estimate."""
MAX_WAITING: Final = 1_024
"""Large requests of one tenant that may wait for their turn."""
# The same of `frontend_svc`'s event loop, for placing a sequence and forwarding a token: the busiest part of
# its way (measured: 0.61 ms of 2 ms in all processes).
_SEQUENCE_WAY_S: Final = 6e-4
REQUEST_LOOP_S: Final = 2e-3
"""The same for what any request takes, however small."""
# Longest turn, for what waits for others, such as an image that is fetched. Longer than texts take.
_MAX_TURN_S: Final = 10.0
# Share of an event loop's time that large requests may take, and that their sequences may while no small
# request has come for so many seconds.
_LOOP_SHARE: Final = 0.1
_ALONE_SHARE: Final = 0.5
# A thread that computes in Python gives the interpreter back to the event loop after this time; Python's
# default is 5 ms, several times in each small request.
_SWITCH_S: Final = 0.0002

large_task: ContextVar[bool] = ContextVar("large_task", default=False)
"""Whether the current task serves a large request."""


class LaneTurn:
    """A large request's turn. Ending it twice is like ending it once."""

    def __init__(self, lane: LargeLane, next_s: float) -> None:
        self._lane = lane
        self._next_s = next_s
        self._ended = False

    async def step(self) -> None:
        """Wait until the next sequence may be submitted."""
        await self._lane.step()

    def end(self) -> None:
        """Let the next large request enter: this one is submitted, or has ended."""
        if not self._ended:
            self._ended = True
            self._lane.turn_ended(self._next_s)


class LargeLane:
    """The queue of large requests of one API server."""

    def __init__(self, max_waiting: int = MAX_WAITING, max_turn_s: float = _MAX_TURN_S) -> None:
        self._queue: FairQueue[asyncio.Future[LaneTurn]] = FairQueue(max_waiting)
        self._max_waiting = max_waiting
        self._occupied = False
        # The event loop's time before which nobody enters.
        self._next_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._max_turn_s = max_turn_s
        # Ends the turn in progress.
        self._deadline: asyncio.TimerHandle | None = None
        # Held by whoever waits to submit the next sequence, which is not before this time.
        self._stepping = asyncio.Lock()
        self._next_step_s = 0.0
        # The event loop's time when the last small request came.
        self._small_s = -ALONE_AFTER_S

    def __len__(self) -> int:
        """Count the requests that wait."""
        return len(self._queue)

    def is_full(self, tenant: str) -> bool:
        """Return whether no more requests of this tenant may wait."""
        return self._queue.waiting().get(tenant, 0) >= self._max_waiting

    async def enter(self, tenant: str, weight: float, loop_s: float) -> LaneTurn:
        """Wait for the turn of a request that occupies the event loop for about `loop_s`.

        Raise TenantQueueFull.
        """
        waiting: asyncio.Future[LaneTurn] = asyncio.get_running_loop().create_future()
        entry = self._queue.push(waiting, tenant, weight, max(loop_s, 1e-6))
        self._advance()
        try:
            return await waiting
        except asyncio.CancelledError:
            self._give_up(entry)
            raise

    def _give_up(self, entry: Queued[asyncio.Future[LaneTurn]]) -> None:
        waiting = entry.item
        if waiting.done() and not waiting.cancelled():
            # It was given its turn in the same moment.
            waiting.result().end()
        else:
            # Its turn may have come and have been passed on.
            with suppress(KeyError):
                self._queue.remove(entry)

    async def step(self) -> None:
        """Wait until a sequence of a large request may be submitted; for LaneTurn alone.

        A request may have thousands. Submitted at once, they would occupy the event loop, the front end and
        the worker for as long as all of them take.
        """
        loop = asyncio.get_running_loop()
        async with self._stepping:
            await asyncio.sleep(max(0.0, self._next_step_s - loop.time()))
            alone = loop.time() - self._small_s >= ALONE_AFTER_S
            self._next_step_s = loop.time() + _SEQUENCE_WAY_S / (_ALONE_SHARE if alone else _LOOP_SHARE)

    def small_came(self) -> None:
        """Leave more time to small requests for a while, since one has come."""
        self._small_s = asyncio.get_running_loop().time()

    def turn_ended(self, next_s: float) -> None:
        """Let the next one enter, not before `next_s`; for LaneTurn alone."""
        self._occupied = False
        if self._deadline is not None:
            self._deadline.cancel()
        self._next_s = next_s
        self._advance()

    def _advance(self) -> None:
        loop = asyncio.get_running_loop()
        while self._timer is None and not self._occupied and len(self._queue):
            wait_s = self._next_s - loop.time()
            if wait_s > 0.0:
                self._timer = loop.call_later(wait_s, self._wait_is_over)
                return
            entry = self._queue.pop()
            # Cancelled ones leave the queue when their tasks run.
            if not entry.item.cancelled():
                self._occupied = True
                turn = LaneTurn(self, loop.time() + entry.cost / _LOOP_SHARE)
                self._deadline = loop.call_later(self._max_turn_s, turn.end)
                entry.item.set_result(turn)

    def _wait_is_over(self) -> None:
        self._timer = None
        self._advance()


class Pass:
    """A small request's pass. Giving it back twice is like once."""

    def __init__(self, doors: Doors, tenant: str, longest_s: float) -> None:
        loop = asyncio.get_running_loop()
        self.began_s = loop.time()
        self._doors = doors
        self._tenant = tenant
        self._timer = loop.call_later(longest_s, self.give_back)
        self._given_back = False

    def give_back(self) -> None:
        """Let the tenant's next request enter: this one is submitted, has ended, or waits for others."""
        if not self._given_back:
            self._given_back = True
            self._timer.cancel()
            self._doors.pass_ended(self._tenant, self.began_s)


class Doors:
    """A door for each tenant, through which its small requests go one by one.

    How many wait is bounded by the connections and by the bytes of bodies.
    """

    def __init__(self, longest_s: float = LARGE_LOOP_S) -> None:
        """`longest_s`: of a pass. What occupies the event loop for longer would be large."""
        self._longest_s = longest_s
        # Of tenants whose door is closed: a request is inside, or the next one may not enter yet.
        self._waiting: dict[str, deque[asyncio.Future[Pass]]] = {}
        self._arrivals = Arrivals()

    def __len__(self) -> int:
        """Count the requests that wait."""
        return sum(map(len, self._waiting.values()))

    async def enter(self, tenant: str) -> Pass:
        """Wait for the pass of a tenant's request."""
        loop = asyncio.get_running_loop()
        self._arrivals.came(tenant, loop.time())
        queue = self._waiting.get(tenant)
        if queue is None:
            self._waiting[tenant] = deque()
            return Pass(self, tenant, self._longest_s)
        waiting: asyncio.Future[Pass] = loop.create_future()
        queue.append(waiting)
        try:
            return await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled():
                # It was given its pass in the same moment.
                waiting.result().give_back()
            else:
                # Its turn may have come and have been passed on.
                with suppress(ValueError):
                    queue.remove(waiting)
            raise

    def pass_ended(self, tenant: str, began_s: float) -> None:
        """Open the door for the tenant's next request, later if others send some; for Pass alone."""
        loop = asyncio.get_running_loop()
        open_s = began_s + REQUEST_LOOP_S / TENANT_SHARE
        if self._arrivals.are_of_others(tenant, loop.time()) and open_s > loop.time():
            loop.call_at(open_s, self._open, tenant)
        else:
            self._open(tenant)

    def _open(self, tenant: str) -> None:
        queue = self._waiting[tenant]
        while queue:
            waiting = queue.popleft()
            if not waiting.done():
                waiting.set_result(Pass(self, tenant, self._longest_s))
                return
        del self._waiting[tenant]


def use_two_lanes(executor: Executor) -> None:
    """Have an executor run what tasks of large requests submit in a thread apart from the rest."""
    sys.setswitchinterval(_SWITCH_S)
    lanes = _Lanes(executor)
    # vLLM's functions have captured the executor itself.
    executor.submit = lanes.submit  # type: ignore[method-assign]
    executor.shutdown = lanes.shutdown  # type: ignore[method-assign]
    if hasattr(executor, "replace_inner"):
        executor.replace_inner = lanes.replace_inner


class _Lanes:
    """The methods of an executor that has another one for large requests."""

    def __init__(self, executor: Any) -> None:
        self._submit = executor.submit
        self._shutdown = executor.shutdown
        self._replace_inner = getattr(executor, "replace_inner", None)
        self._large = _new_pool()

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        submit = self._large.submit if large_task.get() else self._submit
        future: Future[Any] = submit(function, *args, **kwargs)
        return future

    def shutdown(self, *args: Any, **kwargs: Any) -> None:
        self._large.shutdown(wait=False, cancel_futures=True)
        self._shutdown(*args, **kwargs)

    def replace_inner(self) -> None:
        """Abandon the pool in which this task's function does not return."""
        if large_task.get():
            self._large.shutdown(wait=False)
            self._large = _new_pool()
        elif self._replace_inner is not None:
            self._replace_inner()


def _new_pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="large prompts")
