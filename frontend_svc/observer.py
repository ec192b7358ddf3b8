"""Observe every stream: metrics always, trace spans if tracing is enabled."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from opentelemetry.trace import Span, SpanKind, Tracer
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from frontend_svc.placement import FALLBACK_PLACEMENT, Chosen
from frontend_svc.streams import (
    ANSWER_BEGUN,
    FINISHED,
    PREFILL_DONE,
    REASONING_ENDED,
    Reject,
    StepVerdict,
    Stream,
    StreamTable,
)
from tailrace.cluster import Phase
from tailrace.telemetry import attributes
from tailrace.telemetry.metrics import counter_by, gauge_by
from tailrace.telemetry.tracing import (
    Attributes,
    fail,
    record_span,
    sampled_trace_of,
    start_span,
    traceparent_of,
    wall_ns,
)
from tailrace.v1 import worker_pb2

_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
# A placement takes a few milliseconds: fine enough for its percentiles.
_PLACEMENT_SECONDS: Final = (
    *(0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1, 2.5, 5, 10),
)
_TPOT_SECONDS: Final = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 5)
_OUTCOMES: Final = ("finished", "aborted", "refused", "error")
_STATUSES: Final = ("400", "401", "409", "413", "429", "500", "503")
_CAUSES: Final = ("busy", "lost", "failed", "handed_back", "missing")


class FrontendMetrics(Collector):
    """Count in plain attributes; histograms for what happens once per request."""

    def __init__(
        self, registry: CollectorRegistry, table: StreamTable, attached: Callable[[], list[str]]
    ) -> None:
        self.tokens = 0
        self.steps = 0
        # Exported from the start where the values are known: of a counter that appears with its first event,
        # `increase()` misses that event.
        self.requests = Counter(dict.fromkeys(_OUTCOMES, 0))
        self.refused = Counter(dict.fromkeys(_STATUSES, 0))
        self.rejected = Counter(dict.fromkeys((reason.value for reason in Reject), 0))
        self.recoveries = Counter(dict.fromkeys(_CAUSES, 0))
        self.placements = Counter({FALLBACK_PLACEMENT: 0})
        self.adoptions = 0
        self.engine_deaths = 0
        self.placement_seconds = Histogram(
            "tailrace_frontend_placement_seconds",
            "From a request's arrival (or loss) to its submission to an instance.",
            registry=registry,
            buckets=_PLACEMENT_SECONDS,
        )
        self.fair_wait_seconds = Histogram(
            "tailrace_frontend_fair_wait_seconds",
            "From arrival to the turn of the request's tenant; nothing without --fair-backlog.",
            registry=registry,
            buckets=_SECONDS,
        )
        self.ttft_seconds = Histogram(
            "tailrace_frontend_ttft_seconds",
            "From arrival to the first answering token.",
            registry=registry,
            buckets=_SECONDS,
        )
        self.ttfat_seconds = Histogram(
            "tailrace_frontend_ttfat_seconds",
            "From the end of reasoning to the first answering token.",
            registry=registry,
            buckets=_SECONDS,
        )
        self.first_token_seconds = Histogram(
            "tailrace_frontend_first_token_seconds",
            "From arrival to the first token of any phase.",
            registry=registry,
            buckets=_SECONDS,
        )
        self.tpot_seconds = Histogram(
            "tailrace_frontend_tpot_seconds",
            "Of each finished request: mean time between its tokens, migrations and recoveries included.",
            registry=registry,
            buckets=_TPOT_SECONDS,
        )
        self._table = table
        self._attached = attached
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        phases = Counter(stream.phase for stream in self._table)
        streams = {phase.value: phases[phase] for phase in Phase}
        yield gauge_by("tailrace_frontend_streams", "Live streams.", "phase", streams)
        yield GaugeMetricFamily(
            "tailrace_frontend_attached_instances", "Instances that answer.", value=len(self._attached())
        )
        yield CounterMetricFamily("tailrace_frontend_tokens", "Tokens accepted.", value=self.tokens)
        yield CounterMetricFamily("tailrace_frontend_steps", "Step messages received.", value=self.steps)
        yield CounterMetricFamily(
            "tailrace_frontend_adoptions", "Migrations committed here.", value=self.adoptions
        )
        yield CounterMetricFamily(
            "tailrace_frontend_engine_deaths", "Engines that died with streams.", value=self.engine_deaths
        )
        for name, text, label, counts in (
            ("requests", "Requests by how they ended.", "outcome", self.requests),
            ("refused_requests", "Requests refused on arrival, by status.", "status", self.refused),
            ("rejected_outputs", "Outputs not accepted, by cause.", "cause", self.rejected),
            ("recoveries", "Streams that went on elsewhere, by cause.", "cause", self.recoveries),
            ("placements", "Placements by who decided.", "by", self.placements),
        ):
            yield counter_by(f"tailrace_frontend_{name}", text, label, counts)


@dataclass(slots=True)
class _Trace:
    root: Span
    traceparent: str
    # The span of prefill, reasoning, answering or recovery; None while the first placement runs.
    current: Span | None = None
    phase: Phase | None = None
    began_at: int = 0


class RequestTraces:
    """Hold the open spans of all live streams. Called by StreamObserver, never per token.

        request                 the whole life, under the client's traceparent if it sent one
          placement             until an instance was found
          prefill, reasoning, answering
          recovery              from the loss of an instance until another one had the request

    Migrations are spans of the services that make them, under the traceparent that travels with the request.
    """

    def __init__(self, tracer: Tracer, frontend_id: str) -> None:
        self._tracer = tracer
        self._frontend_id = frontend_id
        self._open: dict[int, _Trace] = {}

    def begin(self, stream: Stream, traceparent: str, chosen: str = "") -> str:
        """Open the root span; return the traceparent that everything downstream continues.

        `chosen`: the id that the client sees, which no other span has.
        """
        root = start_span(
            self._tracer,
            "request",
            traceparent,
            start_ns=wall_ns(stream.arrived_s),
            attributes={
                attributes.REQUEST_ID: stream.request_id,
                attributes.CLIENT_REQUEST_ID: chosen,
                attributes.FRONTEND: self._frontend_id,
                attributes.PROMPT_TOKENS: stream.prompt_tokens,
            },
            kind=SpanKind.SERVER,
        )
        root_context = traceparent_of(root)
        if not root_context:
            # Not sampled: there are no spans here, but the client's own context is still propagated.
            return traceparent
        self._open[stream.handle] = _Trace(root, root_context)
        return root_context

    def placed(self, stream: Stream, chosen: Chosen, seconds: float) -> None:
        """Record the placement and open the span of the stream's phase."""
        trace = self._open.get(stream.handle)
        if trace is None:
            return
        now_s = time.monotonic()
        about: Attributes = {attributes.INSTANCE: chosen.instance_id, attributes.POLICY: chosen.by}
        parent = trace.traceparent
        if trace.current is not None:
            parent = traceparent_of(trace.current)
        record_span(
            self._tracer, "placement", parent, wall_ns(now_s - seconds), wall_ns(now_s), attributes=about
        )
        self._enter(trace, stream)

    def phase_changed(self, stream: Stream) -> None:
        """Open the next phase's span after the worker flagged the end of prefill or of reasoning."""
        trace = self._open.get(stream.handle)
        if trace is not None and trace.phase is not stream.phase:
            self._enter(trace, stream)

    def adopted(self, stream: Stream, source: str, target: str) -> None:
        """Record a committed migration."""
        trace = self._open.get(stream.handle)
        if trace is not None:
            trace.root.add_event(
                "handover",
                {
                    attributes.MIGRATION_SOURCE: source,
                    attributes.MIGRATION_TARGET: target,
                    attributes.EPOCH: stream.epoch,
                    attributes.OUTPUT_TOKENS: stream.accepted,
                },
            )

    def recovering(self, stream: Stream, instance_id: str, reason: str) -> None:
        """Open a recovery span after the instance was lost or gave the stream up; `placed` or `end`
        follows."""
        trace = self._open.get(stream.handle)
        if trace is None:
            return
        self._leave(trace, stream)
        about: Attributes = {
            attributes.INSTANCE: instance_id,
            attributes.REASON: reason,
            attributes.EPOCH: stream.epoch,
            attributes.OUTPUT_TOKENS: stream.accepted,
        }
        trace.current = start_span(self._tracer, "recovery", trace.traceparent, attributes=about)

    def end(self, stream: Stream, outcome: str) -> None:
        """Close the spans of a stream that ended."""
        trace = self._open.pop(stream.handle, None)
        if trace is None:
            return
        self._leave(trace, stream)
        trace.root.set_attribute(attributes.OUTPUT_TOKENS, stream.accepted)
        trace.root.set_attribute(attributes.EPOCH, stream.epoch)
        trace.root.set_attribute(attributes.OUTCOME, outcome)
        if outcome == "error":
            fail(trace.root, "the request failed")
        trace.root.end()

    def _enter(self, trace: _Trace, stream: Stream) -> None:
        self._leave(trace, stream)
        about: dict[str, str | int] = {attributes.PHASE: stream.phase.value, attributes.EPOCH: stream.epoch}
        if stream.owner is not None:
            about[attributes.INSTANCE] = stream.owner
        trace.current = start_span(self._tracer, stream.phase.value, trace.traceparent, attributes=about)
        trace.phase = stream.phase
        trace.began_at = stream.accepted

    def _leave(self, trace: _Trace, stream: Stream) -> None:
        if trace.current is not None:
            if trace.phase is not None:
                trace.current.set_attribute(attributes.TOKENS, stream.accepted - trace.began_at)
            trace.current.end()
        trace.current = None
        trace.phase = None


def exemplar_of(traceparent: str) -> dict[str, str] | None:
    """Return the labels that lead from a histogram to a request's trace; None: it is not sampled."""
    trace_id = sampled_trace_of(traceparent)
    return {"trace_id": trace_id} if trace_id else None


class StreamObserver:
    """Receive the events of all streams. Costs nothing per token: a step without flags only adds to two
    counters."""

    def __init__(self, metrics: FrontendMetrics, traces: RequestTraces | None) -> None:
        """`traces`: None if tracing is off."""
        self._metrics = metrics
        self._traces = traces

    def arrived(self, stream: Stream, traceparent: str, chosen: str = "") -> None:
        """Record a new request and set the trace context that everything downstream continues.

        `chosen`: the id that its client sees.
        """
        stream.traceparent = traceparent
        if self._traces is not None:
            stream.traceparent = self._traces.begin(stream, traceparent, chosen)

    def refused(self, status: int) -> None:
        """Count a new request refused with this HTTP status."""
        self._metrics.refused[str(status)] += 1

    def stream_refused(self, stream: Stream, status: int) -> None:
        """Record the end of a stream refused with this HTTP status before it reached an instance."""
        self.refused(status)
        self._record_end(stream, "refused")

    def turn_waited(self, seconds: float) -> None:
        """Record the seconds that a request waited for its tenant's turn."""
        self._metrics.fair_wait_seconds.observe(seconds)

    def instance_busy(self, instance_id: str) -> None:
        """Count a submission that a busy instance rejected; the stream is placed again."""
        self._metrics.recoveries["busy"] += 1

    def placed(self, stream: Stream, chosen: Chosen, seconds: float) -> None:
        """Record a submission to an instance."""
        self._metrics.placements[chosen.by] += 1
        self._metrics.placement_seconds.observe(seconds)
        if self._traces is not None:
            self._traces.placed(stream, chosen, seconds)

    def accepted(self, verdict: StepVerdict) -> None:
        """Record the verdict on one step's outputs."""
        metrics = self._metrics
        metrics.steps += 1
        metrics.tokens += verdict.tokens
        for _, reason in verdict.rejected:
            metrics.rejected[reason.value] += 1
        for stream, flags in verdict.flagged:
            self._apply_flags(stream, flags)

    def adopted(self, stream: Stream, source: str, target: str) -> None:
        """Record a committed migration."""
        self._metrics.adoptions += 1
        if self._traces is not None:
            self._traces.adopted(stream, source, target)

    def lost(self, streams: Iterable[Stream], instance_id: str, reason: str) -> None:
        """Record streams that lost their instance."""
        for stream in streams:
            self._metrics.recoveries["lost"] += 1
            if self._traces is not None:
                self._traces.recovering(stream, instance_id, reason)

    def engine_died(self, instance_id: str) -> None:
        """Count an engine that died with streams of this front end."""
        self._metrics.engine_deaths += 1

    def failed(self, streams: Sequence[Stream], instance_id: str) -> None:
        """Record streams that their instance gave up."""
        for stream in streams:
            self._metrics.recoveries["failed"] += 1
            if self._traces is not None:
                self._traces.recovering(stream, instance_id, "failed")

    def returned(self, stream: Stream, instance_id: str) -> None:
        """Record a stream that leaves a draining instance for another one."""
        self._metrics.recoveries["handed_back"] += 1
        if self._traces is not None:
            self._traces.recovering(stream, instance_id, "returned")

    def missing(self, stream: Stream, instance_id: str) -> None:
        """Record a stream that its owner turned out not to have."""
        self._metrics.recoveries["missing"] += 1
        if self._traces is not None:
            self._traces.recovering(stream, instance_id, "missing")

    def aborted(self, stream: Stream) -> None:
        """Record a stream whose client disconnected, or that the API server ended (a stop string)."""
        self._record_end(stream, "aborted")

    def gave_up(self, stream: Stream, reason: str) -> None:
        """Record a stream that ended with an error."""
        self._record_end(stream, "error")

    def _apply_flags(self, stream: Stream, flags: int) -> None:
        now_s = time.monotonic()
        if flags & PREFILL_DONE:
            self._metrics.first_token_seconds.observe(now_s - stream.arrived_s)
            stream.first_token_s = now_s
            if stream.phase is Phase.ANSWERING:
                # It does not reason: this token is the first of the answer.
                self._metrics.ttft_seconds.observe(now_s - stream.arrived_s, exemplar_of(stream.traceparent))
                stream.first_answer_s = now_s
        elif flags & REASONING_ENDED:
            stream.reasoning_ended_s, stream.first_answer_index = now_s, stream.accepted
        if flags & ANSWER_BEGUN and stream.first_answer_s is None and stream.reasoning_ended_s is not None:
            stream.first_answer_s = now_s
            self._metrics.ttft_seconds.observe(now_s - stream.arrived_s, exemplar_of(stream.traceparent))
            self._metrics.ttfat_seconds.observe(now_s - stream.reasoning_ended_s)
        if self._traces is not None and flags & (PREFILL_DONE | REASONING_ENDED):
            self._traces.phase_changed(stream)
        if flags & FINISHED:
            if stream.first_token_s is not None and stream.accepted > 1:
                tpot_s = (now_s - stream.first_token_s) / (stream.accepted - 1)
                self._metrics.tpot_seconds.observe(tpot_s, exemplar_of(stream.traceparent))
            self._record_end(stream, "finished")

    def _record_end(self, stream: Stream, outcome: str) -> None:
        self._metrics.requests[outcome] += 1
        if self._traces is not None:
            self._traces.end(stream, outcome)


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that engines run and that wait, and the share of KV blocks in use, from 0 to 1."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0


def load_of(table: StreamTable, engines: Mapping[str, worker_pb2.EngineState]) -> Load:
    """Return the load of a front end with these streams, as the API server's vLLM metrics show it; `engines`:
    what instances said of theirs, by ID.

    Dashboards add up `vllm:num_requests_running` and `vllm:num_requests_waiting` over all API servers, so a
    front end shows its own requests: the sum is the fleet's. They average `vllm:kv_cache_usage_perc`, so it
    shows the mean of the instances that it uses.

    What they said is up to a heartbeat old, may be of streams that have ended since, and may be wrong.
    """
    at_engines = sum(min(table.count_owned(name), engine.waiting) for name, engine in engines.items())
    waiting = len(table) - table.placed + at_engines
    usages = [min(1.0, max(0.0, e.kv_usage)) for e in engines.values() if math.isfinite(e.kv_usage)]
    return Load(len(table) - waiting, waiting, round(sum(usages) / max(1, len(usages)), 4))
