"""A waiting queue for vLLM's scheduler, ordered by rank, that admits only selected requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from tailrace.foreign_names import missing
from tailrace.intra.base import Rank
from worker_agent.engine.turns import RankedRequests
from worker_agent.engine.vllm.internals import WAITING

# A common view of the waiting requests in the schedulers of all vLLM versions.
#
# From 0.31 on, requests with KV blocks wait in a separate queue that has precedence, other requests that
# cannot start yet stay in the waiting queue, and the limit of running requests is separate from the model
# runner's slots. 0.30 has one queue for all requests that were passed over, which has precedence.


class Scheduler030(Scheduler):  # type: ignore[misc]
    """vLLM 0.30's scheduler with the attribute names of later versions.

    `kv_holding_waiting` is the queue with precedence. Requests without blocks that were passed over return to
    `waiting` after each step.
    """

    waiting: RequestQueue
    skipped_waiting: RequestQueue
    running: list[Request]
    max_num_running_reqs: int
    kv_holding_waiting: RequestQueue
    deferred_waiting: set[Request]
    adaptive_long_prefill_threshold: bool

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.kv_holding_waiting = self.skipped_waiting
        self.deferred_waiting = set()
        self.adaptive_long_prefill_threshold = False

    @property
    def max_num_active_reqs(self) -> int:
        """Limit of running requests."""
        return self.max_num_running_reqs

    @max_num_active_reqs.setter
    def max_num_active_reqs(self, limit: int) -> None:
        self.max_num_running_reqs = limit

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        output = super().schedule(throttle_prefills)
        for request in reversed(list(self.skipped_waiting)):
            self.deferred_waiting.add(request)
            if not _holds_blocks(request):
                self.skipped_waiting.remove_request(request)
                self.waiting.prepend_request(request)
        if self.deferred_waiting:
            self.deferred_waiting.difference_update(self.running)
        return output

    def _enqueue_waiting_request(self, request: Request) -> None:
        if self._is_blocked_waiting_status(request.status):
            self.deferred_waiting.add(request)
        queue = self.skipped_waiting if _holds_blocks(request) else self.waiting
        queue.add_request(request)

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        """Return whether the request can start. Later versions call this for every request, 0.30 only for
        blocked ones."""
        return bool(super()._try_promote_blocked_waiting_request(request))

    def _try_promote_blocked_waiting_request(self, request: Request) -> bool:
        return self._handle_blocked_waiting_request(request)

    def _free_request(self, request: Request, *args: object, **kwargs: object) -> object:
        self.deferred_waiting.discard(request)
        return super()._free_request(request, *args, **kwargs)


def _holds_blocks(request: Request) -> bool:
    loads = request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    return bool(request.num_computed_tokens > 0 or loads)


VllmScheduler: type[Scheduler] = Scheduler030 if missing(WAITING) else Scheduler
"""vLLM's scheduler with the attribute names of 0.31."""


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
