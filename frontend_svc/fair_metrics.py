"""Metrics of requests that wait for their tenant's turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from frontend_svc.fair_gate import FairGate

# Tenants with a time series of their own; any that waits later is counted among the others for the life of
# the process, because each series costs Prometheus memory whether or not its value changes.
MAX_TENANTS: Final = 50
OTHERS: Final = "(others)"


class FairMetrics(Collector):
    """Export the state of the fair gate to Prometheus."""

    def __init__(self, registry: CollectorRegistry, gate: FairGate) -> None:
        self._gate = gate
        self._named: set[str] = set()
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """Yield the current values."""
        gate = self._gate
        waiting = GaugeMetricFamily(
            "tailrace_frontend_fair_waiting", "Requests that wait for their tenant's turn.", labels=["tenant"]
        )
        for name, count in self._by_name(gate.waiting()).items():
            waiting.add_metric([name], count)
        yield waiting
        yield GaugeMetricFamily(
            "tailrace_frontend_fair_backlog_tokens",
            "Tokens of admitted prompts without a first token.",
            value=gate.backlog_tokens,
        )
        yield GaugeMetricFamily(
            "tailrace_frontend_fair_backlog_limit_tokens",
            "Value of the above from which requests wait.",
            value=gate.limit_tokens,
        )
        refused = CounterMetricFamily(
            "tailrace_frontend_fair_refused", "Requests whose turn did not come.", labels=["reason"]
        )
        for reason, count in gate.refused.items():
            refused.add_metric([reason], count)
        yield refused

    def _by_name(self, waiting: dict[str, int]) -> Counter[str]:
        counts: Counter[str] = Counter(dict.fromkeys(self._named, 0))
        for tenant, count in waiting.items():
            if tenant not in self._named and len(self._named) < MAX_TENANTS:
                self._named.add(tenant)
            counts[tenant if tenant in self._named else OTHERS] += count
        return counts
