"""Metrics of kept answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from frontend_svc.answers.store import AnswerStore
from tailrace.telemetry.metrics import counter_by, gauge_by

if TYPE_CHECKING:
    from frontend_svc.answers.replication import Replication

_SECONDS: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2)
_STATUSES: Final = ("400", "404", "409", "410", "413", "422", "503")


class AnswerMetrics(Collector):
    """Count in plain attributes; read the store's state when collected."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.begun = Counter({"new": 0, "here": 0, "claimed": 0})
        self.denied = Counter(dict.fromkeys(_STATUSES, 0))
        self.handed_over = 0
        self.superseded = 0
        copy_seconds = Histogram(
            "tailrace_frontend_answer_copy_seconds",
            "Time of each call that copies answers to a second front end; tokens wait for it.",
            registry=registry,
            buckets=_SECONDS,
        )
        self.copied = copy_seconds.observe
        self._store: AnswerStore | None = None
        self._peers: Callable[[], int] = lambda: 0
        self._copies: Replication | None = None
        registry.register(self)

    def watch(self, store: AnswerStore, peers: Callable[[], int], copies: Replication) -> None:
        """Set what is exported besides the counters.

        `peers()` returns how many front ends can hold copies.
        """
        self._store, self._peers, self._copies = store, peers, copies

    def collect(self) -> Iterable[Metric]:
        answers = list(self._store or ())
        served = sum(answer.served_here for answer in answers)
        kept = {"served": served, "copy": len(answers) - served}
        yield gauge_by("tailrace_frontend_answers", "Kept answers.", "kind", kept)
        yield GaugeMetricFamily(
            "tailrace_frontend_answer_bytes",
            "Approximate memory used by kept answers.",
            value=0 if self._store is None else self._store.size,
        )
        yield counter_by(
            "tailrace_frontend_answer_runs", "Runs begun, by where the answer was.", "from", self.begun
        )
        yield counter_by(
            "tailrace_frontend_answer_denials",
            "Requests not resumed or kept, by status.",
            "status",
            self.denied,
        )
        yield CounterMetricFamily(
            "tailrace_frontend_answers_handed_over",
            "Answers that continued at another front end.",
            value=self.handed_over,
        )
        yield CounterMetricFamily(
            "tailrace_frontend_answers_superseded",
            "Runs that ended here because another front end took over the answer.",
            value=self.superseded,
        )
        yield GaugeMetricFamily(
            "tailrace_frontend_answer_peers",
            "Front ends that can hold copies; at 0, answers are kept only here.",
            value=self._peers(),
        )
        yield CounterMetricFamily(
            "tailrace_frontend_answer_peers_lost",
            "How often a front end stopped responding while it held copies.",
            value=0 if self._copies is None else self._copies.peers_lost,
        )
        yield GaugeMetricFamily(
            "tailrace_frontend_answers_uncopied",
            "Answers in progress for which no second front end has everything that their clients have.",
            value=0 if self._copies is None else self._copies.count_unprotected(),
        )
