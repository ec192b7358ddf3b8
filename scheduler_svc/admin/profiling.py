"""Have a worker measure its engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Final

import grpc

from scheduler_svc.refused import Refused
from tailrace.security.roles import Role
from tailrace.service.channels import Channels
from tailrace.store.membership import Membership
from tailrace.v1 import admin_pb2, profile_pb2
from tailrace.v1.worker_pb2_grpc import WorkerStub

# The worker's own default; what it takes besides measuring.
_BUDGET_S: Final = 60.0
_MARGIN_S: Final = 60.0


async def profile_events(
    members: Membership, channels: Channels, request: admin_pb2.AdminProfileRequest
) -> AsyncGenerator[profile_pb2.ProfileEvent]:
    """The worker's events. Ending early ends the measuring. Raises Refused."""
    record = members.instances.get(request.instance_id)
    if record is None:
        raise Refused(grpc.StatusCode.NOT_FOUND, f"instance_id: {request.instance_id!r} is gone")
    call = WorkerStub(channels.get(record.address, Role.WORKER)).Profile(
        profile_pb2.ProfileRequest(force=request.force, budget_s=request.budget_s),
        timeout=(request.budget_s or _BUDGET_S) + _MARGIN_S,
    )
    try:
        async for event in call:
            yield event
    except grpc.aio.AioRpcError as error:
        code, details = error.code(), error.details() or error.code().name
        if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            # To the caller that would be the scheduler, which is there.
            code, details = grpc.StatusCode.ABORTED, f"{request.instance_id} does not answer: {details}"
        raise Refused(code, details) from error
    finally:
        call.cancel()
