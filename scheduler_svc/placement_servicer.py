"""The Scheduler service: where a new request goes."""

from __future__ import annotations

import time
from typing import Final

import grpc
from opentelemetry.trace import Tracer

from scheduler_svc.placer import Decision, Placer
from scheduler_svc.traceparents import Traceparents
from tailrace.control.arrivals import Incoming
from tailrace.telemetry import attributes
from tailrace.telemetry.tracing import Tracing, record_span
from tailrace.v1 import scheduler_pb2, scheduler_pb2_grpc

_NOTHING_EXCLUDED: Final[frozenset[str]] = frozenset()


class SchedulerServicer(scheduler_pb2_grpc.SchedulerServicer):
    """Served by leader and standby alike: placing needs the last known state, not leadership."""

    def __init__(self, placer: Placer, traceparents: Traceparents, tracing: Tracing) -> None:
        self._placer = placer
        self._traceparents = traceparents
        self._tracing = tracing
        self._tracer: Tracer = tracing.tracer("scheduler")

    async def Place(
        self,
        request: scheduler_pb2.PlaceRequest,
        context: grpc.aio.ServicerContext[scheduler_pb2.PlaceRequest, scheduler_pb2.PlaceReply],
    ) -> scheduler_pb2.PlaceReply:
        """An instance, or a refusal."""
        if not request.request_id:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "request_id: must not be empty")
        return self._place(request)

    async def PlaceMany(
        self,
        request: scheduler_pb2.PlaceManyRequest,
        context: grpc.aio.ServicerContext[scheduler_pb2.PlaceManyRequest, scheduler_pb2.PlaceManyReply],
    ) -> scheduler_pb2.PlaceManyReply:
        """An instance or a refusal for each."""
        for number, each in enumerate(request.requests):
            if not each.request_id:
                await context.abort(
                    grpc.StatusCode.INVALID_ARGUMENT, f"requests[{number}].request_id: must not be empty"
                )
        return scheduler_pb2.PlaceManyReply(replies=[self._place(each) for each in request.requests])

    def _place(self, request: scheduler_pb2.PlaceRequest) -> scheduler_pb2.PlaceReply:
        excluded = request.excluded_instance_ids
        decision = self._placer.place(
            Incoming(
                request.request_id,
                request.frontend_id,
                request.prompt_tokens,
                request.output_tokens,
                request.max_tokens,
                frozenset(excluded) if excluded else _NOTHING_EXCLUDED,
                request.model,
                tuple(request.block_names),
                request.block_tokens,
                request.session_id,
            )
        )
        self._traceparents.note(request.request_id, request.traceparent)
        if self._tracing.continues(request.traceparent):
            self._trace(request, decision)
        return scheduler_pb2.PlaceReply(
            instance_id=decision.instance_id,
            policy=decision.policy,
            refusal=decision.refusal,
            decided_us=decision.seconds * 1e6,
            cached_tokens=decision.cached_tokens,
            pull_from_instance_id=decision.pull_from,
            pull_address=decision.pull_address,
            pull_tokens=decision.pull_tokens,
        )

    def _trace(self, request: scheduler_pb2.PlaceRequest, decision: Decision) -> None:
        end_ns = time.time_ns()
        record_span(
            self._tracer,
            "place",
            request.traceparent,
            end_ns - int(decision.seconds * 1e9),
            end_ns,
            attributes={
                attributes.REQUEST_ID: request.request_id,
                attributes.INSTANCE: decision.instance_id,
                attributes.POLICY: decision.policy,
                attributes.PROMPT_TOKENS: request.prompt_tokens,
                attributes.CACHED_TOKENS: decision.cached_tokens,
                attributes.PULL_HOLDER: decision.pull_from,
            },
            error=decision.refusal,
        )
