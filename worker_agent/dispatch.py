"""Serve the streams of front ends, and dispatch their messages to the parts of the worker that handle
them."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable
from typing import Final

from tailrace.service.message_stream import MessageStream, StreamBroken
from tailrace.service.tasks import first_ended
from tailrace.telemetry.incidents import unreadable
from tailrace.v1 import worker_pb2
from tailrace.wire.requests import utility_failure
from worker_agent.engine.base import Engine, Pull, RequestKey, Submission
from worker_agent.frontends import AttachRefused, Downstream, FrontEnd, FrontEnds, failed_here
from worker_agent.held import HeldQueries
from worker_agent.metrics import WorkerMetrics
from worker_agent.migration.source import Exports
from worker_agent.migration.target import Imports
from worker_agent.prefixes import Pulls
from worker_agent.reports import PhaseEvents
from worker_agent.running_requests import RunningRequests

log = logging.getLogger(__name__)


# Pending utility calls per front end.
_UTILITY_CALLS_MAX: Final = 64


class AdmissionControl:
    """Accept or reject submissions before they reach the engine.

    Suspects, which may have crashed an engine, are accepted from one front end at a time. A front end submits
    one of its own to an instance at a time (frontend_svc/recovery.py) but does not know of other front ends'.
    """

    def __init__(
        self,
        submit: Callable[[Submission], None],
        front_ends: FrontEnds,
        running: RunningRequests,
        metrics: WorkerMetrics,
        max_requests: int,
        drained: Callable[[], bool] = lambda: False,
    ) -> None:
        """`submit` takes what is accepted. `max_requests`: most requests here at a time, waiting or running.
        `drained()`: whether an operator drains the instance."""
        self._max_requests = max_requests
        self._drained = drained
        self._submit = submit
        self._suspects: set[RequestKey] = set()
        self._front_ends = front_ends
        self._running = running
        self._metrics = metrics

    def submit(self, submission: Submission) -> None:
        """Submit to the engine, unless the front end has detached; reject what must run elsewhere."""
        front_end = self._front_ends.by_client(submission.key.client)
        if front_end is None:
            return
        if (full := self._rejection_reason(submission)) is not None:
            self._metrics.rejected_busy += 1
            rejected = worker_pb2.RequestRejected(
                handle=submission.key.handle,
                epoch=submission.epoch,
                code=worker_pb2.REJECT_CODE_BUSY,
                reason=full,
            )
            front_end.send(worker_pb2.AttachDown(rejected=rejected))
            return
        self._metrics.submitted += 1
        # Before the engine has it, because the request may crash this process.
        reply = worker_pb2.Taken(handle=submission.key.handle, epoch=submission.epoch)
        front_end.send(worker_pb2.AttachDown(taken=reply))
        try:
            running = self._running.add(
                submission.key,
                submission.request_id,
                submission.frontend_id,
                submission.epoch,
                submission.traceparent,
                None if submission.waited_s is None else time.monotonic() - submission.waited_s,
            )
            running.pace.recover(
                submission.answer_tokens,
                submission.answering_s,
                len(submission.output_token_ids),
                time.monotonic(),
            )
            if submission.suspect:
                self._suspects.add(submission.key)
            self._submit(submission)
        except Exception:
            # A bug must not break the stream that carries all other requests.
            log.exception("request %s was not submitted", submission.request_id)
            self._running.remove(submission.key)
            self._metrics.finished["failed"] += 1
            front_end.send(_failed(submission))

    def _rejection_reason(self, submission: Submission) -> str | None:
        """Return why the request must run elsewhere, or None."""
        if self._running.get(submission.key) is not None:
            return None
        if self._drained():
            # From a front end that has not heard of it, and no scheduler that has answers it.
            return "an operator drains this instance"
        if len(self._running) >= self._max_requests:
            return f"{self._max_requests} requests are already here (--max-requests)"
        if submission.suspect and self._has_suspect_of_others(submission.key.client):
            return "a suspect request of another front end is here"
        return None

    def _has_suspect_of_others(self, client: int) -> bool:
        self._suspects = {key for key in self._suspects if self._running.get(key) is not None}
        return any(key.client != client for key in self._suspects)

    def clear_suspect(self, key: RequestKey) -> None:
        """Take a suspect for a request like others: it has proved harmless."""
        self._suspects.discard(key)


def _pull(submit: worker_pb2.Submit) -> Pull | None:
    if not submit.HasField("pull"):
        return None
    return Pull(submit.pull.instance_id, submit.pull.address, submit.pull.tokens)


def _failed(submission: Submission) -> worker_pb2.AttachDown:
    next_index = len(submission.output_token_ids)
    return failed_here(submission.request_id, submission.key.handle, submission.epoch, next_index)


class Dispatcher:
    """Handle every message of every front end, in the order of each stream."""

    def __init__(
        self,
        engine: Engine,
        admission: AdmissionControl,
        exports: Exports,
        imports: Imports,
        pulls: Pulls,
        running: RunningRequests,
        events: PhaseEvents,
        metrics: WorkerMetrics,
    ) -> None:
        self._queries = HeldQueries(engine, running, exports.open, self._is_incoming, self.give_up)
        self._engine = engine
        self._admission = admission
        self._exports = exports
        self._imports = imports
        self._pulls = pulls
        self._running = running
        self._events = events
        self._metrics = metrics

    def handle(self, front_end: FrontEnd, message: worker_pb2.AttachUp) -> None:
        """Handle one message; never waits. One that cannot be handled must not break the stream, which
        carries all others."""
        try:
            self._handle(front_end, message)
        except Exception as error:  # noqa: BLE001 - see above
            unreadable("message of a front end", front_end.frontend_id, error)

    def _handle(self, front_end: FrontEnd, message: worker_pb2.AttachUp) -> None:
        match message.WhichOneof("body"):
            case "submit":
                self._submit(front_end, message.submit)
            case "abort":
                self._free([RequestKey(front_end.client, each) for each in message.abort.handles], "aborted")
            case "adopt_reply":
                self._imports.handle_adopt_reply(message.adopt_reply)
            case "release":
                key = RequestKey(front_end.client, message.release.handle)
                self._release(key, message.release.epoch)
            case "ownership":
                ownership = message.ownership
                key = RequestKey(front_end.client, ownership.handle)
                self._exports.handle_ownership(key, ownership.epoch, ownership.current)
            case "held_query":
                self._queries.answer(front_end, message.held_query)
            case "utility":
                self._utility(front_end, message.utility)
            case "cleared":
                for handle in message.cleared.handles:
                    self._admission.clear_suspect(RequestKey(front_end.client, handle))
            case _:
                # A heartbeat, or a message of a newer version.
                return

    def _is_incoming(self, key: RequestKey) -> bool:
        """Return whether the request is on its way to the engine."""
        return self._imports.concerns(key) or self._pulls.concerns(key)

    async def close(self) -> None:
        """Cancel pending queries."""
        await self._queries.close()

    def give_up(self, key: RequestKey) -> None:
        """Free a request that cannot continue here, after its front end was told."""
        self._free([key], "failed")

    def front_end_gone(self, client: int) -> None:
        """Free all requests of a front end whose stream has ended."""
        self._pulls.drop_client(client)
        self._engine.abort_client(client)
        for running in self._running.remove_client(client):
            self._metrics.finished["aborted"] += 1
            self._events.gone(running)

    def _submit(self, front_end: FrontEnd, submit: worker_pb2.Submit) -> None:
        submission = Submission(
            key=RequestKey(front_end.client, submit.handle),
            request_id=submit.request_id,
            epoch=submit.epoch,
            frames=list(submit.frames),
            output_token_ids=list(submit.output_token_ids),
            traceparent=submit.traceparent,
            frontend_id=front_end.frontend_id,
            answer_tokens=submit.answer_tokens,
            answering_s=submit.answering_s,
            suspect=submit.suspect,
            pull=_pull(submit),
            adapter_version=submit.adapter_version,
            waited_s=submit.waited_s if submit.HasField("waited_s") else None,
        )
        for field in ("answering_s", "waited_s"):
            if not 0.0 <= (seconds := getattr(submit, field)) < math.inf:
                log.warning("refused %s: %s is %s", submit.request_id, field, seconds)
                front_end.send(_failed(submission))
                return
        try:
            if not self._imports.supersede_by(submission):
                self._admission.submit(submission)
        except Exception:
            front_end.send(_failed(submission))
            raise

    def _utility(self, front_end: FrontEnd, call: worker_pb2.UtilityCall) -> None:
        if front_end.utility_calls >= _UTILITY_CALLS_MAX:
            text = f"{_UTILITY_CALLS_MAX} calls are already waiting for the engine"
            frames = utility_failure(call.call_id, text)
            result = worker_pb2.UtilityResult(call_id=call.call_id, frames=frames)
            front_end.send(worker_pb2.AttachDown(utility=result))
            return
        front_end.utility_calls += 1
        self._engine.utility(front_end.client, call.call_id, list(call.frames))

    def _free(self, keys: list[RequestKey], outcome: str) -> None:
        self._pulls.drop(keys)
        self._engine.abort(keys)
        for key in keys:
            self._exports.request_aborted(key)
            self._imports.request_aborted(key)
            running = self._running.remove(key)
            if running is not None:
                self._metrics.finished[outcome] += 1
                self._events.gone(running)

    def _release(self, key: RequestKey, epoch: int) -> None:
        """Let an export free the request that it has paused, or abort the request if it still runs in that
        epoch."""
        running = self._running.get(key)
        if not self._exports.handle_release(key, epoch) and running is not None and running.epoch == epoch:
            self._free([key], "aborted")


_HELLO_S: Final = 5.0
# Time for a refused front end to close its end.
_REFUSED_S: Final = 1.0


class AttachStreams:
    """Serve the stream of each front end."""

    def __init__(self, front_ends: FrontEnds, dispatch: Dispatcher, hello: worker_pb2.WorkerHello) -> None:
        self._front_ends = front_ends
        self._dispatch = dispatch
        self._hello = hello

    async def serve_stream(self, stream: MessageStream[worker_pb2.AttachUp]) -> None:
        """Serve one connection until either end closes it."""
        try:
            await self.serve(_incoming(stream), stream)
        except (AttachRefused, StreamBroken) as error:
            log.warning("a stream was refused: %s", error)

    async def serve(self, messages: AsyncIterator[worker_pb2.AttachUp], down: Downstream) -> None:
        """Serve a front end from its hello until either end closes. Raise AttachRefused."""
        hello = await self._read_hello(messages)
        try:
            front_end = self._front_ends.attach(hello, down)
        except AttachRefused as refusal:
            down.send(refusal_message(str(refusal)))
            await _wait_closed(messages)
            raise
        front_end.send(worker_pb2.AttachDown(hello=self._hello))
        try:
            await first_ended(self._read(front_end, messages), front_end.wait_closed())
        except StreamBroken:
            pass
        finally:
            # Immediately, whatever the tasks are doing: the front end's requests must be freed now.
            self._front_ends.detach(front_end)

    async def _read_hello(self, messages: AsyncIterator[worker_pb2.AttachUp]) -> worker_pb2.FrontendHello:
        try:
            async with asyncio.timeout(_HELLO_S):
                first = await anext(messages)
        except (TimeoutError, StopAsyncIteration) as error:
            raise AttachRefused(f"no hello within {_HELLO_S:g} s") from error
        if not first.HasField("hello") or not first.hello.frontend_id:
            raise AttachRefused("the first message must be a hello that names the front end")
        return first.hello

    async def _read(self, front_end: FrontEnd, messages: AsyncIterator[worker_pb2.AttachUp]) -> None:
        async for message in messages:
            if front_end.closed.is_set():
                return
            front_end.last_received_s = time.monotonic()
            self._dispatch.handle(front_end, message)


def refusal_message(reason: str) -> worker_pb2.AttachDown:
    """Build the message for a front end that is refused."""
    return worker_pb2.AttachDown(refused=worker_pb2.AttachRefused(reason=reason))


async def _incoming(stream: MessageStream[worker_pb2.AttachUp]) -> AsyncIterator[worker_pb2.AttachUp]:
    while (message := await stream.read()) is not None:
        yield message


async def _wait_closed(messages: AsyncIterator[worker_pb2.AttachUp]) -> None:
    """Wait shortly for the front end to close, so that the last message is not lost."""
    try:
        async with asyncio.timeout(_REFUSED_S):
            async for _ in messages:
                pass
    except (TimeoutError, StreamBroken):
        pass
