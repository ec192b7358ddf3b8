"""Forward the admin calls that only the leader can carry out from a standby to the leader."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from types import MappingProxyType
from typing import Final, TypeAlias, cast

import grpc
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from scheduler_svc.admin.errors import ADMIN, SERVICE, AdminError
from tailrace.security.audit import ON_BEHALF_OF, caller_name
from tailrace.security.handlers import Context, Handler
from tailrace.security.roles import Role
from tailrace.service.channels import Channels, decoded, preferred
from tailrace.store.membership import Membership
from tailrace.v1 import admin_pb2, profile_pb2
from tailrace.v1.monitor_pb2_grpc import MonitorStub
from tailrace.v1.worker_pb2_grpc import WorkerStub

RECORD_S: Final = 3_600.0
"""Longest recording, in seconds."""

_WRITE_S: Final = 10.0
_STREAM_S: Final = 1_800.0

LEADER_METHODS: Final[Mapping[str, float]] = MappingProxyType(
    {
        f"{ADMIN}{method}": timeout_s
        for method, timeout_s in {
            "SetShadow": _WRITE_S,
            "GetShadow": _WRITE_S,
            "Record": RECORD_S + _WRITE_S,
            "Migrate": _STREAM_S,
            "Rollout": _WRITE_S,
            "UndoRollout": _WRITE_S,
            "ForgetRollout": _WRITE_S,
        }.items()
    }
)
"""Methods that only the leading scheduler carries out, with their deadlines in seconds.

Settings are no such methods: any scheduler that reaches etcd writes them, so that a leader which does not
answer can be given another policy.
"""


KIND: Final = "scheduler"
FORWARDED: Final = ("tailrace-forwarded", "1")
"""Metadata of a forwarded call, which is not forwarded again."""

_Unary: TypeAlias = "Callable[[Message, Context], Awaitable[Message]]"
_Stream: TypeAlias = "Callable[[Message, Context], AsyncGenerator[Message]]"


class LeaderRoute:
    """Decide where a call for the leader is carried out."""

    def __init__(
        self, service_id: str, members: Membership, channels: Channels, leading: asyncio.Event
    ) -> None:
        self._service_id = service_id
        self._members = members
        self._channels = channels
        self._leading = leading

    def channel_to_leader(self, metadata: grpc.aio.Metadata | None) -> grpc.aio.Channel | None:
        """Return the channel to the leader; None if this scheduler leads. Raise AdminError if no leader is
        known."""
        if self._leading.is_set():
            return None
        leader = self._members.leaders.get(KIND)
        forwarded = metadata is not None and FORWARDED in tuple(metadata)
        if leader is not None and leader.service_id == self._service_id:
            raise AdminError(
                grpc.StatusCode.UNAVAILABLE,
                f"etcd has not confirmed lately that scheduler {self._service_id} leads, and only the leader "
                "carries this out: etcd does not answer, or takes too long; try again when it does",
            )
        if leader is None or forwarded:
            named = leader.service_id if leader is not None else "none"
            raise AdminError(
                grpc.StatusCode.UNAVAILABLE,
                f"scheduler {self._service_id} does not lead (known leader: {named}); try again in a "
                "few seconds",
            )
        return self._channels.get(leader.address, Role.SCHEDULER)


class LeaderForwarding(grpc.aio.ServerInterceptor):
    """Carry out the leader's methods on the leader, whichever scheduler is called."""

    def __init__(self, route: LeaderRoute) -> None:
        self._route = route

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Wrap the handlers of LEADER_METHODS; see grpc.aio.ServerInterceptor."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method not in LEADER_METHODS:
            return handler
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                self._stream(method, cast(_Stream, handler.unary_stream)),
                request_deserializer=handler.request_deserializer,
                response_serializer=handler.response_serializer,
            )
        return grpc.unary_unary_rpc_method_handler(
            self._unary(method, cast(_Unary, handler.unary_unary)),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    def _unary(self, method: str, local: _Unary) -> _Unary:
        async def reply(request: Message, context: Context) -> Message:
            leader = self._route.channel_to_leader(context.invocation_metadata())
            if leader is None:
                return await local(request, context)
            call = leader.unary_unary(method, _serialized, _reply_class(method).FromString)
            try:
                return await call(request, timeout=LEADER_METHODS[method], metadata=_metadata(context))
            except grpc.aio.AioRpcError as error:
                raise _leader_error(error) from error

        return reply

    def _stream(self, method: str, local: _Stream) -> _Stream:
        async def replies(request: Message, context: Context) -> AsyncGenerator[Message]:
            leader = self._route.channel_to_leader(context.invocation_metadata())
            if leader is None:
                async with aclosing(local(request, context)) as stream:
                    async for reply in stream:
                        yield reply
                return
            stub = leader.unary_stream(method, _serialized, _reply_class(method).FromString)
            call = stub(request, timeout=LEADER_METHODS[method], metadata=_metadata(context))
            try:
                async for reply in call:
                    yield decoded(reply, "the leader")
            except grpc.aio.AioRpcError as error:
                raise _leader_error(error) from error
            finally:
                # Cancel the leader's call when the caller disconnects.
                call.cancel()

        return replies


def _serialized(request: Message) -> bytes:
    return request.SerializeToString()


def _reply_class(method: str) -> type[Message]:
    return GetMessageClass(SERVICE.methods_by_name[method.rpartition("/")[2]].output_type)


def _metadata(context: Context) -> tuple[tuple[str, str], ...]:
    """Return the metadata of a forwarded call: the mark, and the original caller if known."""
    caller = caller_name(context)
    return (FORWARDED, (ON_BEHALF_OF, caller)) if caller else (FORWARDED,)


def _leader_error(error: grpc.aio.AioRpcError) -> AdminError:
    """Return the leader's error, or one that says that it did not answer."""
    details = error.details() or error.code().name
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        details = f"the leading scheduler does not respond; another one will lead within seconds ({details})"
    return AdminError(error.code(), details)


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
