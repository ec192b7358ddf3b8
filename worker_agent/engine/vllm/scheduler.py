"""vLLM's scheduler, with requests that are held back for a while and requests that come from elsewhere."""

from __future__ import annotations

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus


class PausingScheduler(Scheduler):  # type: ignore[misc]
    """Adds to vLLM's scheduler:

    - `pause` and `unpause`: a running request keeps its KV and its cached state, but is not stepped. Its
      place in the batch stays reserved, so that `unpause` never has to wait.
    - `hold_slots`: places reserved for requests that are being imported.
    - adopted requests: the model runner knows them before their first step, so they enter as if they had
      been preempted.
    """

    paused: dict[str, Request]
    adopted: set[str]
    preemptions: int
    _reserved_slots: int
    _active_limit: int

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.paused = {}
        self.adopted = set()
        self.preemptions = 0
        self._reserved_slots = 0
        self._active_limit = self.max_num_active_reqs

    # ---- pause

    def pause(self, request: Request) -> None:
        """Stop stepping a running request. Call between two steps."""
        self.running.remove(request)
        self.paused[request.request_id] = request
        self._update_limit()

    def unpause(self, request_id: str) -> None:
        """Step it again from the next step on; ignored when it is not paused (finished meanwhile)."""
        request = self.paused.pop(request_id, None)
        if request is not None:
            self.running.append(request)
            self._update_limit()

    # ---- places in the batch

    def free_slots(self) -> int:
        """Places in the batch that nobody has or waits for."""
        taken = len(self.running) + len(self.waiting) + len(self.kv_holding_waiting) + len(self.paused)
        return self._active_limit - taken - self._reserved_slots

    def hold_slots(self, change: int) -> None:
        """Reserve (or, negative, give back) places for imports."""
        self._reserved_slots += change
        self._update_limit()

    def _update_limit(self) -> None:
        self.max_num_active_reqs = self._active_limit - len(self.paused) - self._reserved_slots

    # ---- vLLM's own methods

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        output = super().schedule(throttle_prefills)
        if self.adopted:
            self.adopted.difference_update(output.num_scheduled_tokens)
        return output

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        ready: bool = super()._handle_blocked_waiting_request(request)
        if ready and request.request_id in self.adopted:
            # A grammar that became ready made it WAITING, which vLLM takes for "new to the model runner".
            request.status = RequestStatus.PREEMPTED
        return ready

    def _preempt_request(self, request: Request, *args: object, **kwargs: object) -> None:
        self.preemptions += 1
        super()._preempt_request(request, *args, **kwargs)

    def finish_requests(self, request_ids: object, finished_status: RequestStatus) -> list[Request]:
        finished: list[Request] = super().finish_requests(request_ids, finished_status)
        for request in finished:
            self.adopted.discard(request.request_id)
            self.paused.pop(request.request_id, None)
        self._update_limit()
        return finished

    def has_finished_requests(self) -> bool:
        # vLLM's counts requests in no queue as waiting for a connector's clean-up and would step for them
        # without end; ours never delays a clean-up, and paused requests are in no queue.
        return bool(self.finished_req_ids)
