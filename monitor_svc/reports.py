"""The latest reports of every instance. Pure: callers pass the time in seconds of their monotonic clock."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from tailrace.slo import Slo
from tailrace.v1 import monitor_pb2, types_pb2

# Phase events held between two steady reports of one instance.
_EVENTS_MAX: Final = 4_096


@dataclass(slots=True)
class InstanceReports:
    """One instance's last steady report, and the latest phase event of each request since."""

    incarnation: str
    last_report_s: float
    steady: monitor_pb2.WorkerReport = field(default_factory=monitor_pb2.WorkerReport)
    events: dict[str, monitor_pb2.PhaseEvent] = field(default_factory=dict)

    def merged(self) -> monitor_pb2.WorkerReport:
        """Return the steady report with the events since, which is what a new subscriber needs."""
        report = monitor_pb2.WorkerReport()
        report.CopyFrom(self.steady)
        report.phase_events.extend(self.events.values())
        return report


class Reports:
    """The cluster's state as reported. `silent`: instances without a report for longer than
    `silence_timeout_s`."""

    def __init__(self, silence_timeout_s: float) -> None:
        self.instances: dict[str, InstanceReports] = {}
        self.silent: frozenset[str] = frozenset()
        self._silence_timeout_s = silence_timeout_s

    def apply(self, report: monitor_pb2.WorkerReport, now_s: float) -> None:
        """Apply a report."""
        known = self.instances.get(report.instance_id)
        if known is None or known.incarnation != report.incarnation:
            known = self.instances[report.instance_id] = InstanceReports(report.incarnation, now_s)
            known.steady.instance_id = report.instance_id
            known.steady.incarnation = report.incarnation
        known.last_report_s = now_s
        if report.HasField("load"):
            known.steady = report
            known.events.clear()
            return
        for event in report.phase_events:
            if len(known.events) < _EVENTS_MAX or event.request_id in known.events:
                known.events[event.request_id] = event

    def update_silent(self, now_s: float) -> bool:
        """Update the set of silent instances; return whether it changed."""
        silent = frozenset(
            name
            for name, known in self.instances.items()
            if now_s - known.last_report_s > self._silence_timeout_s
        )
        changed = silent != self.silent
        self.silent = silent
        return changed

    def extend_deadlines(self, seconds: float) -> None:
        """Allow more time: this process was suspended for `seconds` and could not receive reports."""
        for known in self.instances.values():
            known.last_report_s += seconds

    def forget(self, names: Iterable[str]) -> None:
        """Drop instances that have left the cluster."""
        for name in names:
            self.instances.pop(name, None)
        self.silent &= self.instances.keys()

    def snapshot(self) -> monitor_pb2.StateDelta:
        """Return the complete state."""
        return monitor_pb2.StateDelta(
            snapshot=True,
            reports=[known.merged() for known in self.instances.values()],
            silent_instance_ids=sorted(self.silent),
        )


def missed_objectives(request: monitor_pb2.RequestReport, now_s: float, slo: Slo) -> list[str]:
    """Return which of "ttft", "tpot" and "qoe" a request misses now.

    The first answering token is due as `Slo` defines. `now_s`: the worker's wall clock, as in its report.
    """
    missed: list[str] = []
    answers = request.output_tokens > request.reasoning_tokens
    if slo.ttft_s is not None and not (request.phase == types_pb2.PHASE_ANSWERING and answers):
        due_s = slo.ttft_s + (slo.tpot_s or 0.0) * request.reasoning_tokens
        if now_s - request.arrival_s > due_s:
            missed.append("ttft")
    if slo.tpot_s is not None and request.token_interval_ms > slo.tpot_s * 1e3:
        missed.append("tpot")
    if slo.qoe is not None and request.HasField("qoe") and request.qoe < slo.qoe:
        missed.append("qoe")
    return missed
