"""What every instance last said. Pure: the caller brings the time, in seconds of its monotonic clock."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from tailrace.slo import Slo
from tailrace.v1 import monitor_pb2, types_pb2

# Phase events held between two steady reports of one instance.
_EVENTS_MAX: Final = 4_096


@dataclass(slots=True)
class Known:
    """One instance: its last steady report, and the latest phase event of each request since."""

    incarnation: str
    heard_s: float
    steady: monitor_pb2.WorkerReport = field(default_factory=monitor_pb2.WorkerReport)
    events: dict[str, monitor_pb2.PhaseEvent] = field(default_factory=dict)

    def merged(self) -> monitor_pb2.WorkerReport:
        """The steady report with the events since: what a new subscriber has to know."""
        report = monitor_pb2.WorkerReport()
        report.CopyFrom(self.steady)
        report.phase_events.extend(self.events.values())
        return report


class Reports:
    """The cluster's state as reported. `silent` are instances not heard of for longer than `patience_s`."""

    def __init__(self, patience_s: float) -> None:
        self.known: dict[str, Known] = {}
        self.silent: frozenset[str] = frozenset()
        self._patience_s = patience_s

    def apply(self, report: monitor_pb2.WorkerReport, now_s: float) -> None:
        """Take one report in."""
        known = self.known.get(report.instance_id)
        if known is None or known.incarnation != report.incarnation:
            known = self.known[report.instance_id] = Known(report.incarnation, now_s)
            known.steady.instance_id = report.instance_id
            known.steady.incarnation = report.incarnation
        known.heard_s = now_s
        if report.HasField("load"):
            known.steady = report
            known.events.clear()
            return
        for event in report.phase_events:
            if len(known.events) < _EVENTS_MAX or event.request_id in known.events:
                known.events[event.request_id] = event

    def look(self, now_s: float) -> bool:
        """Work out who is silent; whether that has changed."""
        silent = frozenset(
            name for name, known in self.known.items() if now_s - known.heard_s > self._patience_s
        )
        changed = silent != self.silent
        self.silent = silent
        return changed

    def extend_deadlines(self, seconds: float) -> None:
        """This process itself stood still for so long: nobody is to blame for not being heard meanwhile."""
        for known in self.known.values():
            known.heard_s += seconds

    def forget(self, names: Iterable[str]) -> None:
        """Drop instances that have left the cluster."""
        for name in names:
            self.known.pop(name, None)
        self.silent &= self.known.keys()

    def snapshot(self) -> monitor_pb2.StateDelta:
        """Everything known."""
        return monitor_pb2.StateDelta(
            snapshot=True,
            reports=[known.merged() for known in self.known.values()],
            silent_instance_ids=sorted(self.silent),
        )


def missed_objectives(request: monitor_pb2.RequestReport, now_s: float, slo: Slo) -> list[str]:
    """Which of "ttft", "tpot" and "qoe" a request now misses.

    The first answering token is due as `Slo` says. `now_s`: wall clock of the worker, as in its report.
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
