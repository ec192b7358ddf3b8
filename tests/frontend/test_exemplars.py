"""Exemplars: from the TTFT and TPOT histograms to traces."""

from __future__ import annotations

import pytest
from prometheus_client import Histogram
from prometheus_client.exposition import choose_encoder

from frontend_svc.observer import exemplar_of
from tailrace.telemetry.metrics import new_registry

TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.mark.parametrize("traceparent", ["", "nonsense", f"00-{TRACE}-b7ad6b7169203331-00", "a-b-c-01"])
def test_a_request_without_a_trace_has_no_exemplar(traceparent: str) -> None:
    assert exemplar_of(traceparent) is None


@pytest.mark.asyncio
async def test_open_metrics_has_the_trace_beside_the_model() -> None:
    registry = new_registry("frontend", "f")
    registry.model = "tiny"
    seconds = Histogram("tailrace_frontend_ttft_seconds", "t", registry=registry)
    seconds.observe(0.3, exemplar_of(f"00-{TRACE}-b7ad6b7169203331-01"))
    encode, _ = choose_encoder("application/openmetrics-text; version=1.0.0")
    (line,) = (line for line in encode(registry).decode().splitlines() if TRACE in line)
    assert 'model="tiny"' in line and f'trace_id="{TRACE}"' in line
