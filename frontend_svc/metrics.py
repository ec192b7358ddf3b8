"""What a front end counts. Hot counters are plain integers, read only when somebody scrapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from frontend_svc.streams import StreamTable
from tailrace.cluster import Phase

_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
# A placement takes a few milliseconds: by these its percentiles can be told.
_PLACEMENT_SECONDS: Final = (
    *(0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1, 2.5, 5, 10),
)
_TPOT_SECONDS: Final = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 5)


class FrontendMetrics(Collector):
    """Counters by plain attribute, histograms for what happens once a request."""

    def __init__(
        self, registry: CollectorRegistry, table: StreamTable, attached: Callable[[], list[str]]
    ) -> None:
        self.tokens = 0
        self.steps = 0
        self.requests: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.rejected: Counter[str] = Counter()
        self.recoveries: Counter[str] = Counter()
        self.placements: Counter[str] = Counter()
        self.adoptions = 0
        self.engine_deaths = 0
        self.placement_seconds = Histogram(
            "tailrace_frontend_placement_seconds",
            "From a request's arrival (or loss) to its submission to an instance.",
            registry=registry,
            buckets=_PLACEMENT_SECONDS,
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
        """The plain counters in Prometheus' form."""
        phases = Counter(stream.phase for stream in self._table)
        streams = GaugeMetricFamily("tailrace_frontend_streams", "Live streams.", labels=["phase"])
        for phase in Phase:
            streams.add_metric([phase.value], phases[phase])
        yield streams
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
        yield _labelled("requests", "Requests by how they ended.", "outcome", self.requests)
        yield _labelled("refused_requests", "Requests refused on arrival, by status.", "status", self.refused)
        yield _labelled("rejected_outputs", "Outputs not accepted, by cause.", "cause", self.rejected)
        yield _labelled("recoveries", "Streams that went on elsewhere, by cause.", "cause", self.recoveries)
        yield _labelled("placements", "Placements by who decided.", "by", self.placements)


def _labelled(name: str, text: str, label: str, counts: Counter[str]) -> CounterMetricFamily:
    family = CounterMetricFamily(f"tailrace_frontend_{name}", text, labels=[label])
    for value, count in counts.items():
        family.add_metric([value], count)
    return family
