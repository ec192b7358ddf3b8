"""The requests of a period by their input and output lengths, for which stages are planned (section 4.2).

Requests that finished in the period give the output lengths; those that arrived in it give the numbers by
prompt length. Both are needed: if a stage is overloaded, fewer requests finish than arrive, and counting only
those would give it even fewer instances.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tailrace.lengths import LengthStatistics
from tailrace.perf.qoe_model import Floats
from tailrace.policy.cascade.workload import Ints, Workload, bucket_of


@dataclass(frozen=True, slots=True, eq=False)
class Traffic:
    """Requests; each row stands for `weights` of them."""

    inputs: Floats
    outputs: Floats
    weights: Floats
    # Seconds in which they arrived; None: unknown.
    seconds: float | None

    @property
    def requests(self) -> float:
        """Return the number of requests."""
        return float(self.weights.sum())

    @staticmethod
    def of_history(history: Sequence[tuple[int, int]], seconds: float | None) -> Traffic:
        """Create it from (input, output) lengths of earlier requests."""
        rows = np.array(history, dtype=np.float64).reshape(-1, 2)
        return Traffic(rows[:, 0], rows[:, 1], np.ones(len(rows)), seconds)

    @staticmethod
    def of_period(statistics: LengthStatistics, edges: Ints) -> Traffic | None:
        """Create it from a period; return None if no request arrived or no output length is known.

        In each bucket of prompt lengths, finished requests represent those that arrived. Prompts of a bucket
        in which none has finished count with the mean output of all.
        """
        prompts, prompt_weights = statistics.arrived()
        inputs, outputs, weights = statistics.finished()
        if not len(prompts) or float(weights @ outputs) <= 0.0:
            return None
        buckets = len(edges) - 1
        arrived_at, finished_at = bucket_of(edges, prompts), bucket_of(edges, inputs)
        arrived = np.bincount(arrived_at, weights=prompt_weights, minlength=buckets)
        finished = np.bincount(finished_at, weights=weights, minlength=buckets)
        share = np.divide(arrived, finished, out=np.zeros(buckets), where=finished > 0)
        without_finished = finished[arrived_at] == 0
        mean_output = float(weights @ outputs / weights.sum())
        traffic = Traffic(
            np.concatenate([inputs, prompts[without_finished]]).astype(np.float64),
            np.concatenate([outputs, np.full(int(without_finished.sum()), mean_output)]),
            np.concatenate([weights * share[finished_at], prompt_weights[without_finished]]),
            statistics.seconds,
        )
        return traffic if float(traffic.weights @ traffic.outputs) > 0.0 else None

    def in_flight(self, edges: Ints, requests: float) -> Workload:
        """Return the workload of `requests` concurrent requests. Raise ValueError without any output."""
        return Workload.of_history(edges, self.inputs, self.outputs, requests, self.weights)
