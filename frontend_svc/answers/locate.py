"""Find an answer among the front ends that keep answers, and fetch it to this one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from frontend_svc.answers.messages import decode_part
from frontend_svc.answers.peers import Peer, PeerCallFailed, PeerUnreachable
from frontend_svc.answers.store import AnswerStore, KeptAnswer
from tailrace.v1 import answers_pb2


class AnswerHolders(Protocol):
    """Front ends that may have answers (the used part of peers.Peers)."""

    async def find(
        self, request: answers_pb2.FindAnswerRequest
    ) -> list[tuple[Peer, answers_pb2.FindAnswerReply]]: ...
    async def claim(self, peer: Peer, answer_id: str) -> answers_pb2.AnswerPart | None: ...


@dataclass(frozen=True, slots=True)
class AnswerQuery:
    """The answer to find: by id, or by its tenant's idempotency key."""

    tenant: str
    answer_id: str = ""
    key: str = ""

    def local(self, store: AnswerStore) -> KeptAnswer | None:
        """Return the answer if it is in this front end's store."""
        return store.get(self.answer_id) if self.answer_id else store.find_by_key(self.tenant, self.key)


@dataclass(frozen=True, slots=True)
class AnswerLocation:
    """One front end that has the answer. The one of highest precedence is the one to continue."""

    run: int
    serves: bool
    entries: int
    # None: this front end.
    peer: Peer | None
    answer_id: str
    tenant: str
    path: str
    digest: bytes
    streams: bool
    # Its idempotency key; empty if it has none.
    key: str
    # Numbers of the current run and of earlier ones.
    runs: frozenset[int]

    @property
    def precedence(self) -> tuple[int, bool, int, bool]:
        """Return the sort key by which locations are compared."""
        return (self.run, self.serves, self.entries, self.peer is None)


@dataclass(frozen=True, slots=True)
class Locations:
    """All locations of an answer, best first."""

    locations: list[AnswerLocation]
    # Whether a front end had it and removed it.
    expired: bool


def _local_location(answer: KeptAnswer) -> AnswerLocation:
    head = answer.head
    return AnswerLocation(
        answer.run,
        answer.served_here,
        len(answer.entries),
        None,
        head.answer_id,
        head.tenant,
        head.path,
        head.digest,
        head.streams,
        head.key,
        frozenset((answer.run, *answer.ended)),
    )


async def locate(query: AnswerQuery, store: AnswerStore, peers: AnswerHolders) -> Locations:
    """Find an answer: here, and unless it is served here, at all other front ends. Takes peers.CALL_S at
    most."""
    local = query.local(store)
    if local is not None and local.served_here:
        return Locations([_local_location(local)], expired=False)
    request = answers_pb2.FindAnswerRequest(
        answer_id=query.answer_id, tenant=query.tenant, idempotency_key=query.key
    )
    replies = await peers.find(request)
    locations = [
        AnswerLocation(
            reply.run,
            reply.serves,
            reply.entries,
            peer,
            reply.answer_id,
            reply.tenant,
            reply.path,
            reply.digest,
            reply.streams,
            reply.idempotency_key,
            frozenset((reply.run, *reply.ended_runs)),
        )
        for peer, reply in replies
        if reply.answer_id
    ]
    if (local := query.local(store)) is not None:
        locations.append(_local_location(local))
    expired = any(reply.expired for _, reply in replies)
    if query.answer_id and store.removal_reason(query.tenant, query.answer_id) is not None:
        expired = True
    return Locations(sorted(locations, key=lambda location: location.precedence, reverse=True), expired)


@dataclass(frozen=True, slots=True)
class Fetched:
    """An answer that is served here now, at a new run.

    `replica`: the front end that has all of it; empty: none that is known.
    """

    answer: KeptAnswer
    replica: str


async def fetch(
    location: AnswerLocation, store: AnswerStore, peers: AnswerHolders, now_s: float
) -> Fetched | None:
    """Begin a run of the answer here. Return None if it is gone from there, or there is no room here."""
    if location.peer is None:
        answer = store.get(location.answer_id)
        if answer is None:
            return None
        store.begin_run(answer, now_s)
        return Fetched(answer, "")
    try:
        part = await peers.claim(location.peer, location.answer_id)
    except (PeerUnreachable, PeerCallFailed):
        return None
    if part is None:
        return None
    claimed = store.claim(decode_part(part), now_s)
    return None if claimed is None else Fetched(claimed, location.peer.frontend_id)
