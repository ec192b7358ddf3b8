"""The way of each decision: an event comes, it is applied to the model, the policy is asked about what it
shows, and its actions are carried out.

Read on with `LiveControl.handle` (tailrace/control/live.py), which tells all of them: `ReportedCluster.apply`
changes the model, `PolicyRunner` asks the policy through its guard, and `Actuator` carries out the actions.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Final

import grpc
import msgspec
from opentelemetry.trace import Tracer

from scheduler_svc.metrics import SchedulerMetrics
from tailrace.actions import Refuse
from tailrace.cluster import Arrival
from tailrace.control.events import Arrived, Reported, Ticked, TicksForgotten
from tailrace.control.live import LiveControl
from tailrace.members import Members
from tailrace.model_identity import covers
from tailrace.rollout.record import RolloutRecord
from tailrace.telemetry import attributes
from tailrace.telemetry.tracing import Tracing, record_span
from tailrace.v1 import monitor_pb2, scheduler_pb2, scheduler_pb2_grpc

# How soon a newly set policy with another tick interval is noticed.
_POLL_S: Final = 1.0
# Shortest time between two ticks, whatever interval a policy declares.
_REST_S: Final = 0.001


class DecisionLoop:
    """Turn what comes to this scheduler into events: placements on every scheduler, and on the leader reports
    and ticks."""

    def __init__(
        self,
        control: LiveControl,
        leading: asyncio.Event,
        metrics: SchedulerMetrics,
        asked_in_vain: Callable[[str, float], None] = lambda model_key, now_s: None,
    ) -> None:
        """`leading` is set while this scheduler leads: only the leader decides. `asked_in_vain`: told of
        requests for which there is no instance, with the key of their model and the monotonic time."""
        self._control = control
        self._leading = leading
        self._metrics = metrics
        self._asked_in_vain = asked_in_vain

    def handle_report(self, report: monitor_pb2.WorkerReport, now_s: float) -> None:
        """Apply a report and decide on the changes that it shows."""
        self._control.handle(Reported(report, self._leading.is_set(), now_s, time.time()))

    def tick(self) -> None:
        """Run one tick now."""
        self._control.handle(Ticked(time.monotonic(), time.time()))

    def forget_ticks(self) -> None:
        """Drop the time of the last tick: another scheduler leads."""
        self._control.handle(TicksForgotten())

    async def run_ticks(self) -> None:
        """Call on_tick at the policy's interval while leading; run until cancelled.

        After a tick the loop is left to others for at least as long as the tick took.
        """
        ticked_s = rested_s = time.monotonic()
        while True:
            if not self._leading.is_set():
                self.forget_ticks()
                await self._leading.wait()
            interval_s = self._control.active.declared.tick_interval_s
            if interval_s is None:
                await asyncio.sleep(_POLL_S)
                continue
            left_s = max(ticked_s + interval_s, rested_s) - time.monotonic()
            if left_s > 0:
                await asyncio.sleep(min(left_s, _POLL_S))
                continue
            ticked_s = time.monotonic()
            self.tick()
            ended_s = time.monotonic()
            rested_s = ended_s + max(ended_s - ticked_s, _REST_S)

    def place(self, asked: Arrival) -> scheduler_pb2.PlaceReply:
        """Decide and enter the placement into the model, timed and counted. Does no I/O: works on the last
        known state."""
        began_s = time.perf_counter()
        policy = self._control.active.name
        arrival, placement = self._control.handle(Arrived(asked, time.monotonic(), time.time()))
        decided_us = (time.perf_counter() - began_s) * 1e6
        if isinstance(placement, Refuse):
            self._metrics.refused(asked.frontend_id, placement.final)
            if not placement.final:
                self._asked_in_vain(asked.model, time.monotonic())
            return scheduler_pb2.PlaceReply(
                policy=policy,
                refusal=placement.reason or "refused",
                final=placement.final,
                decided_us=decided_us,
            )
        cached = arrival.found_tokens(placement.instance_id, placement.pull_from)
        reply = scheduler_pb2.PlaceReply(
            instance_id=placement.instance_id, policy=policy, cached_tokens=cached, decided_us=decided_us
        )
        if self._control.active.declared.pacer:
            reply.pace_s = self._control.active.slo.reading_s
        holder = self._control.model.tracked(placement.pull_from) if placement.pull_from else None
        self._metrics.placed(
            policy, placement.instance_id, arrival.context_tokens, cached, holder is not None
        )
        if holder is not None:
            reply.pull_from_instance_id = placement.pull_from
            reply.pull_address = holder.record.address
            reply.pull_tokens = arrival.reported_tokens(placement.pull_from)
        return reply


_TRACEPARENTS_MAX: Final = 20_000


class Traceparents:
    """Remember the trace contexts of the most recently placed requests, for later events of theirs."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, str] = OrderedDict()

    def remember(self, request_id: str, traceparent: str) -> None:
        """Remember a request's traceparent unless it is empty."""
        if not traceparent:
            return
        self._known[request_id] = traceparent
        if len(self._known) > _TRACEPARENTS_MAX:
            self._known.popitem(last=False)

    def get(self, request_id: str) -> str:
        """Return the traceparent; "" if unknown."""
        return self._known.get(request_id, "")


def newer_rollout(request: scheduler_pb2.PlaceRequest, rollouts: Mapping[str, RolloutRecord]) -> bytes:
    """Return PlaceReply.rollout: the encoded record if the front end asks for a model that it replaced, else
    empty."""
    record = rollouts.get(request.served_name) if request.served_name else None
    if record is None or not record.steers(request.model) or covers(record.in_force, request.model):
        return b""
    return msgspec.json.encode(record)


_NONE_EXCLUDED: Final[frozenset[str]] = frozenset()


def _unnamed(request: scheduler_pb2.PlaceManyRequest) -> str:
    """Return an error that names the first request without an ID; empty if all have one."""
    missing = (n for n, each in enumerate(request.requests) if not each.request_id)
    return next((f"requests[{n}].request_id: must not be empty" for n in missing), "")


class SchedulerServicer(scheduler_pb2_grpc.SchedulerServicer):
    """Serve placements on leader and standby alike: they need the last known state, not leadership."""

    def __init__(
        self, loop: DecisionLoop, members: Members, traceparents: Traceparents, tracing: Tracing
    ) -> None:
        self._loop = loop
        self._members = members
        self._traceparents = traceparents
        self._tracing = tracing
        self._tracer: Tracer = tracing.tracer("scheduler")

    async def Place(
        self,
        requests: AsyncIterator[scheduler_pb2.PlaceManyRequest],
        context: grpc.aio.ServicerContext[scheduler_pb2.PlaceManyRequest, scheduler_pb2.PlaceManyReply],
    ) -> AsyncIterator[scheduler_pb2.PlaceManyReply]:
        """Place the requests of each message in order, and reply to it."""
        async for request in requests:
            if unnamed := _unnamed(request):
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, unnamed)
            yield scheduler_pb2.PlaceManyReply(replies=[self._place(each) for each in request.requests])

    def _place(self, request: scheduler_pb2.PlaceRequest) -> scheduler_pb2.PlaceReply:
        reply = self._loop.place(_arrival(request))
        self._traceparents.remember(request.request_id, request.traceparent)
        if self._tracing.continues(request.traceparent):
            self._trace(request, reply)
        reply.rollout = newer_rollout(request, self._members.rollouts)
        return reply

    def _trace(self, request: scheduler_pb2.PlaceRequest, reply: scheduler_pb2.PlaceReply) -> None:
        end_ns = time.time_ns()
        record_span(
            self._tracer,
            "place",
            request.traceparent,
            end_ns - int(reply.decided_us * 1e3),
            end_ns,
            attributes={
                attributes.REQUEST_ID: request.request_id,
                attributes.INSTANCE: reply.instance_id,
                attributes.POLICY: reply.policy,
                attributes.PROMPT_TOKENS: request.prompt_tokens,
                attributes.CACHED_TOKENS: reply.cached_tokens,
                attributes.PULL_HOLDER: reply.pull_from_instance_id,
            },
            error=reply.refusal,
        )


def _arrival(request: scheduler_pb2.PlaceRequest) -> Arrival:
    excluded = request.excluded_instance_ids
    return Arrival(
        request.request_id,
        request.prompt_tokens,
        request.max_tokens,
        output_tokens=request.output_tokens,
        excluded=frozenset(excluded) if excluded else _NONE_EXCLUDED,
        block_names=tuple(request.block_names),
        block_tokens=request.block_tokens,
        session_id=request.session_id,
        admitted=request.admitted,
        model=request.model,
        frontend_id=request.frontend_id,
    )
