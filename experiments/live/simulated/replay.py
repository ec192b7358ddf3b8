"""Replay a slice on the live fleet."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from experiments.live.simulated.figures import Counts, Spread
from experiments.live.simulated.fleet import LiveFleet
from experiments.live.simulated.monitor import MonitorSubscriber, subscribed_to
from experiments.live.simulated.outcome import Machine, Outcome, Placements
from experiments.live.simulated.shape import Delays
from simulator.request import SimRequest
from tailrace.v1 import migration_pb2, types_pb2
from tests.harness.engine_core_load import Stream
from tests.harness.usage import cpu_seconds

# Seconds that the last request may take after the last arrival, at full speed.
_PATIENCE_S: Final = 36.0
# Phase changes are collected for this long before they are reported (worker_agent/reports.py).
_BATCH_S: Final = 0.005
_SCRAPED: Final = ("scheduler", "frontend", "worker", "migration")


@dataclass(frozen=True, slots=True)
class LiveRun:
    """Results of one slice under one policy."""

    outcome: Outcome
    # Incomplete requests, and a description of the first.
    lost: int
    lost_why: str
    tokens: int
    machine: Machine
    placements: Placements
    delays: Delays
    migrations_aborted: int
    wall_s: float


async def replay(
    fleet: LiveFleet, policy: str, requests: Sequence[SimRequest], on_progress: Callable[[int], None]
) -> LiveRun:
    """Replay requests under the current policy, and collect the results."""
    prefix = f"{policy}-"
    began_s = time.time()
    async with subscribed_to(fleet.monitor) as subscriber:
        before = {part: Counts.of(await fleet.scrape(part)) for part in _SCRAPED}
        cpu = _cpu(fleet)
        started_s = time.monotonic()
        patience_s = _PATIENCE_S / fleet.shape.speed
        streams = await fleet.load.replay(prefix, requests, patience_s, on_progress)
        wall_s = time.monotonic() - started_s
        busy = {part: (seconds - cpu[part]) / wall_s for part, seconds in _cpu(fleet).items()}
        counts = {part: Counts.of(await fleet.scrape(part)).since(before[part]) for part in _SCRAPED}
    migrations = await fleet.migrations_since(began_s)
    incomplete = [stream for stream in streams if not stream.complete]
    return LiveRun(
        outcome=_outcome(streams, subscriber, prefix, counts),
        lost=len(incomplete),
        lost_why=_describe(incomplete[0]) if incomplete else "",
        tokens=sum(stream.tokens for stream in streams),
        machine=_machine(fleet, streams, counts["worker"], busy),
        placements=_placements(counts),
        delays=_delays(subscriber, migrations),
        migrations_aborted=round(
            counts["migration"].total("tailrace_migration_migrations_total", outcome="aborted")
        ),
        wall_s=wall_s,
    )


def _cpu(fleet: LiveFleet) -> dict[str, float]:
    used = {part: cpu_seconds(pids) for part, pids in fleet.pids.items()}
    return {**used, "load": cpu_seconds([os.getpid()])}


def _describe(stream: Stream) -> str:
    return (
        f"{stream.request.request_id}: {stream.tokens} of {stream.request.output_tokens} tokens, "
        f"finish reason {stream.finish_reason}, {stream.outputs_after_end} outputs after the end"
    )


def _outcome(
    streams: Sequence[Stream], subscriber: MonitorSubscriber, prefix: str, counts: Mapping[str, Counts]
) -> Outcome:
    done = [stream for stream in streams if stream.finish_s is not None]
    migrated = counts["migration"].by("tailrace_migration_migrations_total", "reason", outcome="committed")
    return Outcome(
        requests=len(streams),
        finished=len(done),
        ttft=Spread.of(s.ttft_s for s in done if s.ttft_s is not None),
        tpot=Spread.of(s.tpot_s for s in done if s.tpot_s is not None and s.request.answer_tokens > 1),
        latency=Spread.of(s.latency_s for s in done if s.latency_s is not None),
        placed={
            request_id.removeprefix(prefix): instance
            for request_id, instance in subscriber.first_seen.items()
            if request_id.startswith(prefix)
        },
        migrations={reason: round(count) for reason, count in migrated.items()},
        preemptions=round(counts["worker"].total("tailrace_worker_preemptions_total")),
    )


def _machine(
    fleet: LiveFleet, streams: Sequence[Stream], worker: Counts, busy: Mapping[str, float]
) -> Machine:
    late = [stream.sent_s - stream.request.arrival_s for stream in streams]
    name = "tailrace_worker_step_late_seconds"
    return Machine(
        step_late_p50_s=worker.percentile(name, 0.5),
        step_late_p99_s=worker.percentile(name, 0.99),
        arrival_late_p99_s=float(np.percentile(late, 99)),
        step_s=fleet.shape.slowed.step_ms(0.0, 1, 0) / 1e3,
        busy=busy,
    )


def _placements(counts: Mapping[str, Counts]) -> Placements:
    added, decided = "tailrace_frontend_placement_seconds", "tailrace_scheduler_decision_seconds"
    frontend, scheduler = counts["frontend"], counts["scheduler"]
    return Placements(
        added_p50_s=frontend.percentile(added, 0.5),
        added_p99_s=frontend.percentile(added, 0.99),
        decided_p50_s=scheduler.percentile(decided, 0.5, point="place"),
        decided_p99_s=scheduler.percentile(decided, 0.99, point="place"),
    )


def _delays(subscriber: MonitorSubscriber, migrations: Sequence[migration_pb2.MigrationRecord]) -> Delays:
    """Return median delays, zero if there was no migration."""
    committed = [m for m in migrations if m.state == types_pb2.MIGRATION_STATE_COMMITTED]
    pauses = [m.pause_ms / 1e3 for m in committed]
    opening = [max(0.0, m.closed_s - m.opened_s - (m.pause_ms + m.step_wait_ms) / 1e3) for m in committed]
    return Delays(
        report_s=_BATCH_S + (float(np.median(subscriber.delays_s)) if subscriber.delays_s else 0.0),
        open_s=float(np.median(opening)) if opening else 0.0,
        commit_s=float(np.median(pauses)) if pauses else 0.0,
    )
