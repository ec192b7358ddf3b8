"""A worker with the simulated engine over a real connection, reduced to what front ends see; it can crash."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from prometheus_client import CollectorRegistry

from tailrace.service.message_stream import serve_streams
from tailrace.v1 import worker_pb2
from tests.frontend.fleet import MODEL
from worker_agent.dispatch import AdmissionControl, AttachStreams, Dispatcher
from worker_agent.engine.base import RequestKey, Submission
from worker_agent.engine.simulated import SimulatedEngine, SimulatedFaults, SimulatedSettings
from worker_agent.frontends import FrontEnd, FrontEnds, send_heartbeats
from worker_agent.load import Heartbeats
from worker_agent.metrics import WorkerHistograms, WorkerMetrics
from worker_agent.progress import StepBounds, StepProgress
from worker_agent.reports import PhaseEvents
from worker_agent.running_requests import RunningRequests
from worker_agent.sink import FrontEndSink


class _Submissions(Dispatcher):
    """Dispatcher of submissions and aborts, without migrations."""

    def __init__(
        self, engine: SimulatedEngine, admission: AdmissionControl, running: RunningRequests
    ) -> None:
        self._engine, self._admission, self._running = engine, admission, running

    def handle(self, front_end: FrontEnd, message: worker_pb2.AttachUp) -> None:
        if message.HasField("submit"):
            submit = message.submit
            key = RequestKey(front_end.client, submit.handle)
            tokens = list(submit.output_token_ids)
            submission = Submission(key, submit.request_id, submit.epoch, list(submit.frames), tokens)
            self._admission.submit(replace(submission, suspect=submit.suspect))
        elif message.HasField("cleared"):
            for handle in message.cleared.handles:
                self._admission.clear_suspect(RequestKey(front_end.client, handle))
        elif message.HasField("abort"):
            keys = [RequestKey(front_end.client, handle) for handle in message.abort.handles]
            self._engine.abort(keys)
            for key in keys:
                self._running.remove(key)


class SimulatedWorker:
    """Worker whose engine can die. `says_goodbye`: it reports this to front ends; otherwise the process
    disappears and its port is closed."""

    def __init__(
        self, instance_id: str, settings: SimulatedSettings, faults: SimulatedFaults, says_goodbye: bool
    ) -> None:
        self.instance_id = instance_id
        self.address = ""
        self.died = False
        # IDs of the submitted requests, once per submission.
        self.submitted: list[str] = []
        self._settings = settings
        self._faults = faults
        self._says_goodbye = says_goodbye
        self._front_ends = FrontEnds()
        self._stopped = asyncio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the worker; it may end earlier by itself."""
        started = asyncio.Event()
        task = asyncio.create_task(self._run(started))
        await started.wait()
        try:
            yield
        finally:
            self._stopped.set()
            await task

    def die(self, reason: str) -> None:
        """End the worker as when its engine dies."""
        self.died = True
        if self._says_goodbye:
            self._front_ends.send_goodbye(worker_pb2.Goodbye(engine_failed=True, reason=reason))
        self._stopped.set()

    async def _run(self, started: asyncio.Event) -> None:
        engine = SimulatedEngine(self._settings, faults=self._faults)
        running, metrics = RunningRequests(), WorkerMetrics(WorkerHistograms(CollectorRegistry()))
        sink = FrontEndSink(self._front_ends, running, PhaseEvents(), metrics, self.die, lambda key: None)
        info = await engine.start(sink)
        admission = _Counting(engine.submit, self._front_ends, running, metrics, 1000)
        admission.submitted = self.submitted
        hello = worker_pb2.WorkerHello(
            instance_id=self.instance_id,
            incarnation="1",
            ready_response=info.ready_response,
            model=MODEL.key,
        )
        streams = AttachStreams(self._front_ends, _Submissions(engine, admission, running), hello)
        progress = StepProgress(StepBounds(1.0, 1.0), 0.0)
        heartbeats = asyncio.create_task(
            send_heartbeats(self._front_ends, 30.0, Heartbeats(progress, engine.stats))
        )
        async with serve_streams("127.0.0.1:0", worker_pb2.AttachUp, streams.serve_stream) as self.address:
            started.set()
            await self._stopped.wait()
        heartbeats.cancel()
        await asyncio.gather(heartbeats, return_exceptions=True)
        await engine.stop()


class _Counting(AdmissionControl):
    submitted: list[str]

    def submit(self, submission: Submission) -> None:
        self.submitted.append(submission.request_id)
        super().submit(submission)
