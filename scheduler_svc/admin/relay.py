"""Relay admin calls that another service answers: traces by monitors, profiling by workers."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator
from typing import Final

import grpc

from scheduler_svc.admin.errors import AdminError
from tailrace.security.roles import Role
from tailrace.service.channels import Channels, decoded, preferred
from tailrace.store.membership import Membership
from tailrace.v1 import admin_pb2, profile_pb2
from tailrace.v1.monitor_pb2_grpc import MonitorStub
from tailrace.v1.worker_pb2_grpc import WorkerStub

_KIND: Final = "monitor"
_DEADLINE_S: Final = 3.0


async def fetch_trace(
    members: Membership, channels: Channels, request: admin_pb2.GetTraceRequest
) -> admin_pb2.GetTraceReply:
    """Return a trace from the first monitor that has it, the leader first. Raise AdminError."""
    refused = AdminError(grpc.StatusCode.UNAVAILABLE, "no monitor is registered")
    for monitor in preferred(members, _KIND):
        try:
            stub = MonitorStub(channels.get(monitor.address, Role.MONITOR))
            return decoded(await stub.GetTrace(request, timeout=_DEADLINE_S), monitor.address)
        except grpc.aio.AioRpcError as error:
            # NOT_FOUND from one monitor says more than that another one cannot be reached.
            if refused.code is not grpc.StatusCode.NOT_FOUND:
                refused = AdminError(error.code(), error.details() or error.code().name)
    raise refused


# The worker's default budget, and the time that it needs besides measuring.
_BUDGET_S: Final = 60.0
_MARGIN_S: Final = 60.0


async def profile_events(
    members: Membership, channels: Channels, request: admin_pb2.AdminProfileRequest
) -> AsyncGenerator[profile_pb2.ProfileEvent]:
    """Yield the worker's events. Closing the generator stops the profiling. Raise AdminError."""
    record = members.instances.get(request.instance_id)
    if record is None:
        raise AdminError(grpc.StatusCode.NOT_FOUND, f"instance_id: {request.instance_id!r} is gone")
    if not 0.0 <= request.budget_s < math.inf:
        raise AdminError(
            grpc.StatusCode.INVALID_ARGUMENT, "budget_s: must be a number of seconds; 0: the default"
        )
    call = WorkerStub(channels.get(record.address, Role.WORKER)).Profile(
        profile_pb2.ProfileRequest(
            force=request.force, budget_s=request.budget_s, instance_id=request.instance_id
        ),
        timeout=(request.budget_s or _BUDGET_S) + _MARGIN_S,
    )
    try:
        async for event in call:
            yield decoded(event, request.instance_id)
    except grpc.aio.AioRpcError as error:
        code, details = error.code(), error.details() or error.code().name
        if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            # UNAVAILABLE would tell the caller that the scheduler cannot be reached.
            code, details = grpc.StatusCode.ABORTED, f"{request.instance_id} does not answer: {details}"
        raise AdminError(code, details) from error
    finally:
        call.cancel()
