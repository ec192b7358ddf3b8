"""A worker's metrics. The data path only increments plain integers, which are read at each scrape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client import Counter as Counters
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tailrace.actions import PULL_OUTCOMES
from tailrace.cluster import Phase
from tailrace.telemetry.metrics import counter_by, gauge_by
from worker_agent.engine.base import EngineStats

_PAUSE_BUCKETS_S: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
_LATE_BUCKETS_S: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)
# PASCAL's SLO is a QoE of 0.95 (section III).
_QOE_BUCKETS: Final = (0.5, 0.8, 0.9, 0.95, 0.99, 0.999)


class WorkerHistograms:
    """The histograms that all workers of a process share."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.pause_seconds = Histogram(
            "tailrace_worker_migration_pause_seconds",
            "From the pause request to the source until the target may emit tokens.",
            registry=registry,
            buckets=_PAUSE_BUCKETS_S,
        )
        self.qoe = Histogram(
            "tailrace_worker_qoe",
            "QoE of answers that ended here, at the target pace; 1 is perfect.",
            registry=registry,
            buckets=_QOE_BUCKETS,
        )
        self.step_late_seconds = Histogram(
            "tailrace_worker_step_late_seconds",
            "Delay of simulated engine steps, caused by a busy machine.",
            registry=registry,
            buckets=_LATE_BUCKETS_S,
        )
        self.kv_strays = Counters(
            "tailrace_worker_kv_stray_messages",
            "Unexpected KV messages, dropped: late ones, or from a sender without a ticket.",
            registry=registry,
        )


class WorkerMetrics:
    """The counters of one worker."""

    def __init__(self, histograms: WorkerHistograms) -> None:
        # Whether the batch order asked for is not used, since it did not return.
        self.order_hangs: Callable[[], bool] = lambda: False
        self.tokens = 0
        self.submitted = 0
        self.rejected_busy = 0
        self.finished = _from_zero("finished", "failed", "aborted", "moved")
        # By outcome.
        self.imports = _from_zero("committed", "aborted")
        self.exports = _from_zero("committed", "aborted")
        # Requests offered to other workers, by outcome.
        self.offers = _from_zero("taken", "kept")
        self.kv_sent_bytes = 0
        self.kv_sent_blocks = 0
        self.kv_received_bytes = 0
        self.kv_received_blocks = 0
        self.kv_held_blocks = 0
        # Pulls of prefixes from other workers, by outcome (prefixes.py), and the tokens pulled.
        self.pulls = _from_zero(*PULL_OUTCOMES)
        self.pulled_tokens = 0
        # Copies of prefixes to this worker in advance, by outcome (prefixes.py).
        self.copies = _from_zero(*PULL_OUTCOMES)
        self.kv_checksum_failures = 0
        self.kv_identity_failures = 0
        self.kv_transfer_failures = 0
        self.pause_seconds = histograms.pause_seconds
        self.qoe = histograms.qoe


class WorkerCollector(Collector):
    """Export the sums over all workers of this process, which is the scrape target."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._workers: list[tuple[WorkerMetrics, Callable[[], EngineStats]]] = []
        registry.register(self)

    def add(self, metrics: WorkerMetrics, stats: Callable[[], EngineStats]) -> None:
        """Add a worker."""
        self._workers.append((metrics, stats))

    def collect(self) -> Iterable[Metric]:
        yield from self._engine()
        workers = [metrics for metrics, _ in self._workers]
        yield _count("submitted_requests", "Requests submitted.", sum(w.submitted for w in workers))
        yield _count(
            "turned_away_requests",
            "Requests turned away: too many were here, or an operator drained the instance.",
            sum(w.rejected_busy for w in workers),
        )
        yield _labelled("ended_requests", "Requests that left, by how.", (w.finished for w in workers))
        yield _labelled("imports", "Migrations to here, by outcome.", (w.imports for w in workers))
        yield _labelled("offers", "Requests offered by bid-ask, by outcome.", (w.offers for w in workers))
        yield _labelled("exports", "Migrations from here, by outcome.", (w.exports for w in workers))
        yield _labelled("pulls", "Prefixes to be fetched, by how it ended.", (w.pulls for w in workers))
        copies = (w.copies for w in workers)
        yield _labelled("prefix_copies", "Prefixes to be copied ahead of need, by how it ended.", copies)
        for name, text in _TRANSFER:
            yield _count(name, text, sum(getattr(w, name) for w in workers))

    def _engine(self) -> Iterable[Metric]:
        stats = [read() for _, read in self._workers]
        phases = Counter(request.phase for engine_stats in stats for request in engine_stats.requests)
        states = Counter(request.state for engine_stats in stats for request in engine_stats.requests)
        by_phase = {phase.value: phases[phase] for phase in Phase}
        yield gauge_by("tailrace_worker_requests", "Requests here.", "phase", by_phase)
        by_state = {state: states[state] for state in ("waiting", "running", "paused", "preempted")}
        yield gauge_by("tailrace_worker_request_states", "Requests here.", "state", by_state)
        used, total = sum(s.kv_blocks_used for s in stats), sum(s.kv_blocks_total for s in stats)
        yield GaugeMetricFamily("tailrace_worker_kv_blocks_used", "KV blocks in use.", value=used)
        yield GaugeMetricFamily("tailrace_worker_kv_blocks", "KV blocks in total.", value=total)
        yield _count("generated_tokens", "Tokens made.", sum(s.generated_tokens for s in stats))
        yield _count(
            "prompt_tokens", "Prompt tokens prefilled or found.", sum(s.prompt_tokens for s in stats)
        )
        yield _count(
            "cached_prompt_tokens",
            "Prompt tokens found in the prefix cache.",
            sum(s.cached_prompt_tokens for s in stats),
        )
        for name, text in _HOST_CACHE:
            yield _count(name, text, sum(getattr(s, name) for s in stats))
        cached = sum(s.host_cached_bytes for s in stats)
        yield GaugeMetricFamily(
            "tailrace_worker_host_cached_bytes", "Evicted KV in host memory.", value=cached
        )
        yield _count("steps", "Engine steps.", sum(s.steps for s in stats))
        yield _count(
            "kept_back_steps",
            "Engine steps beside which prompts waited, for others to keep the TPOT SLO.",
            sum(s.kept_back_steps for s in stats),
        )
        yield _count("preemptions", "Requests preempted.", sum(s.preemptions for s in stats))
        yield GaugeMetricFamily(
            "tailrace_worker_batch_order_suspended",
            "Workers whose batch order has made a mistake.",
            value=sum(
                metrics.order_hangs() or bool(one.order_mistake)
                for (metrics, _), one in zip(self._workers, stats, strict=True)
            ),
        )
        used, total = sum(s.host_kv_bytes_used for s in stats), sum(s.host_kv_bytes_total for s in stats)
        yield GaugeMetricFamily(
            "tailrace_worker_host_kv_bytes_used", "Host memory with requests' KV.", value=used
        )
        yield GaugeMetricFamily("tailrace_worker_host_kv_bytes", "Host memory for KV.", value=total)
        for name, text in _SWAPS:
            yield _count(name, text, sum(getattr(s, name) for s in stats))


_SWAPS: Final = (
    ("swaps_out", "Preempted requests whose KV went to host memory."),
    ("swaps_in", "Requests whose KV came back from host memory."),
    ("swaps_refused", "Preempted requests for whose KV host memory had no room."),
    ("host_kv_corrupt_blocks", "Blocks of host memory that were not what they ought to be."),
)

_HOST_CACHE: Final = (
    (
        "host_cached_prompt_tokens",
        "Prompt tokens found in host memory, which cached_prompt_tokens counts too.",
    ),
    (
        "host_blocks_stored",
        "Blocks of the prefix cache that went to host memory when the device evicted them.",
    ),
    ("host_blocks_loaded", "Blocks that came back to the device."),
    ("host_blocks_dropped", "Blocks that host memory gave up for others, or for requests."),
)

_TRANSFER: Final = (
    ("kv_sent_bytes", "KV bytes sent to other workers."),
    ("kv_sent_blocks", "KV blocks sent to other workers."),
    ("kv_received_bytes", "KV bytes received from other workers."),
    ("kv_received_blocks", "KV blocks received from other workers."),
    ("kv_held_blocks", "KV blocks of migrations to here that were not copied: the prefix cache held them."),
    ("pulled_tokens", "Tokens of prompts whose KV was fetched from other workers."),
    ("kv_checksum_failures", "Transfers in which a block's checksum was wrong."),
    ("kv_identity_failures", "Transfers of blocks other than those asked for."),
    ("kv_transfer_failures", "Transfers that broke or took too long."),
)


def _from_zero(*outcomes: str) -> Counter[str]:
    """Return a counter that exports these outcomes from the start: of a series that appears with its first
    event, `increase()` misses that event."""
    return Counter(dict.fromkeys(outcomes, 0))


def _count(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"tailrace_worker_{name}", text, value=value)


def _labelled(name: str, text: str, counts: Iterable[Counter[str]]) -> Metric:
    total: Counter[str] = Counter()
    for one in counts:
        # Unlike a sum of counters, this keeps zeros.
        total.update(one)
    return counter_by(f"tailrace_worker_{name}", text, "outcome", total)
