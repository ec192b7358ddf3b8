"""A waiting queue for vLLM's scheduler, ordered by rank, that admits only selected requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator

from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request

from tailrace.intra.base import Rank
from worker_agent.engine.ranked_requests import RankedRequests


class RankedQueue(RequestQueue):  # type: ignore[misc]
    """Between `open` and `close`, vLLM's scan sees only the admitted requests, in their order. At other
    times, and for its length and iteration, the queue has all its requests.
    """

    def __init__(
        self,
        rank: Callable[[Request], Rank],
        lapses_s: Callable[[Request], float | None],
        lapse: Callable[[Request], None],
        requests: Iterable[Request] = (),
    ) -> None:
        """The parameters are those of `RankedRequests`."""
        self._requests = RankedRequests(rank, lapses_s, lapse, requests)
        self._admitted: deque[Request] | None = None

    def open(self, admitted: Iterable[Request]) -> None:
        """Limit the following scan to these requests."""
        self._admitted = deque(admitted)

    def close(self) -> None:
        """End the scan; requests that it did not take remain in the queue."""
        self._admitted = None

    def advance(self, now_s: float) -> None:
        """Update the ranks that lapse; see `RankedRequests`."""
        self._requests.advance(now_s)

    def ranked(self) -> Iterator[tuple[Rank, Request]]:
        """Iterate over all requests in order; the queue must not be changed meanwhile."""
        return self._requests.ranked()

    # ---- vLLM's interface

    def add_request(self, request: Request) -> None:
        self._requests.add(request)

    def pop_request(self) -> Request:
        request = self.peek_request()
        self.remove_request(request)
        return request

    def peek_request(self) -> Request:
        return self._admitted[0] if self._admitted is not None else next(iter(self._requests))

    def prepend_request(self, request: Request) -> None:
        self._requests.add(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self._requests.add(request)

    def remove_request(self, request: Request) -> None:
        self._requests.remove(request)
        if self._admitted and self._admitted[0] is request:
            self._admitted.popleft()

    def remove_requests(self, requests: Iterable[Request]) -> None:
        for request in requests:
            if request in self._requests:
                self.remove_request(request)

    def __bool__(self) -> bool:
        return bool(len(self._requests) if self._admitted is None else self._admitted)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)
