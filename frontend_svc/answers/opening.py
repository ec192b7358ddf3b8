"""Open an answer for a request: begin a new one, resume a kept one, or deny it.

A request names an answer by `Last-Event-ID` or `Idempotency-Key`. The answer may be here or at another front
end, from which it is then fetched, and other requests may open it at the same time.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from frontend_svc.admission import Refusal
from frontend_svc.answers.calls import UNLIMITED, Denial, OpenCall, OpenedAnswer, OpenReply, parse_event_id
from frontend_svc.answers.metrics import AnswerMetrics
from frontend_svc.answers.peers import AnswerPeers, Peer, PeerCallFailed, PeerUnreachable, decode_part
from frontend_svc.answers.store import AnswerStore, AnswerTooLarge, Head, KeptAnswer, StoreFull
from tailrace.v1 import answers_pb2


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


async def locate(query: AnswerQuery, store: AnswerStore, peers: AnswerPeers) -> Locations:
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
    location: AnswerLocation, store: AnswerStore, peers: AnswerPeers, now_s: float
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


# Attempts to resolve a key that two front ends were given at the same time.
_ATTEMPTS: Final = 4

SUPERSEDED: Final = Refusal(409, "This answer is being resumed by a later request.")
_NO_ROOM: Final = Denial(
    status=503,
    kind="ServiceUnavailableError",
    message="There is no room to keep this answer; try again later.",
)


def _denial(status: int, message: str) -> Denial:
    kinds = {404: "NotFoundError", 409: "ConflictError", 410: "GoneError", 422: "UnprocessableEntityError"}
    return Denial(status=status, kind=kinds.get(status, "BadRequestError"), message=message)


_TOO_LARGE: Final = _denial(
    413, "This request is too large for its answer to be kept: send it without Idempotency-Key."
)
_UNKNOWN: Final = _denial(404, "No answer with this Last-Event-ID is known here.")
_EXPIRED: Final = _denial(410, "The answer with this Last-Event-ID is no longer kept.")
_OTHER_BODY: Final = _denial(422, "This Idempotency-Key was used for another request.")
_SUPERSEDED_DENIAL: Final = _denial(409, SUPERSEDED.message)
_LOST: Final = _denial(
    409,
    "The front end that had the rest of this answer is gone: the kept part ends before this Last-Event-ID.",
)


class AnswerRuns(Protocol):
    """The runs of answers at this front end (implemented by the coordinator)."""

    def begin_run(self, answer: KeptAnswer, arrival: int, replica: str, replica_entries: int | None) -> None:
        """Begin a run for the request with this arrival number, and end the one in progress.

        `replica`: the front end that should have the copy, which has `replica_entries` entries already.
        """

    def is_superseded(self, answer_id: str, arrival: int) -> bool:
        """Return whether a later request has begun a run already."""

    async def confirm_key(self, answer: KeptAnswer) -> bool:
        """Return whether no other front end has the answer's key."""

    def withdraw(self, answer: KeptAnswer) -> None:
        """End the run in progress and remove its answer."""


class AnswerOpener:
    """Decide what each request gets. A request is numbered when it arrives: the latest one has the answer."""

    def __init__(
        self,
        store: AnswerStore,
        holders: AnswerPeers,
        runs: AnswerRuns,
        metrics: AnswerMetrics,
        clock: Callable[[], float],
        new_id: Callable[[], str],
    ) -> None:
        """`clock`: seconds. `new_id`: returns an unguessable id."""
        self._store = store
        self._holders = holders
        self._runs = runs
        self._metrics = metrics
        self._clock = clock
        self._new_id = new_id
        self._arrivals = itertools.count(1)

    async def open(self, call: OpenCall) -> OpenReply:
        """Begin to keep a new request's answer, or resume a kept one."""
        arrival = next(self._arrivals)
        outcome = await (
            self._resume(call, arrival) if call.last_event_id else self._open_by_key(call, arrival)
        )
        if isinstance(outcome, Denial):
            self._metrics.denied[str(outcome.status)] += 1
            return OpenReply(denied=outcome)
        return OpenReply(opened=outcome)

    async def _resume(self, call: OpenCall, arrival: int) -> OpenedAnswer | Denial:
        event = parse_event_id(call.last_event_id)
        if event is None:
            return _denial(400, "This Last-Event-ID does not belong to a kept answer.")
        answer_id, run, number = event
        query = AnswerQuery(call.tenant, answer_id)
        located = await locate(query, self._store, self._holders)
        locations = [
            location for location in located.locations if location.tenant == call.tenant and location.streams
        ]
        if not locations:
            return _EXPIRED if located.expired else _UNKNOWN
        if locations[0].path != call.path or (call.body and locations[0].digest != call.digest):
            return _denial(422, "This Last-Event-ID belongs to the answer of another request.")
        if call.key and call.key != locations[0].key:
            return _OTHER_BODY
        for location in locations:
            # Every check must come before the fetch, because fetching ends the run in progress.
            if run not in location.runs:
                return _LOST
            if self._runs.is_superseded(location.answer_id, arrival):
                return _SUPERSEDED_DENIAL
            fetched = await fetch(location, self._store, self._holders, self._clock())
            if fetched is not None:
                return self._begin_fetched(fetched, arrival, number, fetched.answer.ended.get(run, 0))
        return _EXPIRED

    async def _open_by_key(self, call: OpenCall, arrival: int) -> OpenedAnswer | Denial | None:
        for _ in range(_ATTEMPTS):
            if call.key:
                located = await locate(AnswerQuery(call.tenant, key=call.key), self._store, self._holders)
                for location in located.locations:
                    if (location.path, location.digest) != (call.path, call.digest):
                        return _OTHER_BODY
                    if self._runs.is_superseded(location.answer_id, arrival):
                        return _SUPERSEDED_DENIAL
                    fetched = await fetch(location, self._store, self._holders, self._clock())
                    if fetched is not None:
                        opened = self._begin_fetched(fetched, arrival, 0, UNLIMITED)
                        if fetched.answer.key_confirmed:
                            return opened
                        if (settled := await self._confirm_key(fetched.answer)) is not None:
                            return settled
                if self._store.find_by_key(call.tenant, call.key) is not None:
                    continue
            answer_id = self._new_id()
            head = Head(
                answer_id,
                call.tenant,
                call.key,
                call.path,
                call.body,
                call.digest,
                call.request_name or answer_id,
                int(time.time()),
                call.streams,
            )
            try:
                answer = self._store.open(head, self._clock())
            except AnswerTooLarge:
                return _TOO_LARGE if call.key else None
            except StoreFull:
                # The client did not ask for it to be kept, so it is served without.
                return _NO_ROOM if call.key else None
            self._metrics.begun["new"] += 1
            self._runs.begin_run(answer, arrival, "", None)
            if answer.key_confirmed:
                return _opened(answer, 0, UNLIMITED)
            settled = await self._confirm_key(answer)
            if settled is not None:
                return settled
        return _denial(409, "Another request with this Idempotency-Key has just arrived; try again.")

    async def _confirm_key(self, answer: KeptAnswer) -> OpenedAnswer | Denial | None:
        """Open the answer's run once no other front end has its key. Return None if another one has it."""
        run = answer.run
        try:
            confirmed = await self._runs.confirm_key(answer)
            if answer.run != run or not answer.served_here:
                return _SUPERSEDED_DENIAL
            if confirmed and not answer.removed:
                answer.key_confirmed = True
                return _opened(answer, 0, UNLIMITED)
            return None
        finally:
            if not answer.key_confirmed and answer.served_here and answer.run == run:
                self._runs.withdraw(answer)

    def _begin_fetched(self, fetched: Fetched, arrival: int, skip: int, skip_tokens: int) -> OpenedAnswer:
        answer = fetched.answer
        self._metrics.begun["claimed" if fetched.replica else "here"] += 1
        # The front end that handed it over has all of it.
        self._runs.begin_run(
            answer, arrival, fetched.replica, len(answer.entries) if fetched.replica else None
        )
        return _opened(answer, skip, skip_tokens)


def _opened(answer: KeptAnswer, skip: int, skip_tokens: int) -> OpenedAnswer:
    head = answer.head
    return OpenedAnswer(
        answer_id=head.answer_id,
        run=answer.run,
        skip=skip,
        skip_tokens=skip_tokens,
        tokens=answer.tokens,
        notes=[entry.frames[0] for entry in answer.entries if not entry.part],
        body=head.body,
        request_name=head.request_name,
        created_s=head.created_s,
    )
