"""A waiting queue for vLLM's scheduler that is kept in order of rank and lets in whom it is told to."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator

from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request

from tailrace.intra.base import Rank
from worker_agent.engine.ranked_line import RankedLine


class RankedQueue(RequestQueue):  # type: ignore[misc]
    """Between `open` and `close` vLLM's scan sees only the requests that were let in, in that order; at all
    other times, and for counting, the queue is what it holds.
    """

    def __init__(
        self,
        rank: Callable[[Request], Rank],
        lapses_s: Callable[[Request], float | None],
        lapse: Callable[[Request], None],
        requests: Iterable[Request] = (),
    ) -> None:
        """See `RankedLine`."""
        self._line = RankedLine(rank, lapses_s, lapse, requests)
        self._admitted: deque[Request] | None = None

    def open(self, admitted: Iterable[Request]) -> None:
        """The scan is about to begin."""
        self._admitted = deque(admitted)

    def close(self) -> None:
        """The scan is over; who was not taken waits on."""
        self._admitted = None

    def advance(self, now_s: float) -> None:
        """See `RankedLine`."""
        self._line.advance(now_s)

    def ranked(self) -> Iterator[tuple[Rank, Request]]:
        """All, in order; must not be changed meanwhile."""
        return self._line.ranked()

    # ---- vLLM's interface

    def add_request(self, request: Request) -> None:
        self._line.add(request)

    def pop_request(self) -> Request:
        request = self.peek_request()
        self.remove_request(request)
        return request

    def peek_request(self) -> Request:
        return self._admitted[0] if self._admitted is not None else next(iter(self._line))

    def prepend_request(self, request: Request) -> None:
        self._line.add(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self._line.add(request)

    def remove_request(self, request: Request) -> None:
        self._line.remove(request)
        if self._admitted and self._admitted[0] is request:
            self._admitted.popleft()

    def remove_requests(self, requests: Iterable[Request]) -> None:
        for request in requests:
            if request in self._line:
                self.remove_request(request)

    def __bool__(self) -> bool:
        return bool(len(self._line) if self._admitted is None else self._admitted)

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._line)
