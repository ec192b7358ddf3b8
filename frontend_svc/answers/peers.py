"""The other front ends that keep answers like this one: who they are, and calls of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final, TypeVar

import grpc

from tailrace.records import ServiceRecord
from tailrace.security.roles import Role
from tailrace.service.channels import Channels, Services, format_error
from tailrace.service.tasks import task_error
from tailrace.v1 import answers_pb2, answers_pb2_grpc

log = logging.getLogger(__name__)

CALL_S: Final = 1.0
"""Seconds for a small call; a front end that takes longer is as good as gone."""
# More for what is large: bytes a second, far less than any network that a fleet has.
_SLOWEST: Final = 20e6
# A peer that says anything else is there: to avoid it would only have it asked again, and lost again.
_LOST: Final = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED})
# A whole answer is handed over.
_CLAIM_S: Final = 5.0
_KIND: Final = "frontend"

Reply = TypeVar("Reply")


def rank(key: str, frontend_id: str) -> int:
    """How much a front end is for an answer: of several the one with the highest (rendezvous hashing)."""
    return int.from_bytes(blake2b(f"{key}\0{frontend_id}".encode(), digest_size=8).digest())


@dataclass(frozen=True, slots=True)
class Peer:
    """Another front end, as it was started last."""

    frontend_id: str
    incarnation: str
    address: str


class Unanswered(Exception):
    """The peer did not answer in time, or is not reached."""


class CallFailed(Exception):
    """The peer is there, and the call failed: it was refused, is too large, or met a bug."""


class Peers:
    """Front ends with the same `setting`: what vLLM's API server makes of the same log is the same there."""

    def __init__(
        self,
        members: Services,
        frontend_id: str,
        setting: str,
        channels: Channels,
    ) -> None:
        self._members = members
        self._frontend_id = frontend_id
        self._setting = setting
        self._channels = channels
        # Those that did not answer, by incarnation, each with the question whether it does again.
        self._avoided: dict[str, asyncio.Task[None] | None] = {}

    def all(self) -> list[Peer]:
        """All that are members, and answered when they were asked last."""
        return [peer for peer in self._members_like_us() if peer.incarnation not in self._avoided]

    def tick(self) -> None:
        """Called every half second: those that did not answer are asked again, with nobody waiting for it."""
        members = {peer.incarnation: peer for peer in self._members_like_us()}
        for incarnation, probe in list(self._avoided.items()):
            if probe is not None and not probe.done():
                continue
            if probe is not None and (error := task_error(probe)) is not None:
                log.error("asking a front end failed", exc_info=error)
            if incarnation not in members:
                del self._avoided[incarnation]
            else:
                self._avoided[incarnation] = asyncio.create_task(self._probe(members[incarnation]))

    async def close(self) -> None:
        """Cancel what is under way."""
        probes = [probe for probe in self._avoided.values() if probe is not None]
        for probe in probes:
            probe.cancel()
        await asyncio.gather(*probes, return_exceptions=True)

    async def _probe(self, peer: Peer) -> None:
        nothing = answers_pb2.FindAnswerRequest()
        try:
            await self._answered(peer, self._stub(peer).Find(nothing, timeout=CALL_S))
        except Unanswered:
            return
        except CallFailed:
            # It is logged, and it is an answer.
            pass
        log.info("front end %s answers again", peer.frontend_id)
        self._avoided.pop(peer.incarnation, None)

    def second(self, name: str, prefer: str = "") -> Peer | None:
        """Who should have the copy of an answer of this name. `prefer`: this front end, if it is there."""
        peers = self.all()
        preferred = next((peer for peer in peers if peer.frontend_id == prefer), None)
        return preferred or max(peers, key=lambda peer: rank(name, peer.frontend_id), default=None)

    async def keep(self, peer: Peer, request: answers_pb2.KeepRequest) -> answers_pb2.KeepReply:
        """Give it what answers got. Raises Unanswered, CallFailed."""
        timeout_s = CALL_S + request.ByteSize() / _SLOWEST
        return await self._answered(peer, self._stub(peer).Keep(request, timeout=timeout_s))

    async def find(
        self, request: answers_pb2.FindAnswerRequest
    ) -> list[tuple[Peer, answers_pb2.FindAnswerReply]]:
        """Ask all; those that know of it. Takes CALL_S at most."""
        peers = self.all()
        replies = await asyncio.gather(*(self._find(peer, request) for peer in peers))
        return [
            (peer, reply)
            for peer, reply in zip(peers, replies, strict=True)
            if reply is not None and (reply.answer_id or reply.expired)
        ]

    async def claim(self, peer: Peer, answer_id: str) -> answers_pb2.AnswerPart | None:
        """Have it handed over; None: it is not there any more. Raises Unanswered,
        CallFailed."""
        request = answers_pb2.ClaimAnswerRequest(answer_id=answer_id, frontend_id=self._frontend_id)
        reply = await self._answered(peer, self._stub(peer).Claim(request, timeout=_CLAIM_S))
        return reply.part if reply.HasField("part") else None

    async def _find(
        self, peer: Peer, request: answers_pb2.FindAnswerRequest
    ) -> answers_pb2.FindAnswerReply | None:
        try:
            return await self._answered(peer, self._stub(peer).Find(request, timeout=CALL_S))
        except (Unanswered, CallFailed):
            return None

    async def _answered(self, peer: Peer, call: Awaitable[Reply]) -> Reply:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            if error.code() not in _LOST:
                log.error("a call of front end %s failed: %s", peer.frontend_id, format_error(error))
                raise CallFailed(peer.frontend_id) from error
            if peer.incarnation not in self._avoided:
                log.warning("front end %s does not answer: %s", peer.frontend_id, format_error(error))
                self._avoided[peer.incarnation] = None
            raise Unanswered(peer.frontend_id) from error

    def _stub(self, peer: Peer) -> answers_pb2_grpc.AnswersAsyncStub:
        return answers_pb2_grpc.AnswersStub(self._channels.get(peer.address, Role.FRONTEND))

    def _members_like_us(self) -> list[Peer]:
        return [Peer(each.service_id, each.incarnation, each.address) for each in self._records()]

    def _records(self) -> Sequence[ServiceRecord]:
        return [
            record
            for (kind, service_id), record in self._members.services.items()
            if kind == _KIND and service_id != self._frontend_id and record.answers == self._setting
        ]
