"""A common view of the waiting requests in the schedulers of all vLLM versions.

From 0.31 on, requests with KV blocks wait in a separate queue that has precedence, other requests that cannot
start yet stay in the waiting queue, and the limit of running requests is separate from the model runner's
slots. 0.30 has one queue for all requests that were passed over, which has precedence.
"""

from __future__ import annotations

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from tailrace.foreign_names import missing
from worker_agent.engine.vllm.internals import WAITING


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
