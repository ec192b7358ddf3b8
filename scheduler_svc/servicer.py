"""Serve the calls of front ends: their requests for a placement."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from typing import Final

import grpc
import msgspec
from opentelemetry.trace import Tracer

from scheduler_svc.loop import DecisionLoop
from tailrace.cluster import Arrival
from tailrace.members import Members
from tailrace.model_identity import covers
from tailrace.rollout.record import RolloutRecord
from tailrace.telemetry import attributes
from tailrace.telemetry.tracing import Tracing, record_span
from tailrace.v1 import scheduler_pb2, scheduler_pb2_grpc


class SchedulerServicer(scheduler_pb2_grpc.SchedulerServicer):
    """Serve placements on leader and standby alike: they need the last known state, not leadership."""

    def __init__(self, loop: DecisionLoop, members: Members, tracing: Tracing) -> None:
        self._loop = loop
        self._members = members
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


def _unnamed(request: scheduler_pb2.PlaceManyRequest) -> str:
    """Return an error that names the first request without an ID; empty if all have one."""
    missing = (n for n, each in enumerate(request.requests) if not each.request_id)
    return next((f"requests[{n}].request_id: must not be empty" for n in missing), "")


def newer_rollout(request: scheduler_pb2.PlaceRequest, rollouts: Mapping[str, RolloutRecord]) -> bytes:
    """Return PlaceReply.rollout: the encoded record if the front end asks for a model that it replaced, else
    empty."""
    record = rollouts.get(request.served_name) if request.served_name else None
    if record is None or not record.steers(request.model) or covers(record.in_force, request.model):
        return b""
    return msgspec.json.encode(record)


_NONE_EXCLUDED: Final[frozenset[str]] = frozenset()


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
