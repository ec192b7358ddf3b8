"""The scheduler asks an instance to hand prompts back, and handles instances that cannot."""

from __future__ import annotations

import grpc
import pytest

from scheduler_svc.actuator import WorkerCalls
from scheduler_svc.admin.errors import AdminError
from tailrace.control.reported_cluster import ReportedCluster
from tailrace.service.channels import Channels
from tailrace.service.server import Servicer, serve_grpc
from tailrace.v1 import worker_pb2, worker_pb2_grpc
from tests.migration.scripted_worker import ScriptedWorker
from tests.scheduler.facts import instance, set_members
from tests.static_members import StaticMembers


class Worker(ScriptedWorker):
    """A worker that returns all but one of the requested prompts."""

    def __init__(self) -> None:
        super().__init__()
        self.returned: list[list[str]] = []

    async def HandBackPrompts(
        self,
        request: worker_pb2.HandBackPromptsRequest,
        context: grpc.aio.ServicerContext[worker_pb2.HandBackPromptsRequest, worker_pb2.HandBackPromptsReply],
    ) -> worker_pb2.HandBackPromptsReply:
        self.returned.append(list(request.request_ids))
        return worker_pb2.HandBackPromptsReply(returned=len(request.request_ids) - 1)


async def test_the_instance_gets_the_request_ids() -> None:
    worker, channels = Worker(), Channels()
    servicer = Servicer(worker_pb2_grpc.add_WorkerServicer_to_server, worker, "tailrace.v1.Worker")
    async with serve_grpc("127.0.0.1:0", [servicer]) as server:
        state = ReportedCluster()
        set_members(state, StaticMembers(instances={"a": instance("a", server.address)}), 0.0)
        prompt_returns = WorkerCalls(state, channels)
        assert await prompt_returns.return_prompts("a", ("r", "q", "p")) == 2
        assert worker.returned == [["r", "q", "p"]]
        with pytest.raises(AdminError, match="gone"):
            await prompt_returns.return_prompts("b", ("r",))
    await channels.close()


async def test_a_worker_that_cannot_hand_prompts_back() -> None:
    channels = Channels()
    async with serve_grpc("127.0.0.1:0", []) as server:
        state = ReportedCluster()
        set_members(state, StaticMembers(instances={"a": instance("a", server.address)}), 0.0)
        with pytest.raises(AdminError):
            await WorkerCalls(state, channels).return_prompts("a", ("r",))
    await channels.close()
