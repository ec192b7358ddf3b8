"""A waiting queue for vLLM's scheduler that is kept in order of rank and lets in whom it is told to."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request

from tailrace.intra.base import Rank


class RankedQueue(RequestQueue):  # type: ignore[misc]
    """Ranks of waiting requests do not change, so each is asked once, when its request is put in.

    Between `open` and `close` vLLM's scan sees only the requests that were let in, in that order; at all
    other times, and for counting, the queue is what it holds.
    """

    def __init__(self, rank: Callable[[Request], Rank], requests: Iterable[Request] = ()) -> None:
        self._rank = rank
        self._ranks: dict[Request, Rank] = {request: rank(request) for request in requests}
        self._entries = sorted(((rank, request) for request, rank in self._ranks.items()), key=_rank_of)
        self._admitted: deque[Request] | None = None

    def open(self, admitted: Iterable[Request]) -> None:
        """The scan is about to begin."""
        self._admitted = deque(admitted)

    def close(self) -> None:
        """The scan is over; who was not taken waits on."""
        self._admitted = None

    def ranked(self) -> Iterator[tuple[Rank, Request]]:
        """All, in order; must not be changed meanwhile."""
        return iter(self._entries)

    # ---- vLLM's interface

    def add_request(self, request: Request) -> None:
        rank = self._ranks[request] = self._rank(request)
        insort(self._entries, (rank, request), key=_rank_of)

    def pop_request(self) -> Request:
        request = self.peek_request()
        self.remove_request(request)
        return request

    def peek_request(self) -> Request:
        if self._admitted is not None:
            return self._admitted[0]
        return self._entries[0][1]

    def prepend_request(self, request: Request) -> None:
        self.add_request(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.add_request(request)

    def remove_request(self, request: Request) -> None:
        # A shorter tuple comes before a longer one that begins with it, so requests are not compared.
        del self._entries[bisect_left(self._entries, (self._ranks.pop(request),))]
        if self._admitted is not None and self._admitted[0] is request:
            self._admitted.popleft()

    def remove_requests(self, requests: Iterable[Request]) -> None:
        for request in requests:
            if request in self._ranks:
                self.remove_request(request)

    def __bool__(self) -> bool:
        return bool(self._entries if self._admitted is None else self._admitted)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, request in self._entries)


def _rank_of(entry: tuple[Rank, Request]) -> Rank:
    return entry[0]
