"""The answers of one front end: between the API server's calls, the streams that carry them, and other front
ends."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec

from frontend_svc.admission import Refusal
from frontend_svc.answers.book import (
    Answer,
    AnswerBook,
    Entry,
    Forgotten,
    Full,
    Head,
    Refused,
    TooLarge,
)
from frontend_svc.answers.calls import (
    CLOSE,
    NOTE,
    OPEN,
    UNLIMITED,
    CloseCall,
    Denied,
    NoteCall,
    OpenCall,
    Opened,
    OpenReply,
    read_event_id,
    read_run_name,
)
from frontend_svc.answers.delivery import Delivery, Progress, progress_of
from frontend_svc.answers.locate import Fetched, Holders, Wanted, fetch, look
from frontend_svc.answers.messages import REASONS, part_message, read_part
from frontend_svc.answers.metrics import AnswerMetrics
from frontend_svc.answers.replication import Replication, SecondFrontEnds
from frontend_svc.streams import FINISHED, Stream
from tailrace.service.tasks import task_error
from tailrace.v1 import answers_pb2
from tailrace.wire import UtilityCall, detach_buffers, rename_output, utility_failure, utility_result

log = logging.getLogger(__name__)

# Seconds for a call of the API server, and how many may be under way.
_CALL_S: Final = 15.0
_CALLS_MAX: Final = 4_096
# How often a key is looked for again that two front ends were given at the same time.
_ATTEMPTS: Final = 4

SUPERSEDED: Final = Refusal(409, "This answer is being resumed by a later request.")
_BUSY: Final = Denied(
    status=503, kind="ServiceUnavailableError", message="No room to keep this answer now; try again later."
)


def _denied(status: int, message: str) -> Denied:
    kinds = {404: "NotFoundError", 409: "ConflictError", 410: "GoneError", 422: "UnprocessableEntityError"}
    return Denied(status=status, kind=kinds.get(status, "BadRequestError"), message=message)


_TOO_LARGE: Final = _denied(
    413, "This request is too large to be kept, whatever else is: send it without Idempotency-Key."
)
_UNKNOWN: Final = _denied(404, "No answer with this Last-Event-ID is known here.")
_EXPIRED: Final = _denied(410, "The answer with this Last-Event-ID is not kept any more.")
_OTHER_BODY: Final = _denied(422, "This Idempotency-Key was used for another request.")
_OVERTAKEN: Final = _denied(409, SUPERSEDED.message)
_LOST: Final = _denied(
    409,
    "The front end that had the rest of this answer is gone: what is kept ends before this Last-Event-ID.",
)


def _new_id() -> str:
    return secrets.token_hex(16)


class ApiServerSink(Protocol):
    """Where outputs go, and how requests of an earlier run end (the carrier)."""

    def show(self, handle: int, frames: Sequence[bytes], tokens: int, last: bool) -> None:
        """One output for the API server; `handle` 0: no stream carries it."""

    def cut(self, request_id: str, refusal: Refusal) -> None:
        """End this request, wherever it is."""

    def reply(self, frames: Sequence[bytes]) -> None:
        """A utility call's result."""


class OtherFrontEnds(SecondFrontEnds, Holders, Protocol):
    """The part of peers.Peers that is used here."""

    def tick(self) -> None: ...
    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class RunRequest:
    """An engine request that belongs to an answer."""

    delivery: Delivery
    part: str
    progress: Progress


class AnswerDesk:
    """All of it, but for the gRPC around it. Called on the event loop."""

    def __init__(
        self,
        frontend_id: str,
        keep_s: float,
        book: AnswerBook,
        peers: OtherFrontEnds,
        metrics: AnswerMetrics,
        clock: Callable[[], float] = time.monotonic,
        new_id: Callable[[], str] = _new_id,
    ) -> None:
        """`keep_s`: seconds after which an answer that nobody touches is forgotten. `clock`: seconds.
        `new_id`: a name that nobody can guess."""
        self._new_id = new_id
        self._keep_s = keep_s
        self.book = book
        self._peers = peers
        self._metrics = metrics
        self._clock = clock
        self._sink: ApiServerSink | None = None
        self._replication = Replication(
            frontend_id,
            book,
            peers,
            self._on_released,
            self._on_superseded,
            metrics.copied,
            keep_s / 3,
            clock,
        )
        metrics.watch(book, lambda: len(peers.all()), self._replication)
        self._deliveries: dict[str, Delivery] = {}
        # Streams of answers, by handle, until their last output has come.
        self._streams: dict[int, tuple[Stream, Delivery, str]] = {}
        # Notes that are not with the second front end yet: which entry, and who waits.
        self._noting: dict[str, list[tuple[int, asyncio.Future[None]]]] = {}
        self._calls: set[asyncio.Task[None]] = set()
        self._arrivals = itertools.count(1)

    def bind(self, sink: ApiServerSink) -> None:
        """Before anything else is called."""
        self._sink = sink

    async def close(self) -> None:
        """Cancel all that is under way."""
        tasks = list(self._calls)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._replication.close()
        await self._peers.close()

    def tick(self) -> None:
        """Called every half second."""
        for answer in self.book.expire(self._clock(), self._keep_s):
            self._replication.forget(answer)
        self._peers.tick()
        self._replication.tick()

    # ---- streams of this front end

    def join(self, name: str, request_id: str, external_id: str) -> RunRequest | Refusal:
        """An engine request of the run of this name begins. `request_id`: vLLM's internal one, which has
        `external_id` in it and is another one in each run."""
        found = read_run_name(name)
        delivery = None if found is None else self._deliveries.get(found[0])
        if found is None or delivery is None or delivery.run != found[1] or not delivery.current:
            return SUPERSEDED
        part = request_id[: request_id.find(external_id) + len(external_id)]
        delivery.names[part] = request_id
        progress = progress_of(delivery.answer, part)
        return RunRequest(delivery, part, progress)

    def carries(self, stream: Stream, request: RunRequest) -> None:
        """This stream brings what is missing of it."""
        request.delivery.handles[request.part] = stream.handle
        self._streams[stream.handle] = (stream, request.delivery, request.part)

    def tell(self, request: RunRequest) -> None:
        """Tell the API server what is known of it."""
        self._pump(request.delivery)

    def __bool__(self) -> bool:
        """Whether any stream belongs to an answer."""
        return bool(self._streams)

    def keeps(self, handle: int) -> bool:
        """Whether what this stream gets is to be put here."""
        return handle in self._streams

    def put(self, handle: int, frames: Sequence[bytes], token_ids: Sequence[int], flags: int) -> None:
        """An accepted output of a stream: it is told once the second front end has it."""
        stream, delivery, part = self._streams[handle]
        answer = delivery.answer
        if flags & FINISHED:
            del self._streams[handle]
        if not delivery.current:
            return
        if answer.gone:
            self._show(delivery, part, frames, len(token_ids), bool(flags & FINISHED))
            return
        model = stream.model if stream.accepted == len(token_ids) else ""
        self._append(answer, Entry(part, tuple(token_ids), flags, tuple(detach_buffers(frames)), model))

    def ended(self, handle: int) -> None:
        """The stream is over without a last output: its client has gone, or it was given up."""
        self._streams.pop(handle, None)

    def failed(self, handle: int) -> None:
        """It must not be tried again."""
        found = self._streams.pop(handle, None)
        if found is not None:
            self._forget(found[1].answer, Forgotten.FAILED)

    # ---- calls of the API server

    def call(self, call: UtilityCall) -> None:
        """One of calls.METHODS."""
        # What is not closed would be kept for ever: that takes no time, and is never refused.
        if len(self._calls) >= _CALLS_MAX and call.method != CLOSE:
            self._reply(utility_failure(call.call_id, f"{_CALLS_MAX} calls are under way already"))
            return
        try:
            work = self._work(call)
        except msgspec.DecodeError as error:
            self._reply(utility_failure(call.call_id, f"malformed call: {error}"))
            return
        task = asyncio.create_task(self._answer(call.call_id, work), name=call.method)
        self._calls.add(task)
        task.add_done_callback(lambda done: self._done(call.call_id, done))

    def _work(self, call: UtilityCall) -> Coroutine[None, None, OpenReply | None]:
        match call.method:
            case method if method == OPEN:
                return self.open(msgspec.msgpack.decode(call.args, type=tuple[OpenCall])[0])
            case method if method == NOTE:
                return self.note(msgspec.msgpack.decode(call.args, type=tuple[NoteCall])[0])
            case _:
                return self.close_run(msgspec.msgpack.decode(call.args, type=tuple[CloseCall])[0])

    async def _answer(self, call_id: int, work: Coroutine[None, None, OpenReply | None]) -> None:
        try:
            async with asyncio.timeout(_CALL_S):
                result = await work
        except TimeoutError:
            self._reply(utility_failure(call_id, f"it took more than {_CALL_S:g} s"))
            return
        self._reply(utility_result(call_id, msgspec.to_builtins(result, builtin_types=(bytes,))))

    def _done(self, call_id: int, task: asyncio.Task[None]) -> None:
        self._calls.discard(task)
        if (error := task_error(task)) is not None:
            log.error("a call of the API server failed", exc_info=error)
            self._reply(utility_failure(call_id, "internal error"))

    async def open(self, call: OpenCall) -> OpenReply:
        """A request has come that is to be kept, or resumed."""
        arrival = next(self._arrivals)
        outcome = await (self._resume(call, arrival) if call.last_event_id else self._by_key(call, arrival))
        if isinstance(outcome, Denied):
            self._metrics.denied[str(outcome.status)] += 1
            return OpenReply(denied=outcome)
        return OpenReply(opened=outcome)

    async def _resume(self, call: OpenCall, arrival: int) -> Opened | Denied:
        event = read_event_id(call.last_event_id)
        if event is None:
            return _denied(400, "This Last-Event-ID is not one of an answer that is kept.")
        answer_id, run, number = event
        wanted = Wanted(call.tenant, answer_id)
        seen = await look(wanted, self.book, self._peers)
        places = [place for place in seen.places if place.tenant == call.tenant and place.streams]
        if not places:
            return _EXPIRED if seen.expired else _UNKNOWN
        if places[0].path != call.path or (call.body and places[0].digest != call.digest):
            return _denied(422, "The answer with this Last-Event-ID is one to another request.")
        if call.key and call.key != places[0].key:
            return _OTHER_BODY
        for place in places:
            # Of all reasons to deny it none may come later: to fetch it ends the run that is under way.
            if run not in place.runs:
                return _LOST
            if self._is_late(place.answer_id, arrival):
                return _OVERTAKEN
            fetched = await fetch(place, self.book, self._peers, self._clock())
            if fetched is not None:
                return self._run_again(fetched, arrival, number, fetched.answer.ended.get(run, 0))
        return _EXPIRED

    async def _by_key(self, call: OpenCall, arrival: int) -> Opened | Denied | None:
        for _ in range(_ATTEMPTS):
            if call.key:
                seen = await look(Wanted(call.tenant, key=call.key), self.book, self._peers)
                for place in seen.places:
                    if (place.path, place.digest) != (call.path, call.digest):
                        return _OTHER_BODY
                    if self._is_late(place.answer_id, arrival):
                        return _OVERTAKEN
                    fetched = await fetch(place, self.book, self._peers, self._clock())
                    if fetched is not None:
                        opened = self._run_again(fetched, arrival, 0, UNLIMITED)
                        if fetched.answer.settled:
                            return opened
                        if (settled := await self._settle(fetched.answer)) is not None:
                            return settled
                if self.book.find(call.tenant, call.key) is not None:
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
                answer = self.book.open(head, self._clock())
            except TooLarge:
                return _TOO_LARGE if call.key else None
            except Full:
                # It was not asked for by name: it is served without being kept.
                return _BUSY if call.key else None
            self._metrics.begun["new"] += 1
            self._begin(answer, arrival, "", None)
            if answer.settled:
                return self._opened(answer, 0, UNLIMITED)
            settled = await self._settle(answer)
            if settled is not None:
                return settled
        return _denied(409, "Another request with this Idempotency-Key has just come; try again.")

    async def _settle(self, answer: Answer) -> Opened | Denied | None:
        """Open the answer's run once it is known that nobody else has its key. None: somebody has."""
        run = answer.run
        try:
            fine = await self._replication.settle(answer)
            if answer.run != run or not answer.serves:
                return _OVERTAKEN
            if fine and not answer.gone:
                answer.settled = True
                return self._opened(answer, 0, UNLIMITED)
            return None
        finally:
            if not answer.settled and answer.serves and answer.run == run:
                self._cut(answer.head.answer_id)
                self._forget(answer, None)

    def _is_late(self, answer_id: str, arrival: int) -> bool:
        """Whether a later request has the answer already: this one took longer to find it."""
        delivery = self._deliveries.get(answer_id)
        return delivery is not None and delivery.current and delivery.arrival > arrival

    def _run_again(self, fetched: Fetched, arrival: int, skip: int, skip_tokens: int) -> Opened:
        answer = fetched.answer
        self._metrics.begun["claimed" if fetched.second else "here"] += 1
        # Who has handed it over has all of it.
        self._begin(answer, arrival, fetched.second, len(answer.entries) if fetched.second else None)
        return self._opened(answer, skip, skip_tokens)

    def _begin(self, answer: Answer, arrival: int, second: str, has: int | None) -> None:
        self._cut(answer.head.answer_id)
        self._deliveries[answer.head.answer_id] = Delivery(answer, arrival)
        self._replication.begin(answer, second, has)

    def _opened(self, answer: Answer, skip: int, skip_tokens: int) -> Opened:
        head = answer.head
        return Opened(
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

    async def note(self, call: NoteCall) -> None:
        """Take a note, and wait until the second front end has it."""
        delivery = self._deliveries.get(call.answer_id)
        if delivery is None or delivery.run != call.run or not delivery.current or delivery.answer.gone:
            return
        answer = delivery.answer
        future = asyncio.get_running_loop().create_future()
        self._noting.setdefault(call.answer_id, []).append((len(answer.entries) + 1, future))
        self._append(answer, Entry("", (), 0, (call.note,)))
        await future

    async def close_run(self, call: CloseCall) -> None:
        """The response has ended."""
        delivery = self._deliveries.get(call.answer_id)
        if delivery is None or delivery.run != call.run:
            return
        self._drop(delivery)
        answer = delivery.answer
        if not delivery.current or answer.gone:
            return
        if not call.begun and not answer.entries:
            # Refused, or malformed: nothing was answered, and the key is free again.
            self._forget(answer, None)
            return
        self.book.end_run(answer, call.run, call.complete, self._clock())
        self._replication.appended(answer)

    # ---- other front ends

    def keep(self, request: answers_pb2.KeepRequest) -> answers_pb2.KeepReply:
        """Take in what another front end's answers got."""
        reply = answers_pb2.KeepReply()
        # First: one of them may have been begun again there since, and be among the parts.
        for answer_id in request.forgotten:
            answer = self.book.get(answer_id)
            if answer is not None and not answer.serves and answer.frontend_id == request.frontend_id:
                self.book.forget(answer, Forgotten.EXPIRED)
        for message in request.parts:
            part = read_part(message)
            here = self.book.get(part.answer_id)
            served = here is not None and here.serves
            taken = self.book.take(part, self._clock())
            if isinstance(taken, Refused):
                reply.refused.add(answer_id=part.answer_id, reason=REASONS[taken])
            if served and here is not None and not here.serves:
                # Also where there was no room for what it has grown to.
                self._replication.stop(here)
                self._cut(part.answer_id)
        return reply

    def find(self, request: answers_pb2.FindAnswerRequest) -> answers_pb2.FindAnswerReply:
        """What is known of it here."""
        answer = Wanted(request.tenant, request.answer_id, request.idempotency_key).local(self.book)
        if answer is None:
            expired = (
                bool(request.answer_id) and self.book.forgotten(request.tenant, request.answer_id) is not None
            )
            return answers_pb2.FindAnswerReply(expired=expired)
        head = answer.head
        return answers_pb2.FindAnswerReply(
            answer_id=head.answer_id,
            run=answer.run,
            entries=len(answer.entries),
            serves=answer.serves,
            tenant=head.tenant,
            path=head.path,
            digest=head.digest,
            streams=head.streams,
            idempotency_key=head.key,
            ended_runs=answer.ended,
        )

    def hand_over(self, request: answers_pb2.ClaimAnswerRequest) -> answers_pb2.ClaimAnswerReply:
        """Another front end serves it from now on."""
        answer = self.book.get(request.answer_id)
        if answer is None:
            return answers_pb2.ClaimAnswerReply()
        if answer.serves:
            if self._replication.copied_to(answer) == request.frontend_id:
                self._replication.stop(answer)
            else:
                self._replication.forget(answer)
        part = self.book.hand_over(answer, request.frontend_id, self._clock())
        self._cut(request.answer_id)
        self._metrics.handed_over += 1
        return answers_pb2.ClaimAnswerReply(part=part_message(part))

    # ---- inside

    def _append(self, answer: Answer, entry: Entry) -> None:
        self.book.append(answer, entry, self._clock())
        if answer.gone:
            log.info("answer %s is too long to be kept", answer.head.answer_id)
            self._replication.forget(answer)
            self._on_released(answer, len(answer.entries))
        else:
            self._replication.appended(answer)

    def _on_released(self, answer: Answer, entries: int) -> None:
        answer_id = answer.head.answer_id
        delivery = self._deliveries.get(answer_id)
        if delivery is not None and delivery.answer is answer and delivery.current:
            delivery.released = max(delivery.released, entries)
            self._pump(delivery)
        waiting = self._noting.pop(answer_id, [])
        for number, future in waiting:
            if number > entries:
                self._noting.setdefault(answer_id, []).append((number, future))
            elif not future.done():
                future.set_result(None)

    def _on_superseded(self, answer: Answer) -> None:
        """Somebody else serves it: what is here is a branch that nobody may go on with."""
        self._metrics.superseded += 1
        self._cut(answer.head.answer_id)
        self.book.forget(answer, None)

    def _pump(self, delivery: Delivery) -> None:
        for part, entry in delivery.due():
            frames = rename_output(entry.frames, delivery.names[part])
            self._show(delivery, part, frames, len(entry.token_ids), bool(entry.flags & FINISHED))

    def _show(self, delivery: Delivery, part: str, frames: Sequence[bytes], tokens: int, last: bool) -> None:
        assert self._sink is not None
        self._sink.show(delivery.handles.get(part, 0), frames, tokens, last)

    def _cut(self, answer_id: str) -> None:
        """What an earlier run still has under way ends."""
        delivery = self._deliveries.get(answer_id)
        if delivery is None:
            return
        self._drop(delivery)
        assert self._sink is not None
        for name in delivery.names.values():
            self._sink.cut(name, SUPERSEDED)

    def _drop(self, delivery: Delivery) -> None:
        answer_id = delivery.answer.head.answer_id
        if self._deliveries.get(answer_id) is delivery:
            del self._deliveries[answer_id]
        for handle in delivery.handles.values():
            self._streams.pop(handle, None)
        for _, future in self._noting.pop(answer_id, []):
            if not future.done():
                future.set_result(None)

    def _forget(self, answer: Answer, why: Forgotten | None) -> None:
        self._replication.forget(answer)
        self.book.forget(answer, why)

    def _reply(self, frames: Sequence[bytes]) -> None:
        assert self._sink is not None
        self._sink.reply(frames)
