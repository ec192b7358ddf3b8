"""Builders of members and reports."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from tailrace.control.events import KnownMembers, MembersChanged, Reported
from tailrace.control.reported_cluster import PhaseChange, ReportedCluster
from tailrace.model_identity import ModelIdentity
from tailrace.records import InstanceRecord
from tailrace.request_columns import columns_from
from tailrace.v1 import monitor_pb2, scheduler_pb2, scheduler_pb2_grpc, types_pb2
from tests.static_members import StaticMembers
from tests.waiting import WAIT_S

PREFILL = types_pb2.PHASE_PREFILL
REASONING = types_pb2.PHASE_REASONING
ANSWERING = types_pb2.PHASE_ANSWERING
GONE = types_pb2.PHASE_UNSPECIFIED


def instance(name: str, address: str = "127.0.0.1:1", incarnation: str = "1") -> InstanceRecord:
    """Return an instance with 1,000 blocks of 16 tokens."""
    return InstanceRecord(
        instance_id=name,
        incarnation=incarnation,
        address=address,
        stream_address=address,
        engine="simulated",
        model="tiny",
        model_fingerprint="f",
        model_identity=ModelIdentity("t", "w"),
        block_tokens=16,
        kv_blocks_total=1_000,
        max_model_len=4_096,
        max_num_seqs=64,
        kv_bytes_per_token=8,
        started_s=0.0,
    )


# Shared by all workers; those of each worker increase.
_seq = itertools.count(1)


def members(*names: str) -> StaticMembers:
    """Return a membership of these instances."""
    return StaticMembers(instances={name: instance(name) for name in names})


def set_members(state: ReportedCluster, members: StaticMembers, now_s: float) -> None:
    """Apply a membership to the model."""
    state.apply(MembersChanged(KnownMembers.of(members), now_s))


def report_to(state: ReportedCluster, report: monitor_pb2.WorkerReport, now_s: float) -> list[PhaseChange]:
    """Apply a report to the model; return the phase changes that it shows."""
    return state.apply(Reported(report, deciding=False, now_s=now_s, wall_s=0.0))


def request(
    request_id: str,
    phase: types_pb2.Phase.ValueType = REASONING,
    epoch: int = 0,
    output_tokens: int = 10,
    prompt_tokens: int = 100,
    max_tokens: int = 1_000,
    predicted: float | None = None,
) -> monitor_pb2.RequestReport:
    """Return the report of one running request."""
    return monitor_pb2.RequestReport(
        request_id=request_id,
        frontend_id="f",
        epoch=epoch,
        phase=phase,
        state=types_pb2.REQUEST_STATE_RUNNING,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        max_tokens=max_tokens,
        predicted_remaining_tokens=predicted,
        kv_blocks=-(-(prompt_tokens + output_tokens) // 16),
        arrival_s=1.0,
    )


def steady(
    name: str, requests: Sequence[monitor_pb2.RequestReport] = (), incarnation: str = "1"
) -> monitor_pb2.WorkerReport:
    """Return a periodic report."""
    return monitor_pb2.WorkerReport(
        instance_id=name,
        incarnation=incarnation,
        seq=next(_seq),
        load=monitor_pb2.InstanceLoad(
            running=len(requests),
            kv_blocks_used=sum(r.kv_blocks for r in requests),
            kv_blocks_total=1_000,
            block_tokens=16,
            context_tokens=sum(r.prompt_tokens + r.output_tokens for r in requests),
        ),
        requests=columns_from(requests),
    )


def event(
    name: str,
    request_id: str,
    phase: types_pb2.Phase.ValueType,
    epoch: int = 0,
    output_tokens: int = 1,
    incarnation: str = "1",
    predicted: float | None = None,
) -> monitor_pb2.WorkerReport:
    """Return a report with one phase event only."""
    return monitor_pb2.WorkerReport(
        instance_id=name,
        incarnation=incarnation,
        seq=next(_seq),
        phase_events=[
            monitor_pb2.PhaseEvent(
                request_id=request_id,
                frontend_id="f",
                epoch=epoch,
                phase=phase,
                prompt_tokens=100,
                output_tokens=output_tokens,
                predicted_remaining_tokens=predicted,
            )
        ],
    )


async def place(
    scheduler: scheduler_pb2_grpc.SchedulerAsyncStub, *requests: scheduler_pb2.PlaceRequest
) -> list[scheduler_pb2.PlaceReply]:
    """Place requests with one message, as a front end does. Raise grpc.aio.AioRpcError."""
    stream = scheduler.Place(timeout=WAIT_S)
    await stream.write(scheduler_pb2.PlaceManyRequest(requests=requests))
    reply = await stream.read()
    stream.cancel()
    assert isinstance(reply, scheduler_pb2.PlaceManyReply)
    return list(reply.replies)


async def place_one(
    scheduler: scheduler_pb2_grpc.SchedulerAsyncStub, request: scheduler_pb2.PlaceRequest
) -> scheduler_pb2.PlaceReply:
    """Place one request. Raise grpc.aio.AioRpcError."""
    (reply,) = await place(scheduler, request)
    return reply
