"""The other front ends that keep answers with the same settings: which there are, calls to them, and the
messages of these calls (protos/tailrace/v1/answers.proto)."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Final, Protocol, TypeVar

import grpc

from frontend_svc.answers.store import Head, LogEntry, Part, PartRefusal
from tailrace.members import Members
from tailrace.records import ServiceRecord
from tailrace.security.roles import Role
from tailrace.service.channels import Channels, decoded, format_error
from tailrace.service.tasks import cancel, run_once
from tailrace.v1 import answers_pb2, answers_pb2_grpc

log = logging.getLogger(__name__)

CALL_S: Final = 1.0
"""Deadline of a small call; a front end that takes longer counts as unreachable."""
# Additional time for large messages: far below the bandwidth of any fleet's network.
_MIN_BYTES_PER_S: Final = 20e6
# Any other status comes from a peer that is reachable; avoiding it would only make it be tried and dropped
# again.
_UNREACHABLE_CODES: Final = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED})
# Longer: a whole answer is transferred.
_CLAIM_S: Final = 5.0
_KIND: Final = "frontend"

Reply = TypeVar("Reply")


def rendezvous_rank(key: str, frontend_id: str) -> int:
    """Return a front end's rank for a key; the highest rank is chosen (rendezvous hashing)."""
    return int.from_bytes(blake2b(f"{key}\0{frontend_id}".encode(), digest_size=8).digest())


@dataclass(frozen=True, slots=True)
class Peer:
    """Another front end, in its current incarnation."""

    frontend_id: str
    incarnation: str
    address: str


class PeerUnreachable(Exception):
    """The peer did not answer in time or cannot be reached."""


class PeerSilent(PeerUnreachable):
    """The peer did not answer in time; it may be this front end that receives nothing."""


class PeerCallFailed(Exception):
    """The peer is reachable, but the call was refused, was too large, or met a bug."""


class AnswerPeers(Protocol):
    """The calls of other front ends: FrontEndPeers, or a network of tests that drops some."""

    def reachable(self) -> list[Peer]: ...
    def choose_replica(self, name: str, prefer: str = "") -> Peer | None: ...
    async def keep(self, peer: Peer, request: answers_pb2.KeepRequest) -> answers_pb2.KeepReply: ...
    async def find(
        self, request: answers_pb2.FindAnswerRequest
    ) -> list[tuple[Peer, answers_pb2.FindAnswerReply]]: ...
    async def claim(self, peer: Peer, answer_id: str) -> answers_pb2.AnswerPart | None: ...
    def tick(self) -> None: ...
    async def close(self) -> None: ...


class FrontEndPeers:
    """Call front ends with the same `setting`: there vLLM's API server makes the same response of the same
    log."""

    def __init__(
        self,
        members: Members,
        frontend_id: str,
        setting: str,
        channels: Channels,
    ) -> None:
        self._members = members
        self._frontend_id = frontend_id
        self._setting = setting
        self._channels = channels
        # Peers that did not answer, by incarnation, each with the probe that checks whether it does again.
        self._unreachable: dict[str, asyncio.Task[None] | None] = {}

    def reachable(self) -> list[Peer]:
        """Return the members that answered the last call to them."""
        return [peer for peer in self._compatible_peers() if peer.incarnation not in self._unreachable]

    def tick(self) -> None:
        """Probe peers that did not answer, in the background. Called every half second."""
        members = {peer.incarnation: peer for peer in self._compatible_peers()}
        for incarnation, probe in list(self._unreachable.items()):
            if probe is not None and not probe.done():
                continue
            if incarnation not in members:
                del self._unreachable[incarnation]
            else:
                peer = members[incarnation]
                self._unreachable[incarnation] = run_once(
                    "probes of front ends", partial(self._probe, peer), peer.frontend_id
                )

    async def close(self) -> None:
        """Cancel the probes."""
        await cancel(*(probe for probe in self._unreachable.values() if probe is not None))

    async def _probe(self, peer: Peer) -> None:
        nothing = answers_pb2.FindAnswerRequest()
        try:
            await self._call(peer, self._stub(peer).Find(nothing, timeout=CALL_S))
        except PeerUnreachable:
            return
        except PeerCallFailed:
            # Logged already, and even an error is an answer.
            pass
        log.info("front end %s responds again", peer.frontend_id)
        self._unreachable.pop(peer.incarnation, None)

    def choose_replica(self, name: str, prefer: str = "") -> Peer | None:
        """Return the front end that should hold the copy of an answer with this key. `prefer`: this one if it
        is reachable."""
        peers = self.reachable()
        preferred = next((peer for peer in peers if peer.frontend_id == prefer), None)
        return preferred or max(peers, key=lambda peer: rendezvous_rank(name, peer.frontend_id), default=None)

    async def keep(self, peer: Peer, request: answers_pb2.KeepRequest) -> answers_pb2.KeepReply:
        """Send parts of answers to a peer. Raise PeerUnreachable or PeerCallFailed."""
        timeout_s = CALL_S + request.ByteSize() / _MIN_BYTES_PER_S
        return await self._call(peer, self._stub(peer).Keep(request, timeout=timeout_s))

    async def find(
        self, request: answers_pb2.FindAnswerRequest
    ) -> list[tuple[Peer, answers_pb2.FindAnswerReply]]:
        """Ask all reachable peers; return those that know the answer. Takes CALL_S at most."""
        peers = self.reachable()
        replies = await asyncio.gather(*(self._find(peer, request) for peer in peers))
        return [
            (peer, reply)
            for peer, reply in zip(peers, replies, strict=True)
            if reply is not None and (reply.answer_id or reply.expired)
        ]

    async def claim(self, peer: Peer, answer_id: str) -> answers_pb2.AnswerPart | None:
        """Take an answer over from a peer; return None if it is not there any more.

        Raise PeerUnreachable or PeerCallFailed.
        """
        request = answers_pb2.ClaimAnswerRequest(answer_id=answer_id, frontend_id=self._frontend_id)
        reply = await self._call(peer, self._stub(peer).Claim(request, timeout=_CLAIM_S))
        return reply.part if reply.HasField("part") else None

    async def _find(
        self, peer: Peer, request: answers_pb2.FindAnswerRequest
    ) -> answers_pb2.FindAnswerReply | None:
        try:
            return await self._call(peer, self._stub(peer).Find(request, timeout=CALL_S))
        except (PeerUnreachable, PeerCallFailed):
            return None

    async def _call(self, peer: Peer, call: Awaitable[Reply]) -> Reply:
        try:
            return decoded(await call, peer.frontend_id)
        except grpc.aio.AioRpcError as error:
            if error.code() not in _UNREACHABLE_CODES:
                log.error("a call of front end %s failed: %s", peer.frontend_id, format_error(error))
                raise PeerCallFailed(peer.frontend_id) from error
            if peer.incarnation not in self._unreachable:
                log.warning("front end %s does not respond: %s", peer.frontend_id, format_error(error))
                self._unreachable[peer.incarnation] = None
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise PeerSilent(peer.frontend_id) from error
            raise PeerUnreachable(peer.frontend_id) from error

    def _stub(self, peer: Peer) -> answers_pb2_grpc.AnswersAsyncStub:
        return answers_pb2_grpc.AnswersStub(self._channels.get(peer.address, Role.FRONTEND))

    def _compatible_peers(self) -> list[Peer]:
        return [Peer(record.service_id, record.incarnation, record.address) for record in self._records()]

    def _records(self) -> Sequence[ServiceRecord]:
        return [
            record
            for (kind, service_id), record in self._members.services.items()
            if kind == _KIND and service_id != self._frontend_id and record.answers == self._setting
        ]


REFUSAL_REASONS: Final = {
    PartRefusal.SUPERSEDED: answers_pb2.KEEP_REFUSAL_REASON_SUPERSEDED,
    PartRefusal.KEY_IN_USE: answers_pb2.KEEP_REFUSAL_REASON_KEY_IN_USE,
    PartRefusal.FULL: answers_pb2.KEEP_REFUSAL_REASON_FULL,
    PartRefusal.GAP: answers_pb2.KEEP_REFUSAL_REASON_GAP,
}
_REFUSALS: Final = {reason: refused for refused, reason in REFUSAL_REASONS.items()}


def decode_refusal(reason: answers_pb2.KeepRefusalReason.ValueType) -> PartRefusal:
    """Return the refusal of a reply; a reason of a later version is treated as lack of room."""
    return _REFUSALS.get(reason, PartRefusal.FULL)


def encode_part(part: Part) -> answers_pb2.AnswerPart:
    """Return the part as a protobuf message."""
    message = answers_pb2.AnswerPart(
        answer_id=part.answer_id,
        run=part.run,
        ended=part.ended,
        first_entry=part.first_entry,
        entries=[
            answers_pb2.AnswerEntry(
                part=entry.part,
                token_ids=entry.token_ids,
                flags=entry.flags,
                frames=entry.frames,
                model=entry.model,
            )
            for entry in part.entries
        ],
        complete=part.complete,
        frontend_id=part.frontend_id,
    )
    if part.head is not None:
        head = part.head
        message.head.CopyFrom(
            answers_pb2.AnswerHead(
                tenant=head.tenant,
                idempotency_key=head.key,
                path=head.path,
                body=head.body,
                digest=head.digest,
                request_name=head.request_name,
                created_s=head.created_s,
                streams=head.streams,
            )
        )
    return message


def _decode_entry(message: answers_pb2.AnswerEntry) -> LogEntry:
    # Interned, because all entries of a part share its name.
    part = sys.intern(message.part)
    return LogEntry(part, tuple(message.token_ids), message.flags, tuple(message.frames), message.model)


def decode_part(message: answers_pb2.AnswerPart) -> Part:
    """Return the part that a protobuf message holds."""
    head = None
    if message.HasField("head"):
        encoded = message.head
        head = Head(
            message.answer_id,
            encoded.tenant,
            encoded.idempotency_key,
            encoded.path,
            encoded.body,
            encoded.digest,
            encoded.request_name,
            encoded.created_s,
            encoded.streams,
        )
    return Part(
        message.answer_id,
        message.run,
        head,
        dict(message.ended),
        message.first_entry,
        [_decode_entry(entry) for entry in message.entries],
        message.complete,
        message.frontend_id,
    )
