"""Have an instance copy a hot prefix from another one ahead of need."""

from __future__ import annotations

import time
from collections.abc import Coroutine
from typing import Final

import grpc

from scheduler_svc.admin.errors import AdminError
from tailrace.actions import CopyPrefix
from tailrace.control.events import CopyOrdered, CopySettled
from tailrace.control.reported_cluster import ReportedCluster
from tailrace.security.roles import Role
from tailrace.service.channels import Channels, decoded
from tailrace.v1 import cache_pb2, cache_pb2_grpc

# Longer than a worker's default limit of a pull; the worker stops when the call ends.
_COPY_S: Final = 10.0


class Copier:
    """Order prefix copies, at most one per target at a time."""

    def __init__(self, state: ReportedCluster, channels: Channels) -> None:
        self._state = state
        self._channels = channels

    def copy(self, copy: CopyPrefix) -> Coroutine[None, None, str]:
        """Enter the copy into the model; return a coroutine that carries it out and returns the worker's
        outcome.

        Raise AdminError, immediately or when awaited.
        """
        holder, target = self._state.tracked(copy.holder_id), self._state.tracked(copy.target_id)
        ordered = CopyOrdered(copy, time.monotonic())
        if holder is None or target is None or not self._state.order(ordered):
            raise AdminError(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"{copy.target_id} is receiving a copy already, or {copy.holder_id} has no {copy.request_id}",
            )
        request = cache_pb2.CopyRequest(
            request_id=copy.request_id,
            holder_instance_id=copy.holder_id,
            holder_address=holder.record.address,
            tokens=copy.tokens,
            target_instance_id=copy.target_id,
        )
        return self._copy(copy.target_id, target.record.address, request)

    async def _copy(self, target_id: str, address: str, request: cache_pb2.CopyRequest) -> str:
        stub = cache_pb2_grpc.CacheStub(self._channels.get(address, Role.WORKER))
        try:
            reply = decoded(await stub.Copy(request, timeout=_COPY_S), address)
        except grpc.aio.AioRpcError as error:
            raise AdminError(error.code(), error.details() or error.code().name) from error
        finally:
            self._state.apply(CopySettled(target_id, time.monotonic()))
        return reply.outcome
