"""PASCAL's token pacer at fixed admission: what readers see of the very same run with it and without it.

The pacer only delays what is shown (`frontend_svc/pacing.py`), so arrivals, batches and token times are those
of one run; QoE is that of its reader in either case. On the cluster of the claims, AlpacaEval2.0, after the
warm-up.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from experiments.claims.pascal.cluster import ARMS, INSTANCES, cluster
from experiments.claims.pascal.measure import WARM_UP
from experiments.claims.pascal.results import ALPACA, HIGH, LOADS
from experiments.claims.saturation import poisson_at_load
from simulator.cluster import ClusterSpec
from simulator.estimate import estimate
from simulator.job import Job
from simulator.parallel import Task, run_tasks
from simulator.request import SimRequest
from simulator.simulation import Simulation
from simulator.steplog import TokenTimes
from simulator.workloads.generators import GENERATORS
from tailrace.intra.base import IntraPolicy
from tailrace.policy.base import Policy
from tests.harness.report import save

SCHEDULERS: Final = ("fcfs", "rr", "pascal")
_FIGURES: Final = ("gap_p99_s", "paced_gap_p99_s", "stalled", "paced_stalled", "later_p50_s", "later_p99_s")
# A gap that readers notice, as a multiple of their pace.
_STALL: Final = 2.0

Floats = NDArray[np.float64]


class _Timed(Simulation):
    """A simulation that keeps the times of answering tokens."""

    def __init__(
        self, spec: ClusterSpec, requests: Sequence[SimRequest], policy: Policy, intra: IntraPolicy, seed: int
    ) -> None:
        self.answers: dict[str, Floats] = {}
        super().__init__(spec, requests, policy, intra, seed=seed, sample_interval_s=None)

    def _complete(self, job: Job) -> None:
        if job.finish_s is not None and job.request.answer_tokens > 1:
            times = TokenTimes()
            job.copy_times(job.request.reasoning_tokens, times)
            self.answers[job.request.request_id] = times.all_s()
        super()._complete(job)


def shown_s(ready_s: Floats, pace_s: float) -> Floats:
    """Return when the pacer shows tokens that are ready at these times: d(k) = max(g(k), d(k-1) + pace)."""
    steps = pace_s * np.arange(len(ready_s))
    return np.asarray(np.maximum.accumulate(ready_s - steps) + steps, np.float64)


def measure(arm: str, load: float, count: int, seed: int) -> dict[str, float]:
    """Return the longest gap of an answer (P99 over answers), the share of answers with a stall, and how much
    later than without the pacer the last token is shown; times in seconds."""
    chosen = ARMS[arm]
    spec = cluster(chosen)
    profile = spec.instances[0].profile
    requests = poisson_at_load(ALPACA, GENERATORS[ALPACA].lengths, count, load, seed, profile, INSTANCES)
    simulation = _Timed(spec, requests, chosen.policy(), chosen.intra(), seed)
    simulation.run(None)
    pace_s = spec.tpot_target_s
    answers = [
        simulation.answers[r.request_id]
        for r in requests[int(WARM_UP * count) :]
        if r.request_id in simulation.answers
    ]
    paced = [shown_s(ready, pace_s) for ready in answers]
    gaps, paced_gaps = (np.array([np.diff(each).max() for each in one]) for one in (answers, paced))
    later = np.array([after[-1] - before[-1] for before, after in zip(answers, paced, strict=True)])
    stall_s = _STALL * pace_s
    return {
        "gap_p99_s": float(np.percentile(gaps, 99)),
        "paced_gap_p99_s": float(np.percentile(paced_gaps, 99)),
        "stalled": float((gaps > stall_s).mean()),
        "paced_stalled": float((paced_gaps > stall_s).mean()),
        "later_p50_s": float(np.median(later)),
        "later_p99_s": float(np.percentile(later, 99)),
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m experiments.pascal_pacer", description=__doc__)
    parser.add_argument("--load", type=float, default=LOADS[HIGH], help="of the saturation rate")
    parser.add_argument("--count", type=int, default=4_000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int)
    options = parser.parse_args()
    seeds = range(1, options.seeds + 1)
    found = run_tasks(
        [
            Task(f"{arm}/{seed}", measure, (arm, options.load, options.count, seed))
            for arm in SCHEDULERS
            for seed in seeds
        ],
        processes=options.processes,
    )
    table = Table()
    for heading in ("scheduler", *_FIGURES):
        table.add_column(heading)
    for arm in SCHEDULERS:
        of = [estimate([found[f"{arm}/{seed}"][name] for seed in seeds]) for name in _FIGURES]
        table.add_row(arm, *(f"{e.mean:.3g} ± {e.half_width or 0.0:.2g}" for e in of))
    console = Console(width=140)
    console.print(table)
    console.print(f"figures: {save('pascal_pacer', {name: dict(run) for name, run in found.items()})}")


if __name__ == "__main__":
    main()
