"""A worker's report as it arrived: decoded for the monitor itself, and encoded to be passed on."""

from __future__ import annotations

from dataclasses import dataclass

from tailrace.v1 import monitor_pb2


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
