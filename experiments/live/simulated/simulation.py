"""Run a slice through the simulator."""

from __future__ import annotations

from collections import Counter

from experiments.live.simulated.figures import Spread
from experiments.live.simulated.outcome import Outcome
from experiments.live.simulated.shape import Delays, simulated_cluster_spec
from experiments.live.simulated.slices import Slice
from simulator.records import MigrationOutcome
from simulator.setups import setup_for
from simulator.simulation import simulate
from tailrace.handover import label
from tailrace.policy.registry import load


def has_pools(policy: str) -> bool:
    """Return whether the policy starts with a prefill and a decode pool."""
    return setup_for(policy).prefill_share is not None


def simulate_slice(trace_slice: Slice, policy: str, delays: Delays, seed: int) -> Outcome:
    """Simulate a slice with the policy's defaults, as in the live scheduler. `seed`: when reports are due.

    Raise SimulationError if that fails.
    """
    setup = setup_for(policy)
    spec = simulated_cluster_spec(trace_slice.shape, delays, setup.migration.when_full, has_pools(policy))
    result = simulate(spec, trace_slice.requests, load(policy), setup.intra(), seed=seed)
    done = [record for record in result.requests if record.finish_s is not None]
    committed = [m for m in result.migrations if m.outcome is MigrationOutcome.COMMITTED]
    return Outcome(
        requests=len(result.requests),
        finished=len(done),
        ttft=Spread.of(r.ttft_s for r in done if r.ttft_s is not None),
        tpot=Spread.of(r.tpot_s for r in done if r.tpot_s is not None and r.answer_tokens > 1),
        latency=Spread.of(r.latency_s for r in done if r.latency_s is not None),
        placed={r.request_id: r.placements[0].instance_id for r in result.requests if r.placements},
        migrations=dict(Counter(label(m.reason) for m in committed)),
        preemptions=sum(r.preemptions_swapped + r.preemptions_recomputed for r in done),
    )
