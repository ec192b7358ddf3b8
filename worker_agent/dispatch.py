"""What front ends say, carried to where it belongs."""

from __future__ import annotations

import time

from tailrace.v1 import worker_pb2
from worker_agent.carried import CarriedRequests
from worker_agent.engine.base import Engine, RequestKey, Submission
from worker_agent.frontends import FrontEnd, FrontEnds
from worker_agent.metrics import WorkerMetrics
from worker_agent.migration.exports import Exports
from worker_agent.migration.imports import Imports
from worker_agent.phase_news import PhaseNews


class Admission:
    """Takes submissions: the engine's, and who it is for what comes later."""

    def __init__(
        self, engine: Engine, front_ends: FrontEnds, carried: CarriedRequests, metrics: WorkerMetrics
    ) -> None:
        self._engine = engine
        self._front_ends = front_ends
        self._carried = carried
        self._metrics = metrics

    def submit(self, submission: Submission) -> None:
        """To the engine, unless its front end has gone meanwhile."""
        if self._front_ends.by_client(submission.key.client) is None:
            return
        self._metrics.submitted += 1
        carried = self._carried.add(
            submission.key,
            submission.request_id,
            submission.frontend_id,
            submission.epoch,
            submission.traceparent,
        )
        carried.pace.recover(
            submission.answer_tokens,
            submission.answering_s,
            len(submission.output_token_ids),
            time.monotonic(),
        )
        self._engine.submit(submission)


class Dispatch:
    """One a worker; called for every message of every front end, in the order of each stream."""

    def __init__(
        self,
        engine: Engine,
        admission: Admission,
        exports: Exports,
        imports: Imports,
        carried: CarriedRequests,
        news: PhaseNews,
        metrics: WorkerMetrics,
    ) -> None:
        self._engine = engine
        self._admission = admission
        self._exports = exports
        self._imports = imports
        self._carried = carried
        self._news = news
        self._metrics = metrics

    def handle(self, front_end: FrontEnd, message: worker_pb2.AttachUp) -> None:
        """Act on one message; never waits."""
        match message.WhichOneof("body"):
            case "submit":
                self._submit(front_end, message.submit)
            case "abort":
                self._abort([RequestKey(front_end.client, handle) for handle in message.abort.handles])
            case "adopt_reply":
                self._imports.answered(message.adopt_reply)
            case "release":
                key = RequestKey(front_end.client, message.release.handle)
                self._release(key, message.release.epoch)
            case "ownership":
                ownership = message.ownership
                key = RequestKey(front_end.client, ownership.handle)
                self._exports.owned(key, ownership.epoch, ownership.current)
            case "utility":
                call = message.utility
                self._engine.utility(front_end.client, call.call_id, list(call.frames))
            case _:
                # A heartbeat, or something that a newer front end says.
                return

    def client_gone(self, client: int) -> None:
        """A front end's stream has ended, and with it all that it has here."""
        self._engine.abort_client(client)
        for carried in self._carried.remove_client(client):
            self._metrics.finished["aborted"] += 1
            self._news.gone(carried)

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
        )
        if not self._imports.succeeded(submission):
            self._admission.submit(submission)

    def _abort(self, keys: list[RequestKey]) -> None:
        self._engine.abort(keys)
        for key in keys:
            self._exports.ended(key)
            self._imports.aborted(key)
            carried = self._carried.remove(key)
            if carried is not None:
                self._metrics.finished["aborted"] += 1
                self._news.gone(carried)

    def _release(self, key: RequestKey, epoch: int) -> None:
        """The export frees what it has paused; anything else of that epoch must stop by itself."""
        carried = self._carried.get(key)
        if not self._exports.released(key, epoch) and carried is not None and carried.epoch == epoch:
            self._abort([key])
