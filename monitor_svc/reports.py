"""The latest reports of every instance. Pure: callers pass the time in seconds of their monotonic clock."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from tailrace.request_columns import full
from tailrace.slo import Slo
from tailrace.v1 import monitor_pb2, types_pb2


@dataclass(frozen=True, slots=True)
class ReceivedReport:
    """A report and its encoding. Neither may be changed."""

    message: monitor_pb2.WorkerReport
    encoded: bytes

    @staticmethod
    def decode(encoded: bytes) -> ReceivedReport:
        """Decode a report. Raise google.protobuf.message.DecodeError."""
        return ReceivedReport(monitor_pb2.WorkerReport.FromString(encoded), encoded)

    @staticmethod
    def of(message: monitor_pb2.WorkerReport) -> ReceivedReport:
        """Return a report that was made here."""
        return ReceivedReport(message, message.SerializeToString())

    @property
    def steady(self) -> bool:
        """Return whether it contains the instance's whole state."""
        return self.message.HasField("load")

    def superseded(self) -> ReceivedReport | None:
        """Return what is still news of a steady report once there is a later one.

        That is its phase events and changes of the prefix cache. None: it has neither.
        """
        report = self.message
        if not report.phase_events and not report.HasField("cache"):
            return None
        news = monitor_pb2.WorkerReport(
            instance_id=report.instance_id,
            incarnation=report.incarnation,
            seq=report.seq,
            time_s=report.time_s,
            phase_events=report.phase_events,
        )
        if report.HasField("cache"):
            news.cache.CopyFrom(report.cache)
        return ReceivedReport.of(news)


# Phase events held between two steady reports of one instance.
_EVENTS_MAX: Final = 4_096


@dataclass(slots=True)
class InstanceReports:
    """One instance's last steady report, and the latest phase event of each request since."""

    incarnation: str
    last_report_s: float
    # Until there is one, a report that only names the instance.
    steady: ReceivedReport
    events: dict[str, monitor_pb2.PhaseEvent] = field(default_factory=dict)

    def merged(self) -> bytes:
        """Return the steady report with the events since, encoded, which is what a new subscriber needs.

        An encoded message that follows another adds its repeated fields to those of the other.
        """
        if not self.events:
            return self.steady.encoded
        events = monitor_pb2.WorkerReport(phase_events=self.events.values())
        return self.steady.encoded + events.SerializeToString()


class LatestReports:
    """The cluster's state as reported. `silent`: instances without a report for longer than
    `silence_timeout_s`."""

    def __init__(self, silence_timeout_s: float) -> None:
        self.instances: dict[str, InstanceReports] = {}
        self.silent: frozenset[str] = frozenset()
        self._silence_timeout_s = silence_timeout_s

    def apply(self, received: ReceivedReport, now_s: float) -> None:
        """Apply a report."""
        report = received.message
        known = self.instances.get(report.instance_id)
        if known is None or known.incarnation != report.incarnation:
            named = monitor_pb2.WorkerReport(instance_id=report.instance_id, incarnation=report.incarnation)
            known = InstanceReports(report.incarnation, now_s, ReceivedReport.of(named))
            self.instances[report.instance_id] = known
        known.last_report_s = now_s
        if received.steady:
            known.steady = received
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

    def snapshot(self) -> monitor_pb2.EncodedDelta:
        """Return the complete state."""
        return monitor_pb2.EncodedDelta(
            snapshot=True,
            reports=[known.merged() for known in self.instances.values()],
            silent_instance_ids=sorted(self.silent),
        )


@dataclass(slots=True)
class MissedObjectives:
    """How many requests miss each objective now."""

    ttft: int = 0
    tpot: int = 0
    qoe: int = 0


def missed_objectives(columns: monitor_pb2.RequestColumns, now_s: float, slo: Slo) -> MissedObjectives:
    """Count the requests that miss an objective now.

    The first answering token is due as `Slo` defines. `now_s`: the worker's wall clock, as in its report.
    """
    missed = MissedObjectives()
    count = len(columns.request_ids)
    if slo.ttft_s is not None:
        rows = zip(
            full(columns.phases, count, types_pb2.PHASE_UNSPECIFIED),
            full(columns.output_tokens, count, 0),
            full(columns.reasoning_tokens, count, 0),
            full(columns.arrival_s, count, 0.0),
            strict=True,
        )
        for phase, output_tokens, reasoning_tokens, arrival_s in rows:
            if phase != types_pb2.PHASE_ANSWERING or output_tokens <= reasoning_tokens:
                due_s = slo.ttft_s + (slo.tpot_s or 0.0) * reasoning_tokens
                missed.ttft += now_s - arrival_s > due_s
    if slo.tpot_s is not None:
        missed.tpot = sum(interval_ms > slo.tpot_s * 1e3 for interval_ms in columns.token_interval_ms[:])
    if slo.qoe is not None:
        # An absent value is NaN, which is not less than anything.
        missed.qoe = sum(qoe < slo.qoe for qoe in columns.qoe[:])
    return missed
