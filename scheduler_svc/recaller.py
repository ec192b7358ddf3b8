"""Has instances hand back prompts that wait there, to be placed where the policy now wants them."""

from __future__ import annotations

from typing import Final

import grpc

from scheduler_svc.refused import Refused
from tailrace.control.reported_cluster import ReportedCluster
from tailrace.security.roles import Role
from tailrace.service.channels import Channels
from tailrace.v1 import worker_pb2, worker_pb2_grpc

_CALL_S: Final = 2.0


class Recaller:
    """The worker asks the front ends, and those the scheduler: each prompt waits where it is until then."""

    def __init__(self, state: ReportedCluster, channels: Channels) -> None:
        self._state = state
        self._channels = channels

    async def recall(self, instance_id: str, request_ids: tuple[str, ...]) -> int:
        """How many the instance hands back: those that still wait. Raises Refused."""
        tracked = self._state.tracked(instance_id)
        if tracked is None:
            raise Refused(grpc.StatusCode.NOT_FOUND, f"{instance_id} is gone")
        stub = worker_pb2_grpc.WorkerStub(self._channels.get(tracked.record.address, Role.WORKER))
        try:
            reply = await stub.HandBackPrompts(
                worker_pb2.HandBackPromptsRequest(request_ids=request_ids), timeout=_CALL_S
            )
        except grpc.aio.AioRpcError as error:
            raise Refused(error.code(), error.details() or error.code().name) from error
        return int(reply.handed_back)
