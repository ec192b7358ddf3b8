"""Migration loses and doubles no token, whatever else goes on, and leaves nothing behind."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.cluster import ClusterSpec, LinkSpec, MigrationSpec, ReportSpec
from simulator.events import NEVER
from simulator.instance import Instance
from simulator.records import MigrationOutcome, SimResult
from simulator.request import SimRequest
from tailrace.actions import Action, Migrate, Place, Placement, WhenFull
from tailrace.cluster import Arrival, ClusterView, RequestView, Stage
from tailrace.intra.pascal import PascalQueue
from tailrace.policy.base import Policy
from tests.simulator.moving import Stirring
from tests.simulator.worlds import INTRA, PROFILE, Watched, assert_empty, recount, workloads


def _spec(kv_tokens: int, when_full: WhenFull, bytes_per_s: float, interval_s: float) -> ClusterSpec:
    spec = ClusterSpec.uniform(
        3,
        PROFILE,
        kv_capacity_tokens=kv_tokens,
        block_tokens=8,
        host_kv_bytes=400 * PROFILE.kv_bytes_per_token,
        max_num_seqs=6,
        chunk_budget_tokens=64,
    )
    return replace(
        spec,
        link=LinkSpec(bytes_per_s=bytes_per_s, latency_s=0.00037),
        # Irrational: two instances that hand each other requests do not come to step in time, where rounding
        # would decide what is first.
        migration=MigrationSpec(
            when_full=when_full, limit=2, patience_s=0.5, open_s=math.pi / 1e3, commit_s=math.sqrt(2) / 1e3
        ),
        report=ReportSpec(interval_s=interval_s, delay_s=0.0021),
        stages=(Stage(0, 60, ("i000",)), Stage(60, 140, ("i001",)), Stage(140, 1 << 20, ("i002",))),
    )


def _run(spec: ClusterSpec, requests: list[SimRequest], intra: str, most: int) -> tuple[Watched, SimResult]:
    simulation = Watched(spec, requests, Stirring(), INTRA[intra], most)
    return simulation, simulation.run(None)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    requests=workloads(most=10, span_s=1.0),
    intra=st.sampled_from(sorted(INTRA)),
    kv_tokens=st.sampled_from([330, 900]),
    when_full=st.sampled_from(list(WhenFull)),
    room_last=st.booleans(),
    bytes_per_s=st.sampled_from([1e8, 1e10]),
    interval_s=st.sampled_from([0.0, 0.0517]),
)
def test_jumping_equals_stepping_and_every_token_is_made_once(
    intra: str,
    requests: list[SimRequest],
    kv_tokens: int,
    when_full: WhenFull,
    room_last: bool,
    bytes_per_s: float,
    interval_s: float,
) -> None:
    spec = _spec(kv_tokens, when_full, bytes_per_s, interval_s)
    spec = replace(spec, migration=replace(spec.migration, room_last=room_last))
    with pytest.MonkeyPatch.context() as patch:
        begin = Instance._plan_run

        def checked(instance: Instance, now: float) -> None:
            begin(instance, now)
            recount(instance)

        patch.setattr(Instance, "_plan_run", checked)
        jumping, result = _run(spec, requests, intra, NEVER)
        stepping, expected = _run(spec, requests, intra, 1)
    for record, other in zip(result.requests, expected.requests, strict=True):
        times = jumping.token_times[record.request_id]
        assert len(times) == record.output_tokens
        assert (np.diff(times) > 0).all()
        np.testing.assert_allclose(times, stepping.token_times[record.request_id], rtol=0, atol=1e-9)
        assert [p.instance_id for p in record.placements] == [p.instance_id for p in other.placements]
        assert record.pause_s == pytest.approx(other.pause_s, abs=1e-9)
        assert len(record.placements) == record.migrations + 1
    outcomes = [(m.request_id, m.outcome, m.rounds, m.bytes_sent) for m in result.migrations]
    assert outcomes == [(m.request_id, m.outcome, m.rounds, m.bytes_sent) for m in expected.migrations]
    committed = sum(m.outcome is MigrationOutcome.COMMITTED for m in result.migrations)
    assert committed == sum(record.migrations for record in result.requests)
    for instance in jumping.instances:
        assert_empty(instance)


class Once(Policy):
    """Places on the first instance, moves to the second when prefill is done."""

    def place(self, view: ClusterView, arrival: Arrival, now: float) -> Placement:
        return Place("i000")

    def on_prefill_done(self, view: ClusterView, request: RequestView, now: float) -> list[Action]:
        return [Migrate(request.request_id, request.instance_id, "i001", "test")]


def test_source_decodes_on_while_full_blocks_are_copied_and_pauses_for_the_rest() -> None:
    spec = _spec(2_000, WhenFull.WAIT, 1e8, 0.5)
    requests = [SimRequest("r", 0.0, 400, 0, 200)]
    simulation = Watched(spec, requests, Once(), INTRA["fcfs"])
    result = simulation.run(None)
    [migration] = result.migrations
    assert migration.outcome is MigrationOutcome.COMMITTED
    # 50 blocks of 8 tokens of 100 kB at 100 MB/s: 0.4 s, in which the source makes tens of tokens.
    assert migration.transfer_s > 0.4
    assert migration.rounds >= 3
    assert migration.pause_s < 0.1
    [record] = result.requests
    assert record.pause_s < 0.12
    assert record.gap_max_s == pytest.approx(record.pause_s, abs=0.02)
    blocks = -(-(400 + 200) // 8)
    assert (
        50 * 8 * PROFILE.kv_bytes_per_token < migration.bytes_sent <= blocks * 8 * PROFILE.kv_bytes_per_token
    )


def test_prompts_that_wait_keep_no_import_out() -> None:
    """A seat that nobody runs in is free, however many wait for KV; as in the engines."""
    spec = _spec(1_000, WhenFull.REFUSE, 1e9, 0.5)
    long = [SimRequest(f"long{n}", 0.0, 800, 0, 100) for n in range(6)]
    simulation = Watched(spec, [*long, SimRequest("r", 0.01, 40, 0, 60)], ByName(), INTRA["fcfs"])
    result = simulation.run(None)
    [migration] = result.migrations
    assert migration.outcome is MigrationOutcome.COMMITTED
    # All but the first long one still wait.
    first, *others = (record for record in result.requests if record.request_id != "r")
    assert first.finish_s is not None and migration.end_s < first.finish_s
    assert all((record.first_token_s or 0.0) > migration.end_s for record in others)


class ByName(Policy):
    """Long requests to the second instance; the others move there when prefill is done."""

    def place(self, view: ClusterView, arrival: Arrival, now: float) -> Placement:
        return Place("i001" if arrival.request_id.startswith("long") else "i000")

    def on_prefill_done(self, view: ClusterView, request: RequestView, now: float) -> list[Action]:
        if request.instance_id == "i001":
            return []
        return [Migrate(request.request_id, request.instance_id, "i001", "test")]


def test_transfers_share_the_port_and_only_so_many_go_at_a_time() -> None:
    spec = _spec(4_000, WhenFull.WAIT, 1e8, 0.5)
    spec = replace(spec, migration=replace(spec.migration, limit=3, patience_s=10.0))
    requests = [SimRequest(f"r{n}", 0.0, 160, 0, 600) for n in range(5)]
    result = Watched(spec, requests, Once(), INTRA["fcfs"]).run(None)
    assert [m.outcome for m in result.migrations] == [MigrationOutcome.COMMITTED] * 5
    first, *_, last = sorted(result.migrations, key=lambda m: m.end_s)
    # 160 tokens of 100 kB alone would take 0.16 s at 100 MB/s.
    assert first.transfer_s > 0.4
    assert last.queued_s > 0.3


def test_a_migration_the_target_has_no_room_for_is_refused_or_waits_as_told() -> None:
    long = [SimRequest("a", 0.0, 300, 0, 400), SimRequest("b", 0.01, 300, 0, 400)]
    refusing = _spec(720, WhenFull.REFUSE, 1e9, 0.5)
    outcomes = {
        m.request_id: m.outcome for m in Watched(refusing, long, Once(), INTRA["fcfs"]).run(None).migrations
    }
    assert outcomes["a"] is MigrationOutcome.COMMITTED
    crowded = [
        SimRequest("a", 0.0, 300, 0, 400),
        SimRequest("b", 0.01, 300, 0, 300),
        SimRequest("c", 0.02, 90, 0, 300),
    ]
    result = Watched(refusing, crowded, Once(), INTRA["fcfs"]).run(None)
    assert MigrationOutcome.NO_ROOM in {m.outcome for m in result.migrations}
    assert all(record.finish_s is not None for record in result.requests)


def test_a_request_that_finishes_first_overtakes_its_migration() -> None:
    spec = _spec(2_000, WhenFull.WAIT, 1e7, 0.5)
    result = Watched(spec, [SimRequest("r", 0.0, 100, 0, 5)], Once(), INTRA["fcfs"]).run(None)
    assert [m.outcome for m in result.migrations] == [MigrationOutcome.OVERTAKEN]
    assert result.requests[0].migrations == 0


class AtPhaseEnd(Policy):
    """All to i000; where reasoning ends, on to i001."""

    def place(self, view: ClusterView, arrival: Arrival, now: float) -> Placement:
        return Place("i000")

    def on_reasoning_ended(self, view: ClusterView, request: RequestView, now: float) -> list[Action]:
        return [Migrate(request.request_id, request.instance_id, "i001", "test")]


def test_a_request_that_was_swapped_out_migrates_from_host_memory() -> None:
    spec = _spec(2_000, WhenFull.HOST, 1e9, 0.5)
    # When r0 ends its reasoning it gives way to r2 at the same boundary, before anybody can move it.
    requests = [
        SimRequest("r0", 0.0, 100, 50, 100),
        SimRequest("r1", 0.001, 1_400, 400, 10),
        SimRequest("r2", 0.5, 440, 50, 10),
    ]
    simulation = Watched(spec, requests, AtPhaseEnd(), PascalQueue(quantum_tokens=1_000))
    result = simulation.run(None)
    moved, *_ = result.migrations
    assert (moved.request_id, moved.outcome, moved.rounds) == ("r0", MigrationOutcome.COMMITTED, 1)
    record = result.requests[0]
    assert record.preemptions_swapped == 1 and record.migrations == 1
    # It answers on i001 while r2 has its place: after the transfer, not when r2 is done.
    assert record.finish_s is not None and record.finish_s < (result.requests[2].finish_s or 0.0)
    assert all(len(times) == 150 for name, times in simulation.token_times.items() if name == "r0")
    for instance in simulation.instances:
        assert_empty(instance)
