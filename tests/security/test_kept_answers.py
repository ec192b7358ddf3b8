"""Front ends keep each other's answers over gRPC with certificates, and no other role can access them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from prometheus_client import CollectorRegistry

from frontend_svc.admission import Refusal
from frontend_svc.answers.calls import OpenCall, OpenedAnswer, OpenReply, run_name
from frontend_svc.answers.coordinator import AnswerCoordinator, RunRequest
from frontend_svc.answers.service import answers_servicer, keep_answers
from frontend_svc.settings import Front, Settings, WaitLimits
from frontend_svc.streams import StreamTable
from tailrace.records import ServiceRecord
from tailrace.security.authority import Authority
from tailrace.security.roles import Role
from tailrace.service.channels import Channels
from tailrace.service.server import serve_grpc
from tailrace.v1 import answers_pb2, answers_pb2_grpc
from tailrace.wire.outputs import EngineCoreOutput, encode_outputs, read_outputs
from tests.frontend.conftest import eventually
from tests.security.conftest import transport
from tests.static_members import StaticMembers
from tests.waiting import WAIT_S


class Sink:
    """Records what the API server is sent."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.refused: list[str] = []

    def send_output(self, handle: int, frames: Sequence[bytes], tokens: int, last: bool) -> None:
        for output in read_outputs(frames).outputs:
            self.tokens += output.new_token_ids

    def end_request(self, request_id: str, refusal: Refusal) -> None:
        self.refused.append(request_id)

    def reply(self, frames: Sequence[bytes]) -> None:
        raise AssertionError("no calls by messages in these tests")


@dataclass(frozen=True)
class FrontEnd:
    coordinator: AnswerCoordinator
    sink: Sink
    address: str

    def run(self, reply: OpenReply) -> tuple[OpenedAnswer, RunRequest]:
        """Run the opened answer, as the API server does."""
        assert reply.opened is not None, reply
        opened = reply.opened
        name = f"x-{opened.run:08}"
        request = self.coordinator.join_run(run_name(opened.answer_id, opened.run), name)
        assert isinstance(request, RunRequest)
        self.coordinator.deliver(request)
        return opened, request


@asynccontextmanager
async def front_end(members: StaticMembers, name: str, authority: Authority) -> AsyncIterator[FrontEnd]:
    settings = Settings(
        frontend_id=name,
        http="",
        front=Front.PYTHON,
        model="tiny",
        vllm_rs=Path(),
        ipc_folder=None,
        wait_limits=WaitLimits(),
        keep_answers_s=60.0,
    )
    own = transport(authority, Role.FRONTEND, name)
    channels = Channels(own)
    coordinator = keep_answers(settings, "same", members, channels, CollectorRegistry())
    sink = Sink()
    coordinator.bind(sink, sink.end_request)
    async with serve_grpc("127.0.0.1:0", [answers_servicer(coordinator)], own) as server:
        members.services["frontend", name] = ServiceRecord(
            kind="frontend", service_id=name, incarnation=name, address=server.address, answers="same"
        )
        try:
            yield FrontEnd(coordinator, sink, server.address)
        finally:
            await coordinator.close()
            await channels.close()


@pytest.fixture
async def two(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[FrontEnd, FrontEnd]]:
    # Neither takes the other for dead because this machine is busy.
    monkeypatch.setattr("frontend_svc.answers.peers.CALL_S", WAIT_S)
    monkeypatch.setattr("frontend_svc.answers.peers._CLAIM_S", WAIT_S)
    members = StaticMembers()
    # With other settings, its vLLM would make different events from the same log.
    members.services["frontend", "other"] = ServiceRecord(
        kind="frontend", service_id="other", incarnation="1", address="127.0.0.1:1", answers="other"
    )
    async with asyncio.timeout(WAIT_S), AsyncExitStack() as stack:
        front_ends = [
            await stack.enter_async_context(front_end(members, name, authority)) for name in ("f0", "f1")
        ]
        yield front_ends[0], front_ends[1]


def call(tenant: str = "t", key: str = "", event: str = "", digest: bytes = b"d") -> OpenCall:
    return OpenCall(
        tenant=tenant,
        key=key,
        last_event_id=event,
        path="/p",
        body=b"{}" * 500_000,
        digest=digest,
        request_name="",
        streams=True,
    )


async def test_another_front_end_continues_the_answer(two: tuple[FrontEnd, FrontEnd]) -> None:
    first, second = two
    opened, request = first.run(await first.coordinator.open_answer(call(key="k")))
    stream = StreamTable().open("x-00000001")
    first.coordinator.attach_stream(stream, request)
    for token_id in (7, 8):
        stream.token_ids.append(token_id)
        first.coordinator.append_output(
            stream.handle, encode_outputs([EngineCoreOutput("x", [token_id])]), [token_id], 0
        )
    await eventually(lambda: first.sink.tokens == [7, 8])
    # Other tenants and requests have no access, neither by ID nor by key.
    event = f"{opened.answer_id}.1.1"
    denied = (await second.coordinator.open_answer(call("other", event=event))).denied
    assert denied is not None and denied.status == 404
    denied = (await second.coordinator.open_answer(call(key="k", digest=b"other"))).denied
    assert denied is not None and denied.status == 422
    assert first.sink.refused == []
    others, _ = second.run(await second.coordinator.open_answer(call("other", key="k")))
    assert others.answer_id != opened.answer_id
    again, request = second.run(await second.coordinator.open_answer(call(event=event)))
    assert (again.skip, again.skip_tokens, again.body) == (1, 2, b"{}" * 500_000) and again.run > 1
    assert second.sink.tokens == [7, 8] and list(request.progress.token_ids) == [7, 8]
    assert first.sink.refused == ["x-00000001"]


@pytest.mark.parametrize("role", sorted(set(Role) - {Role.FRONTEND}))
async def test_other_roles_may_not_call(
    two: tuple[FrontEnd, FrontEnd], authority: Authority, role: Role
) -> None:
    first, _ = two
    opened, _ = first.run(await first.coordinator.open_answer(call()))
    channels = Channels(transport(authority, role))
    stub = answers_pb2_grpc.AnswersStub(channels.get(first.address, Role.FRONTEND))
    calls = (
        stub.Keep(answers_pb2.KeepRequest(forgotten=[opened.answer_id])),
        stub.Find(answers_pb2.FindAnswerRequest(answer_id=opened.answer_id)),
        stub.Claim(answers_pb2.ClaimAnswerRequest(answer_id=opened.answer_id)),
    )
    for each in calls:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await each
        # etcd's certificates are of another authority: they do not get as far as a method.
        etcds = role in (Role.ETCD, Role.ETCD_ROOT)
        refusal = grpc.StatusCode.UNAVAILABLE if etcds else grpc.StatusCode.PERMISSION_DENIED
        assert error.value.code() is refusal
    await channels.close()
