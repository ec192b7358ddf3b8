"""Classification of failed calls between front ends, over real gRPC: unreachable or merely failing."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import pytest

from frontend_svc.answers import peers as peers_module
from frontend_svc.answers.peers import FrontEndPeers, PeerCallFailed, PeerUnreachable
from frontend_svc.answers.service import SERVICE, ClaimContext, Context, FindContext
from tailrace.records import ServiceRecord
from tailrace.service.channels import Channels
from tailrace.service.server import Servicer, serve_grpc
from tailrace.v1 import answers_pb2, answers_pb2_grpc
from tests.frontend.conftest import eventually
from tests.static_members import StaticMembers
from tests.waiting import WAIT_S


class Failing(answers_pb2_grpc.AnswersServicer):
    """Answers servicer that fails each call with the status set by the test, or replies if there is none."""

    status: grpc.StatusCode | None = None

    async def Keep(self, request: answers_pb2.KeepRequest, context: Context) -> answers_pb2.KeepReply:
        if self.status is not None:
            await context.abort(self.status, "set by the test")
        return answers_pb2.KeepReply()

    async def Find(
        self, request: answers_pb2.FindAnswerRequest, context: FindContext
    ) -> answers_pb2.FindAnswerReply:
        if self.status is not None:
            await context.abort(self.status, "set by the test")
        return answers_pb2.FindAnswerReply(answer_id=request.answer_id)

    async def Claim(
        self, request: answers_pb2.ClaimAnswerRequest, context: ClaimContext
    ) -> answers_pb2.ClaimAnswerReply:
        if self.status is not None:
            await context.abort(self.status, "set by the test")
        return answers_pb2.ClaimAnswerReply()


@pytest.fixture
async def other(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[FrontEndPeers, Failing]]:
    # Whatever the machine does meanwhile, a call fails with the status that the test has set.
    monkeypatch.setattr(peers_module, "CALL_S", WAIT_S)
    monkeypatch.setattr(peers_module, "_CLAIM_S", WAIT_S)
    failing, members, channels = Failing(), StaticMembers(), Channels()
    servicer = Servicer(answers_pb2_grpc.add_AnswersServicer_to_server, failing, SERVICE)
    async with serve_grpc("127.0.0.1:0", [servicer]) as server:
        members.services["frontend", "f1"] = ServiceRecord(
            kind="frontend", service_id="f1", incarnation="1", address=server.address, answers="same"
        )
        peers = FrontEndPeers(members, "f0", "same", channels)
        yield peers, failing
        await peers.close()
        await channels.close()


@pytest.mark.parametrize("status", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED])
async def test_unreachable_peer_is_lost_until_it_answers(
    other: tuple[FrontEndPeers, Failing], status: grpc.StatusCode
) -> None:
    peers, failing = other
    (peer,) = peers.reachable()
    failing.status = status
    with pytest.raises(PeerUnreachable):
        await peers.keep(peer, answers_pb2.KeepRequest())
    assert peers.reachable() == []
    failing.status = None
    peers.tick()
    await eventually(lambda: peers.reachable() == [peer])


@pytest.mark.parametrize(
    "status",
    [
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.UNIMPLEMENTED,
    ],
)
async def test_peer_that_fails_a_call_is_not_lost(
    other: tuple[FrontEndPeers, Failing], status: grpc.StatusCode, caplog: pytest.LogCaptureFixture
) -> None:
    peers, failing = other
    (peer,) = peers.reachable()
    failing.status = status
    with pytest.raises(PeerCallFailed):
        await peers.keep(peer, answers_pb2.KeepRequest())
    with pytest.raises(PeerCallFailed):
        await peers.claim(peer, "a")
    assert await peers.find(answers_pb2.FindAnswerRequest(answer_id="a")) == []
    assert peers.reachable() == [peer] and status.name in caplog.text
