"""Sees what happens to every stream: metrics always, spans when tracing is on."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from frontend_svc.metrics import FrontendMetrics
from frontend_svc.placement import Placed
from frontend_svc.streams import FINISHED, PREFILL_DONE, REASONING_ENDED, Accepted, Stream
from frontend_svc.traces import RequestTraces
from tailrace.cluster import Phase


@dataclass(slots=True)
class _AwaitedAnswer:
    """A stream whose reasoning has ended: its next token is the first that the user reads as an answer."""

    stream: Stream
    from_index: int
    ended_s: float


class StreamObserver:
    """Told by the carrier. Costs nothing per token: steps without flags only add to two counters."""

    def __init__(self, metrics: FrontendMetrics, traces: RequestTraces | None) -> None:
        """`traces`: None when tracing is off."""
        self._metrics = metrics
        self._traces = traces
        self._awaited: dict[int, _AwaitedAnswer] = {}

    def arrived(self, stream: Stream, traceparent: str) -> None:
        """A new request; gives it the trace context that everybody downstream continues."""
        stream.traceparent = traceparent
        if self._traces is not None:
            stream.traceparent = self._traces.begin(stream, traceparent)

    def refused(self, status: int) -> None:
        """A new request was refused with this HTTP status."""
        self._metrics.refused[str(status)] += 1

    def turned_away(self, instance_id: str) -> None:
        """The instance has as many requests as it may; the stream is placed again."""
        self._metrics.recoveries["busy"] += 1

    def placed(self, stream: Stream, placed: Placed, seconds: float) -> None:
        """Submitted to an instance."""
        self._metrics.placements[placed.by] += 1
        self._metrics.placement_seconds.observe(seconds)
        if self._traces is not None:
            self._traces.placed(stream, placed, seconds)

    def accepted(self, verdict: Accepted) -> None:
        """One step's outputs were judged."""
        metrics = self._metrics
        metrics.steps += 1
        metrics.tokens += verdict.tokens
        for _, reason in verdict.rejected:
            metrics.rejected[reason.value] += 1
        if self._awaited:
            self._answers()
        for stream, flags in verdict.flagged:
            self._flagged(stream, flags)

    def adopted(self, stream: Stream, source: str, target: str) -> None:
        """A migration was committed."""
        self._metrics.adoptions += 1
        if self._traces is not None:
            self._traces.adopted(stream, source, target)

    def lost(self, streams: Iterable[Stream], instance_id: str, reason: str) -> None:
        """These streams lost their instance."""
        for stream in streams:
            self._metrics.recoveries["lost"] += 1
            if self._traces is not None:
                self._traces.recovering(stream, instance_id, reason)

    def engine_died(self, instance_id: str) -> None:
        """Its engine died with streams of ours on it."""
        self._metrics.engine_deaths += 1

    def failed(self, streams: Sequence[Stream], instance_id: str) -> None:
        """The instance gave these streams up."""
        for stream in streams:
            self._metrics.recoveries["failed"] += 1
            if self._traces is not None:
                self._traces.recovering(stream, instance_id, "failed")

    def handed_back(self, stream: Stream, instance_id: str) -> None:
        """Its instance drains, and another one goes on with it."""
        self._metrics.recoveries["handed_back"] += 1
        if self._traces is not None:
            self._traces.recovering(stream, instance_id, "handed back")

    def missing(self, stream: Stream, instance_id: str) -> None:
        """The instance did not have this stream, though it was its owner."""
        self._metrics.recoveries["missing"] += 1
        if self._traces is not None:
            self._traces.recovering(stream, instance_id, "missing")

    def aborted(self, stream: Stream) -> None:
        """The client went away, or the API server had enough (a stop string)."""
        self._ended(stream, "aborted")

    def gave_up(self, stream: Stream, reason: str) -> None:
        """Ended as an error."""
        self._ended(stream, "error")

    def _flagged(self, stream: Stream, flags: int) -> None:
        now_s = time.monotonic()
        if flags & PREFILL_DONE:
            self._metrics.first_token_seconds.observe(now_s - stream.arrived_s)
            stream.first_token_s = now_s
            if stream.phase is Phase.ANSWERING:
                # It never reasoned: this very token is the answer's first.
                self._metrics.ttft_seconds.observe(now_s - stream.arrived_s)
                stream.first_answer_s = now_s
        elif flags & REASONING_ENDED:
            self._awaited[stream.handle] = _AwaitedAnswer(stream, stream.accepted, now_s)
        if self._traces is not None and flags & (PREFILL_DONE | REASONING_ENDED):
            self._traces.phase_changed(stream)
        if flags & FINISHED:
            if stream.first_token_s is not None and stream.accepted > 1:
                self._metrics.tpot_seconds.observe((now_s - stream.first_token_s) / (stream.accepted - 1))
            self._ended(stream, "finished")

    def _answers(self) -> None:
        now_s = time.monotonic()
        for handle, awaited in list(self._awaited.items()):
            if awaited.stream.accepted > awaited.from_index:
                del self._awaited[handle]
                awaited.stream.first_answer_s = now_s
                awaited.stream.first_answer_index = awaited.from_index
                self._metrics.ttft_seconds.observe(now_s - awaited.stream.arrived_s)
                self._metrics.ttfat_seconds.observe(now_s - awaited.ended_s)

    def _ended(self, stream: Stream, outcome: str) -> None:
        self._awaited.pop(stream.handle, None)
        self._metrics.requests[outcome] += 1
        if self._traces is not None:
            self._traces.end(stream, outcome)
