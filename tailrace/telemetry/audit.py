"""The audit log as OpenTelemetry log records, exported over OTLP gRPC when an endpoint for logs is set."""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING, Final

from tailrace.security.audit import AuditEntry
from tailrace.telemetry.tracing import OTLP_CHANNEL, resource_of

if TYPE_CHECKING:
    from opentelemetry.sdk._logs import LoggerProvider

LOGS_ENDPOINT: Final = "OTEL_EXPORTER_OTLP_LOGS_ENDPOINT"
"""Separate from the endpoint for spans, which may be a monitor and then accepts only spans."""

_NAME: Final = "tailrace.audit"


class AuditExport:
    """Send entries in the background; entries that cannot be delivered are dropped after a while."""

    def __init__(self, provider: LoggerProvider) -> None:
        self._provider = provider
        self._logger = provider.get_logger(_NAME)

    def write(self, entry: AuditEntry) -> None:
        """See tailrace.security.audit.AuditSink."""
        from opentelemetry._logs import LogRecord, SeverityNumber

        good = entry.outcome in ("OK", "begun")
        self._logger.emit(
            LogRecord(
                timestamp=time.time_ns(),
                severity_number=SeverityNumber.INFO if good else SeverityNumber.WARN,
                body=f"{entry.who or entry.peer}: {entry.what}: {entry.outcome}",
                event_name=_NAME,
                attributes={
                    "tailrace.audit.who": entry.who,
                    "tailrace.audit.peer": entry.peer,
                    "tailrace.audit.on_behalf_of": entry.on_behalf_of,
                    "tailrace.audit.what": entry.what,
                    "tailrace.audit.request": str(entry.request),
                    "tailrace.audit.outcome": entry.outcome,
                    "tailrace.audit.details": entry.details,
                    "tailrace.audit.seconds": entry.seconds,
                },
            )
        )

    async def close(self) -> None:
        """Send the queued entries; takes seconds at most."""
        await asyncio.to_thread(self._provider.shutdown)


def audit_export(service: str, instance: str) -> AuditExport | None:
    """Create an exporter; return None if no endpoint for logs is set."""
    if not os.environ.get(LOGS_ENDPOINT):
        return None
    # Imported here, so that processes without an exporter do not load the SDK.
    from opentelemetry.exporter.otlp.proto.grpc._log_exporter import OTLPLogExporter
    from opentelemetry.sdk._logs import LoggerProvider
    from opentelemetry.sdk._logs.export import BatchLogRecordProcessor

    provider = LoggerProvider(resource=resource_of(service, instance), shutdown_on_exit=False)
    exporter = OTLPLogExporter(channel_options=OTLP_CHANNEL)
    provider.add_log_record_processor(BatchLogRecordProcessor(exporter, schedule_delay_millis=500))
    return AuditExport(provider)
