"""Fetch a trace from the monitors' built-in store."""

from __future__ import annotations

from typing import Final

import grpc

from scheduler_svc.refused import Refused
from tailrace.security.roles import Role
from tailrace.service.channels import Channels
from tailrace.service.preferred import preferred
from tailrace.store.membership import Membership
from tailrace.v1 import admin_pb2
from tailrace.v1.monitor_pb2_grpc import MonitorStub

_KIND: Final = "monitor"
_DEADLINE_S: Final = 3.0


async def fetch_trace(
    members: Membership, channels: Channels, request: admin_pb2.GetTraceRequest
) -> admin_pb2.GetTraceReply:
    """From the first monitor, the leader before the others, that has it. Raises Refused."""
    refused = Refused(grpc.StatusCode.UNAVAILABLE, "no monitor is registered")
    for monitor in preferred(members, _KIND):
        try:
            return await MonitorStub(channels.get(monitor.address, Role.MONITOR)).GetTrace(
                request, timeout=_DEADLINE_S
            )
        except grpc.aio.AioRpcError as error:
            # That one monitor does not have it says more than that another does not answer.
            if refused.code is not grpc.StatusCode.NOT_FOUND:
                refused = Refused(error.code(), error.details() or error.code().name)
    raise refused
