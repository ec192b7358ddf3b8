"""Where an answer is, among the front ends that keep answers, and how it comes here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from frontend_svc.answers.book import Answer, AnswerBook
from frontend_svc.answers.messages import read_part
from frontend_svc.answers.peers import CallFailed, Peer, Unanswered
from tailrace.v1 import answers_pb2


class Holders(Protocol):
    """The part of peers.Peers that is used here."""

    async def find(
        self, request: answers_pb2.FindAnswerRequest
    ) -> list[tuple[Peer, answers_pb2.FindAnswerReply]]: ...
    async def claim(self, peer: Peer, answer_id: str) -> answers_pb2.AnswerPart | None: ...


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which answer: by its id, or by its tenant's idempotency key."""

    tenant: str
    answer_id: str = ""
    key: str = ""

    def local(self, book: AnswerBook) -> Answer | None:
        """What is here of it."""
        return book.get(self.answer_id) if self.answer_id else book.find(self.tenant, self.key)


@dataclass(frozen=True, slots=True)
class Sighting:
    """One place where it is. Of several the greatest is the one to go on with."""

    run: int
    serves: bool
    entries: int
    # None: here.
    peer: Peer | None
    answer_id: str
    tenant: str
    path: str
    digest: bytes
    streams: bool
    # Its idempotency key; empty: it has none.
    key: str
    # Numbers of the current run and of those before it.
    runs: frozenset[int]

    @property
    def weight(self) -> tuple[int, bool, int, bool]:
        """By which places are compared."""
        return (self.run, self.serves, self.entries, self.peer is None)


@dataclass(frozen=True, slots=True)
class Sightings:
    """All places where it is, best first."""

    places: list[Sighting]
    # Somewhere it was, and is forgotten.
    expired: bool


def _here(answer: Answer) -> Sighting:
    head = answer.head
    return Sighting(
        answer.run,
        answer.serves,
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


async def look(wanted: Wanted, book: AnswerBook, peers: Holders) -> Sightings:
    """Look here, and if it is not served here ask all others. Takes peers.CALL_S at most."""
    local = wanted.local(book)
    if local is not None and local.serves:
        return Sightings([_here(local)], expired=False)
    asked = answers_pb2.FindAnswerRequest(
        answer_id=wanted.answer_id, tenant=wanted.tenant, idempotency_key=wanted.key
    )
    replies = await peers.find(asked)
    places = [
        Sighting(
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
    if (local := wanted.local(book)) is not None:
        places.append(_here(local))
    expired = any(reply.expired for _, reply in replies)
    if wanted.answer_id and book.forgotten(wanted.tenant, wanted.answer_id) is not None:
        expired = True
    return Sightings(sorted(places, key=lambda place: place.weight, reverse=True), expired)


@dataclass(frozen=True, slots=True)
class Fetched:
    """It is served here now, at a new run. `second` has all of it; empty: nobody else, as far as is known."""

    answer: Answer
    second: str


async def fetch(place: Sighting, book: AnswerBook, peers: Holders, now_s: float) -> Fetched | None:
    """Begin a run of it here. None: it is not there any more, or does not fit in here."""
    if place.peer is None:
        answer = book.get(place.answer_id)
        if answer is None:
            return None
        book.begin_run(answer, now_s)
        return Fetched(answer, "")
    try:
        part = await peers.claim(place.peer, place.answer_id)
    except (Unanswered, CallFailed):
        return None
    if part is None:
        return None
    claimed = book.claim(read_part(part), now_s)
    return None if claimed is None else Fetched(claimed, place.peer.frontend_id)
