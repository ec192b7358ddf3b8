"""Migration neither loses nor duplicates tokens and leaves no state behind."""

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
from tailrace.actions import ORDERED_MAX, Action, Migrate, Place, Placement, WhenFull
from tailrace.cluster import Arrival, ClusterView, RequestView, Stage
from tailrace.intra.pascal import PascalQueue
from tailrace.policy.base import Policy
from tests.simulator.moving import MoveEverything
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
        # Irrational, so that two instances that exchange requests do not step at the same time, where
        # rounding
        # would decide the order.
        migration=MigrationSpec(
            when_full=when_full, limit=2, patience_s=0.5, open_s=math.pi / 1e3, commit_s=math.sqrt(2) / 1e3
        ),
        report=ReportSpec(interval_s=interval_s, delay_s=0.0021),
        stages=(Stage(0, 60, ("i000",)), Stage(60, 140, ("i001",)), Stage(140, 1 << 20, ("i002",))),
    )


def _run(spec: ClusterSpec, requests: list[SimRequest], intra: str, most: int) -> tuple[Watched, SimResult]:
    simulation = Watched(spec, requests, MoveEverything(), INTRA[intra], most)
    return simulation, simulation.run(None)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    requests=workloads(most=10, span_s=1.0),
    intra=st.sampled_from(sorted(INTRA)),
    kv_tokens=st.sampled_from([330, 900]),
    when_full=st.sampled_from(list(WhenFull)),
    room_last=st.booleans(),
    paused=st.booleans(),
    bytes_per_s=st.sampled_from([1e8, 1e10]),
    interval_s=st.sampled_from([0.0, 0.0517]),
)
def test_runs_of_steps_equal_single_steps_and_every_token_is_generated_once(
    intra: str,
    requests: list[SimRequest],
    kv_tokens: int,
    when_full: WhenFull,
    room_last: bool,
    paused: bool,
    bytes_per_s: float,
    interval_s: float,
) -> None:
    spec = _spec(kv_tokens, when_full, bytes_per_s, interval_s)
    spec = replace(spec, migration=replace(spec.migration, room_last=room_last, paused=paused))
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


class MoveAfterPrefill(Policy):
    """Place on the first instance and migrate to the second after prefill."""

    def place(self, view: ClusterView, arrival: Arrival, now: float) -> Placement:
        return Place("i000")

    def on_prefill_done(self, view: ClusterView, request: RequestView, now: float) -> list[Action]:
        return [Migrate(request.request_id, request.instance_id, "i001", "test")]


@pytest.mark.parametrize(("when_full", "refused"), [(WhenFull.WAIT, 0), (WhenFull.HOST, 4)])
def test_migrations_that_could_only_wait_are_refused_at_once_unless_the_policy_waits(
    when_full: WhenFull, refused: int
) -> None:
    # Their prompts end in one step, and a transfer takes longer than all the tokens.
    requests = [SimRequest(f"r{n}", 0.0, 16, 0, 20) for n in range(ORDERED_MAX + 4)]
    spec = replace(_spec(10_000, when_full, 1e5, 0.5), stages=())
    spec = replace(
        spec, instances=tuple(replace(i, max_num_seqs=64, chunk_budget_tokens=512) for i in spec.instances)
    )
    result = Watched(spec, requests, MoveAfterPrefill(), INTRA["fcfs"]).run(None)
    assert len(result.migrations) == len(requests)
    at_once = [m for m in result.migrations if m.detail == "8 migrations to i001 are open"]
    assert len(at_once) == refused
    assert all(m.outcome is MigrationOutcome.REFUSED and m.end_s == m.requested_s for m in at_once)


def test_the_source_decodes_during_the_copy_and_pauses_only_for_the_rest() -> None:
    spec = _spec(2_000, WhenFull.WAIT, 1e8, 0.5)
    requests = [SimRequest("r", 0.0, 400, 0, 200)]
    simulation = Watched(spec, requests, MoveAfterPrefill(), INTRA["fcfs"])
    result = simulation.run(None)
    [migration] = result.migrations
    assert migration.outcome is MigrationOutcome.COMMITTED
    # 50 blocks of 8 tokens of 100 kB at 100 MB/s take 0.4 s, in which the source generates tens of tokens.
    assert migration.transfer_s > 0.4
    assert migration.rounds >= 3
    assert migration.pause_s < 0.1
    [record] = result.requests
    assert record.pause_s < 0.12
    longest_s = np.diff(simulation.token_times["r"]).max()
    assert longest_s == pytest.approx(record.pause_s, abs=0.02)
    blocks = -(-(400 + 200) // 8)
    assert (
        50 * 8 * PROFILE.kv_bytes_per_token < migration.bytes_sent <= blocks * 8 * PROFILE.kv_bytes_per_token
    )


def test_waiting_prompts_do_not_block_imports() -> None:
    """As in the engines, a slot without a running request is free, however many prompts wait for KV."""
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
    """Place long requests on the second instance; migrate the others there after prefill."""

    def place(self, view: ClusterView, arrival: Arrival, now: float) -> Placement:
        return Place("i001" if arrival.request_id.startswith("long") else "i000")

    def on_prefill_done(self, view: ClusterView, request: RequestView, now: float) -> list[Action]:
        if request.instance_id == "i001":
            return []
        return [Migrate(request.request_id, request.instance_id, "i001", "test")]


def test_transfers_share_the_port_and_are_limited_in_number() -> None:
    spec = _spec(4_000, WhenFull.WAIT, 1e8, 0.5)
    spec = replace(spec, migration=replace(spec.migration, limit=3, patience_s=10.0))
    requests = [SimRequest(f"r{n}", 0.0, 160, 0, 600) for n in range(5)]
    result = Watched(spec, requests, MoveAfterPrefill(), INTRA["fcfs"]).run(None)
    assert [m.outcome for m in result.migrations] == [MigrationOutcome.COMMITTED] * 5
    first, *_, last = sorted(result.migrations, key=lambda m: m.end_s)
    # A single transfer of 160 tokens of 100 kB would take 0.16 s at 100 MB/s.
    assert first.transfer_s > 0.4
    # Until then it waited for its turn.
    assert last.end_s - last.transfer_s - last.requested_s > 0.3


def test_a_migration_without_room_is_refused_or_waits_as_configured() -> None:
    long = [SimRequest("a", 0.0, 300, 0, 400), SimRequest("b", 0.01, 300, 0, 400)]
    refusing = _spec(720, WhenFull.REFUSE, 1e9, 0.5)
    outcomes = {
        m.request_id: m.outcome
        for m in Watched(refusing, long, MoveAfterPrefill(), INTRA["fcfs"]).run(None).migrations
    }
    assert outcomes["a"] is MigrationOutcome.COMMITTED
    crowded = [
        SimRequest("a", 0.0, 300, 0, 400),
        SimRequest("b", 0.01, 300, 0, 300),
        SimRequest("c", 0.02, 90, 0, 300),
    ]
    result = Watched(refusing, crowded, MoveAfterPrefill(), INTRA["fcfs"]).run(None)
    assert MigrationOutcome.NO_ROOM in {m.outcome for m in result.migrations}
    assert all(record.finish_s is not None for record in result.requests)


def test_a_request_that_finishes_early_overtakes_its_migration() -> None:
    spec = _spec(2_000, WhenFull.WAIT, 1e7, 0.5)
    result = Watched(spec, [SimRequest("r", 0.0, 100, 0, 5)], MoveAfterPrefill(), INTRA["fcfs"]).run(None)
    assert [m.outcome for m in result.migrations] == [MigrationOutcome.OVERTAKEN]
    assert result.requests[0].migrations == 0


class AtPhaseEnd(Policy):
    """Place everything on i000 and migrate it to i001 when reasoning ends."""

    def place(self, view: ClusterView, arrival: Arrival, now: float) -> Placement:
        return Place("i000")

    def on_reasoning_ended(self, view: ClusterView, request: RequestView, now: float) -> list[Action]:
        return [Migrate(request.request_id, request.instance_id, "i001", "test")]


def test_a_swapped_request_migrates_from_host_memory() -> None:
    spec = _spec(2_000, WhenFull.HOST, 1e9, 0.5)
    # When r0 ends its reasoning, it is preempted for r2 at the same boundary, before it can migrate.
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
    # It answers on i001 after the transfer, while r2 still occupies its place.
    assert record.finish_s is not None and record.finish_s < (result.requests[2].finish_s or 0.0)
    assert all(len(times) == 150 for name, times in simulation.token_times.items() if name == "r0")
    for instance in simulation.instances:
        assert_empty(instance)


def test_a_paused_request_makes_no_token_before_it_is_there() -> None:
    """Arrow's q_2: from the decision to the first step on the target."""
    spec = replace(_spec(4_000, WhenFull.WAIT, 1e8, 0.5), stages=())
    requests = [SimRequest("a", 0.0, 100, 0, 400)]
    found = {}
    for paused in (False, True):
        moved = replace(spec, migration=replace(spec.migration, paused=paused))
        simulation = Watched(moved, requests, MoveAfterPrefill(), INTRA["fcfs"])
        [record] = simulation.run(None).requests
        [migration] = [m for m in simulation.migrations.records]
        assert migration.outcome is MigrationOutcome.COMMITTED
        before = sum(at < migration.end_s for at in simulation.token_times["a"])
        found[paused] = before, migration.rounds, record.pause_s
    # The first token, and that of the step in which the decision is made.
    assert found[True][0] <= 2 < found[False][0] and found[True][1] == 1 < found[False][1]
    assert found[True][2] > found[False][2]
