"""Export the cluster's state to Prometheus; computed from the reports at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from monitor_svc.reports import LatestReports, missed_objectives
from monitor_svc.servicer import Feed, MonitorServicer
from monitor_svc.traces import TraceStore
from tailrace.slo import Slo
from tailrace.telemetry.metrics import counter_by, gauge_by
from tailrace.v1 import types_pb2

_PHASES: Final = {
    types_pb2.PHASE_PREFILL: "prefill",
    types_pb2.PHASE_REASONING: "reasoning",
    types_pb2.PHASE_ANSWERING: "answering",
}
_GONE: Final = "gone"


class MonitorGauges(Collector):
    """Per-instance and per-phase gauges, and counters of the monitor itself."""

    def __init__(
        self,
        reports: LatestReports,
        feed: Feed,
        servicer: MonitorServicer,
        traces: TraceStore,
        slo: Callable[[], Slo],
    ) -> None:
        """`slo()` returns the deployment's current SLOs."""
        self._reports = reports
        self._feed = feed
        self._servicer = servicer
        self._traces = traces
        self._slo = slo

    def collect(self) -> Iterable[Metric]:
        """Yield all families."""
        yield from self._monitor_metrics()
        yield from self._instances()
        yield self._phases()
        yield self._missed_slos()

    def _monitor_metrics(self) -> Iterable[Metric]:
        reports, traces = self._reports, self._traces
        yield _counter("reports", "Worker reports received.", self._servicer.reports_received)
        yield _counter("resnapshots", "Subscribers that fell behind.", self._feed.resnapshots)
        yield _counter("spans", "Spans received over OTLP.", traces.received)
        yield _counter("spans_dropped", "Spans that the trace store had no room for.", traces.dropped)
        yield _gauge("subscribers", "Open watches.", self._feed.subscribers)
        yield _gauge("instances", "Instances that have reported.", len(reports.instances))
        yield _gauge("silent_instances", "Instances that have stopped reporting.", len(reports.silent))
        yield _gauge("traces", "Traces held.", traces.traces)
        events = CounterMetricFamily(
            "tailrace_monitor_phase_events", "Phase transitions, by the phase entered.", labels=["phase"]
        )
        for phase, count in self._servicer.phase_events.items():
            events.add_metric([_PHASES.get(types_pb2.Phase.ValueType(phase), _GONE)], count)
        yield events

    def _instances(self) -> Iterable[Metric]:
        loads = [(name, known.steady.message.load) for name, known in self._reports.instances.items()]
        for make, described in ((gauge_by, _LOAD_GAUGES), (counter_by, _LOAD_COUNTERS)):
            for family, help_text, read in described:
                values = {name: float(getattr(load, read)) * _UNITS.get(read, 1.0) for name, load in loads}
                yield make(f"tailrace_monitor_instance_{family}", help_text, "instance", values)

    def _phases(self) -> Metric:
        metric = GaugeMetricFamily(
            "tailrace_monitor_instance_requests", "Requests held, by phase.", labels=["instance", "phase"]
        )
        for name, known in self._reports.instances.items():
            load = known.steady.message.load
            metric.add_metric([name, "prefill"], load.prefilling)
            metric.add_metric([name, "reasoning"], load.reasoning)
            metric.add_metric([name, "answering"], load.answering)
        return metric

    def _missed_slos(self) -> Metric:
        metric = GaugeMetricFamily(
            "tailrace_monitor_slo_trouble_requests",
            "Requests that currently miss a service-level objective.",
            labels=["instance", "slo"],
        )
        slo = self._slo()
        for name, known in self._reports.instances.items():
            report = known.steady.message
            missed = missed_objectives(report.requests, report.time_s, slo)
            metric.add_metric([name, "ttft"], missed.ttft)
            metric.add_metric([name, "tpot"], missed.tpot)
            metric.add_metric([name, "qoe"], missed.qoe)
        return metric


def _gauge(name: str, help_text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"tailrace_monitor_{name}", help_text, value=value)


def _counter(name: str, help_text: str, value: float) -> Metric:
    return CounterMetricFamily(f"tailrace_monitor_{name}", help_text, value=value)


_LOAD_GAUGES: Final = (
    ("running_requests", "Requests running.", "running"),
    ("waiting_requests", "Requests waiting.", "waiting"),
    ("paused_requests", "Requests paused for a migration's last round.", "paused"),
    ("kv_blocks_used", "KV blocks in use.", "kv_blocks_used"),
    ("kv_blocks", "KV blocks in total.", "kv_blocks_total"),
    ("host_kv_bytes_used", "KV in host memory.", "host_kv_bytes_used"),
    ("prefill_backlog_tokens", "Prompt tokens not yet prefilled.", "prefill_backlog_tokens"),
    ("context_tokens", "Tokens of all requests held.", "context_tokens"),
    ("token_interval_seconds", "Mean time between tokens of a request.", "token_interval_ms_mean"),
    ("token_interval_p99_seconds", "P99 of the time between tokens.", "token_interval_ms_p99"),
    ("migrations_in", "Migrations under way to it.", "migrations_in"),
    ("migrations_out", "Migrations under way from it.", "migrations_out"),
)
_LOAD_COUNTERS: Final = (
    ("steps", "Engine steps.", "steps"),
    ("generated_tokens", "Tokens made.", "generated_tokens"),
    ("preemptions", "Preemptions.", "preemptions"),
)
_UNITS: Final = {"token_interval_ms_mean": 1e-3, "token_interval_ms_p99": 1e-3}
