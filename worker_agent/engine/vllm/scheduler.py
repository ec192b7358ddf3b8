"""vLLM's scheduler, extended by pauses, imported requests, intra-instance policies and host memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import RequestQueue, create_request_queue
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import PrefixCacheStats
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from tailrace.intra.base import Rank
from worker_agent.engine.step_order import Device, StepOrder
from worker_agent.engine.vllm.connector import (
    OtherConnectors,
    TailraceConnector,
    swap_metadata,
    tailrace_connector,
)
from worker_agent.engine.vllm.ranked_queue import RankedQueue, VllmScheduler


class PausingScheduler(VllmScheduler):  # type: ignore[misc]
    """Adds to vLLM's scheduler:

    - `pause` and `unpause`: a paused request keeps its KV and its cached state but takes part in no further
      step. Its slot in the batch stays reserved, so that `unpause` never has to wait.
    - `reserve_slots`: slots of the batch for requests that are being imported.
    - Adopted requests: the model runner knows them before their first step, so they enter as if they had
      been preempted.
    - `use_order`: which requests to preempt and admit is decided before vLLM's own `schedule`, which then
      finds its running list in order and its waiting queue limited to the admitted requests.
    - Preempted decoding requests are swapped out to host memory, if the connector has room.
    - Evicted blocks are loaded from host memory.
    """

    tailrace_connector: TailraceConnector
    # The user's connectors besides ours; false if there are none.
    other_connectors: OtherConnectors
    running: list[Request]
    waiting: RequestQueue
    max_num_scheduled_tokens: int
    adaptive_long_prefill_threshold: bool
    paused: dict[str, Request]
    adopted: set[str]
    # Requests with an open export: preempting them would free nothing, because their blocks are pinned.
    exporting: set[str]
    # Requests with steps, complete or in flight, whose tokens are discarded: their KV was loaded corrupt.
    discarded: set[str]
    # Requests whose KV a step in flight loads from host memory, so that it is not verified yet.
    unverified: set[str]
    preemptions: int
    # Steps beside which prompts waited for the running requests to get faster.
    kept_back_steps: int
    _order: StepOrder[Request] | None
    _scheduling: bool
    _reserved_slots: int
    _active_limit: int

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        # Outputs tell when their request was queued, scheduled and preempted, for the API server's metrics.
        # All other statistics stay off: see `make_stats`.
        self.log_stats = True
        self.connector_prefix_cache_stats = PrefixCacheStats()
        self.tailrace_connector = tailrace_connector(self.connector)
        self.other_connectors = OtherConnectors(self.connector)
        self.paused = {}
        # Tokens of the latest step scheduled, and of the latest one completed.
        self.scheduled_tokens = 0
        self.processed_tokens = 0
        self.adopted = set()
        self.exporting = set()
        self.discarded = set()
        self.unverified = set()
        self.preemptions = self.kept_back_steps = 0
        self._order = None
        self._scheduling = False
        self._reserved_slots = 0
        self._active_limit = self.max_num_active_reqs

    def make_stats(self, *args: object, **kwargs: object) -> None:
        """Make none: front ends show what concerns the fleet (frontend_svc/observer.py)."""

    def make_spec_decoding_stats(self, *args: object, **kwargs: object) -> None:
        """Make none: nobody would see them."""

    # ---- pause

    def pause(self, request: Request) -> None:
        """Schedule a running or swapped-out request no more, from the next step on. Call between two steps.

        Steps in flight continue and may end the request.
        """
        if request.status == RequestStatus.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove_request(request)
            self.deferred_waiting.discard(request)
        self.paused[request.request_id] = request
        self._update_limit()

    def unpause(self, request_id: str) -> None:
        """Schedule the request again from the next step on; ignored if it is not paused (it may have
        finished)."""
        request = self.paused.pop(request_id, None)
        if request is None:
            return
        if request.status == RequestStatus.RUNNING:
            self.running.append(request)
        else:
            self.waiting.prepend_request(request)
        self._update_limit()

    def verified_tokens(self, request: Request) -> int:
        """Return the number of a running request's tokens whose KV is on the device and verified."""
        if request.request_id in self.unverified:
            return 0
        return max(0, int(request.num_computed_tokens) - int(request.num_in_flight_tokens))

    # ---- slots of the batch

    def free_slots(self) -> int:
        """Return the slots of the batch that are neither running, paused nor reserved.

        Waiting requests have no slot yet, so a request that arrives with its KV does not queue behind
        prompts. It has blocks, so vLLM resumes it before it admits any request from the waiting queue.
        """
        taken = len(self.running) + len(self.kv_holding_waiting) + self._paused_slots()
        return self._active_limit - taken - self._reserved_slots

    def reserve_slots(self, change: int) -> None:
        """Reserve slots for imports, or release them if `change` is negative."""
        self._reserved_slots += change
        self._update_limit()

    def _update_limit(self) -> None:
        self.max_num_active_reqs = self._active_limit - self._paused_slots() - self._reserved_slots

    def _paused_slots(self) -> int:
        return sum(request.status == RequestStatus.RUNNING for request in self.paused.values())

    # ---- order

    def use_order(self, order: StepOrder[Request] | None) -> None:
        """Order requests by `order` from the next step on; None: by vLLM's own. Call between two steps."""
        requests = list(self.waiting)
        self._order = order
        if order is not None:
            self.waiting = RankedQueue(order.rank, order.lapses_s, order.lapse, requests)
            return
        self.waiting = create_request_queue(self.policy)
        # They come as the last order had them.
        for request in sorted(requests, key=lambda each: float(each.arrival_time)):
            self.waiting.add_request(request)

    def _schedule_in_order(self, order: StepOrder[Request], throttle_prefills: bool) -> SchedulerOutput:
        queue = self.waiting
        assert isinstance(queue, RankedQueue)
        free_blocks = self.kv_cache_manager.block_pool.get_num_free_blocks()
        if not queue and not self._inflight_prefills and free_blocks >= len(self.running):
            # There is nothing to decide.
            return super().schedule(throttle_prefills)
        queue.advance(time.time())
        limit = self.max_num_scheduled_tokens
        entering = len(self.kv_holding_waiting)
        plan = order.plan(
            self.running,
            self._startable(queue),
            Device(
                total_blocks=self.kv_cache_manager.block_pool.num_gpu_blocks - 1,
                free_blocks=free_blocks,
                promised_blocks=self._inflight_prefill_reserved_blocks(),
                free_slots=self.max_num_active_reqs - len(self.running) - entering,
                entering=entering,
                step_tokens=limit,
            ),
        )
        self.running = plan.running
        self.kept_back_steps += plan.keeps_back
        now_s = time.monotonic()
        for request in plan.preempt:
            self._preempt_request(request, now_s)
        queue.open([*self._grammar_failures(), *plan.admit])
        self.max_num_scheduled_tokens = plan.step_tokens
        try:
            with self._longest_chunk(plan.longest_chunk):
                return super().schedule(throttle_prefills)
        finally:
            self.max_num_scheduled_tokens = limit
            queue.close()
            self.running.extend(plan.withheld)

    @contextmanager
    def _longest_chunk(self, tokens: int | None) -> Iterator[None]:
        """Limit the tokens that one request computes in one step; None: as configured."""
        config = self.scheduler_config
        threshold, adaptive = config.long_prefill_token_threshold, self.adaptive_long_prefill_threshold
        if tokens is not None:
            config.long_prefill_token_threshold = min(tokens, threshold or tokens)
            self.adaptive_long_prefill_threshold = False
        try:
            yield
        finally:
            config.long_prefill_token_threshold = threshold
            self.adaptive_long_prefill_threshold = adaptive

    def _startable(self, queue: RankedQueue) -> Iterator[tuple[Rank, Request]]:
        """Yield the requests that could start now, in order of rank."""
        for rank, request in queue.ranked():
            if request.num_stale_output_tokens and not request.drop_stale_output:
                # A step that began before the request was preempted will still yield a token for it.
                continue
            if request.status != RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
                yield rank, request
                continue
            grammar = request.structured_output_request.grammar
            if grammar is not None and not isinstance(grammar, Exception):
                yield rank, request

    def _grammar_failures(self) -> list[Request]:
        """Return the requests whose grammar did not compile, which vLLM's scan ends."""
        return [
            request
            for request in self.deferred_waiting
            if request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
            and isinstance(request.structured_output_request.grammar, Exception)
        ]

    # ---- vLLM's own methods

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        self.processed_tokens = int(scheduler_output.total_num_scheduled_tokens)
        self.unverified -= swap_metadata(scheduler_output.kv_connector_metadata).swapped_in
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(
            scheduler_output, model_runner_output
        )
        return outputs

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        self.tailrace_connector.begin_schedule()
        self._scheduling = True
        if self._order is not None and self._order.policy.mistake:
            self.use_order(None)
        try:
            if self._order is None:
                output = super().schedule(throttle_prefills)
            else:
                output = self._schedule_in_order(self._order, throttle_prefills)
        finally:
            self._scheduling = False
        self.scheduled_tokens = int(output.total_num_scheduled_tokens)
        self.other_connectors.on_schedule()
        swaps = swap_metadata(output.kv_connector_metadata)
        if self.other_connectors:
            # Another connector may load KV in the same step that reads it.
            swaps.swapped_in.update(request.req_id for request in output.scheduled_new_reqs)
            swaps.swapped_in.update(output.scheduled_cached_reqs.resumed_req_ids)
        self.unverified |= swaps.swapped_in
        if self.adopted:
            self.adopted.difference_update(output.num_scheduled_tokens)
        return output

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        ready: bool = super()._handle_blocked_waiting_request(request)
        if ready and request.request_id in self.adopted:
            # vLLM set it to WAITING when its grammar became ready, which means "new to the model runner".
            request.status = RequestStatus.PREEMPTED
        return ready

    def _preempt_request(self, request: Request, *args: object, **kwargs: object) -> None:
        self.preemptions += 1
        # Outside of scheduling (vLLM's reset_prefix_cache), the blocks might be overwritten before the copy.
        if self._scheduling and decodes(request):
            block_ids = self.kv_cache_manager.get_block_ids(request.request_id)[0]
            self.tailrace_connector.swap_out(request, block_ids)
        super()._preempt_request(request, *args, **kwargs)

    def _handle_invalid_blocks(
        self, invalid_block_ids: set[int], num_scheduled_tokens: dict[str, int]
    ) -> set[str]:
        """Preempt the affected requests and drop the outputs of their steps in flight.

        vLLM would recompute the blocks in place. But with async scheduling the next step has already begun
        with the corrupt KV, and Model Runner V2 does not take back a token that it has sampled.
        """
        # Evict first: the requests that had these blocks may have ended.
        self.kv_cache_manager.evict_blocks(invalid_block_ids)
        held = [request for request in self.paused.values() if request.status == RequestStatus.RUNNING]
        self.running.extend(held)
        affected: set[str] = super()._handle_invalid_blocks(invalid_block_ids, num_scheduled_tokens)
        kept = set(held)
        self.running = [request for request in self.running if request not in kept]
        if not self.recompute_kv_load_failures:
            # The user has configured another connector to fail such requests.
            return affected
        now_s = time.monotonic()
        for request_id in affected:
            request = self.requests[request_id]
            # No other request may find the blocks by their names.
            self.kv_cache_manager.evict_blocks(set(self.kv_cache_manager.get_block_ids(request_id)[0]))
            if request in kept:
                del self.paused[request_id]
                self._update_limit()
            else:
                self.running.remove(request)
            self._preempt_request(request, now_s, drop_stale_output=True)
        self.discarded |= affected
        return affected

    def _free_request(self, request: Request, *args: object, **kwargs: object) -> object:
        self.adopted.discard(request.request_id)
        if self.other_connectors:
            blocks = self.kv_cache_manager.get_block_ids(request.request_id)
            self.other_connectors.on_request_end({each for ids in blocks for each in ids})
        if self.paused.pop(request.request_id, None) is not None:
            self._update_limit()
        return super()._free_request(request, *args, **kwargs)

    def reset_prefix_cache(self, *args: object, **kwargs: object) -> bool:
        # The reset means that something the KV depends on has changed (weights, an adapter).
        if self.tailrace_connector.tier is not None:
            self.tailrace_connector.tier.clear()
        done: bool = super().reset_prefix_cache(*args, **kwargs)
        return done

    def has_finished_requests(self) -> bool:
        # vLLM's method assumes that requests in no queue wait for a connector's clean-up, and would step for
        # them without end. Paused requests are in no queue either, and our connector delays a clean-up only
        # while it loads KV for a request that has ended.
        tier = self.tailrace_connector.tier
        if tier is not None and tier.busy:
            return True
        if self.finished_req_ids or not self.other_connectors:
            return bool(self.finished_req_ids)
        known: int = sum(self.get_request_counts()) + len(self.paused)
        return len(self.requests) > known


class AsyncPausingScheduler(PausingScheduler, AsyncScheduler):  # type: ignore[misc]
    """PausingScheduler on vLLM's async scheduler, which begins a step before the last one has ended."""


def decodes(request: Request) -> bool:
    """Return whether all tokens but the latest are computed (or in flight) and the latest is an output."""
    # A pipeline without async scheduling has steps in flight but no placeholders for their tokens.
    in_pipeline = not request.num_output_placeholders and request.num_computed_tokens == request.num_tokens
    coming: int = request.num_output_placeholders + in_pipeline
    made: int = request.num_output_tokens + coming
    left: int = request.num_tokens + coming - request.num_computed_tokens
    return made > 0 and left == 1
