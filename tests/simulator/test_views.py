"""The views of policies: consistent with the requests, as stale as the reports, evaluated lazily."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from simulator.cluster import ClusterSpec, LinkSpec, MigrationSpec, ReportSpec
from simulator.instance import Instance
from simulator.reports import Report
from simulator.request import SimRequest
from simulator.simulation import simulate
from tailrace.actions import Action, Migrate, Place, Placement, WhenFull
from tailrace.cluster import Arrival, ClusterView, InstanceView, RequestView, Stage
from tailrace.intra.orders import Fcfs
from tailrace.perf.horizon import FutureLoad
from tailrace.policy.base import Policy
from tailrace.policy.requests import RequestTable, reasoning_of, table_of
from tests.simulator.moving import MoveEverything
from tests.simulator.worlds import INTRA, PROFILE, workloads


class Oracle:
    def remaining(self, request: SimRequest, output_tokens: int) -> float:
        return float(request.output_tokens - output_tokens)


class Recorder(MoveEverything):
    """Record every `every`-th view."""

    def __init__(self, every: int = 1) -> None:
        self.every = every
        self.calls = 0
        self.seen: list[object] = []

    def record(self, view: ClusterView, now: float) -> None:
        self.calls += 1
        if self.calls % self.every:
            return
        for instance in view.instances.values():
            columns = [getattr(instance, field.name) for field in fields(InstanceView)]
            self.seen.append((self.calls, now, *columns[:-1], tuple(instance.requests)))

    def place(self, view: ClusterView, arrival: Arrival, now: float) -> Placement:
        self.record(view, now)
        return super().place(view, arrival, now)

    def on_reasoning_ended(self, view: ClusterView, request: RequestView, now: float) -> Sequence[Action]:
        self.record(view, now)
        return super().on_reasoning_ended(view, request, now)

    def on_tick(self, view: ClusterView, now: float) -> Sequence[Action]:
        self.record(view, now)
        return super().on_tick(view, now)


def cluster(interval_s: float = 0.0517, when_full: WhenFull = WhenFull.HOST) -> ClusterSpec:
    spec = ClusterSpec.uniform(
        3,
        PROFILE,
        kv_capacity_tokens=330,
        block_tokens=8,
        host_kv_bytes=400 * PROFILE.kv_bytes_per_token,
        max_num_seqs=6,
        chunk_budget_tokens=64,
    )
    return replace(
        spec,
        migration=MigrationSpec(when_full=when_full, limit=2, patience_s=0.5),
        report=ReportSpec(interval_s=interval_s, delay_s=0.0021),
        stages=(Stage(0, 60, ("i000",)), Stage(60, 140, ("i001",)), Stage(140, 1 << 20, ("i002",))),
        predictor=Oracle(),
        future_load=FutureLoad(),
    )


class LongPredictor:
    def remaining(self, request: SimRequest, output_tokens: int) -> float:
        return 10_000.0


class CheckPredictions(Recorder):
    """Compare predictions with the length limits, and check the future load."""

    def __init__(self) -> None:
        super().__init__()
        self.checked = 0

    def record(self, view: ClusterView, now: float) -> None:
        for instance in view.instances.values():
            for request in instance.requests:
                left = min(
                    request.max_tokens - request.output_tokens,
                    instance.max_model_len - request.context_tokens,
                )
                assert request.predicted_remaining_tokens == max(0, left)
                self.checked += 1
            assert not any(instance.future_load[1:])


def test_predictions_never_exceed_the_length_limit() -> None:
    """At the first step of the horizon, 256, no request that ends at 200 tokens can remain."""
    spec = replace(cluster(), max_tokens=200, predictor=LongPredictor(), stages=())
    spec = replace(spec, instances=tuple(replace(i, max_model_len=230) for i in spec.instances))
    requests = [SimRequest(f"r{n}", 0.05 * n, 20 + n, 10, 60 + n) for n in range(12)]
    policy = CheckPredictions()
    simulate(spec, requests, policy, Fcfs())
    assert policy.checked > 50


@settings(max_examples=15, deadline=None, derandomize=True)
@given(requests=workloads(most=10, span_s=1.0), intra=st.sampled_from(sorted(INTRA)))
def test_a_report_evaluated_late_is_unchanged(intra: str, requests: list[SimRequest]) -> None:
    late = Recorder(every=3)
    simulate(cluster(), requests, late, INTRA[intra])
    at_once = Recorder(every=3)
    with pytest.MonkeyPatch.context() as patch:
        begin = Report.__init__

        def evaluate_at_once(report: Report, instance: Instance, now: float, placed_before: int) -> None:
            begin(report, instance, now, placed_before)
            report.read_all()

        patch.setattr(Report, "__init__", evaluate_at_once)
        simulate(cluster(), requests, at_once, INTRA[intra])
    assert late.seen == at_once.seen
    assert late.seen or late.calls < 3


class CheckCounts(MoveEverything):
    """Compare the counts of the view with a recount of its requests."""

    def __init__(self) -> None:
        self.compared = 0

    def on_tick(self, view: ClusterView, now: float) -> Sequence[Action]:
        for instance in view.instances.values():
            requests = tuple(instance.requests)
            # The second time, the result comes from the cache.
            for _ in range(2):
                offered = table_of(instance.requests).phase_load(13)
                counted = RequestTable(requests).phase_load(13)
                assert offered.reasoning == counted.reasoning
                assert offered.fresh_answering == counted.fresh_answering
                assert offered.least_pacer_slack_tokens == pytest.approx(counted.least_pacer_slack_tokens)
            assert table_of(instance.requests).reasoning() == reasoning_of(requests)
            for request in requests:
                without = request.request_id
                offered = table_of(instance.requests).phase_load(13, without)
                counted = RequestTable(requests).phase_load(13, without)
                assert offered.reasoning == counted.reasoning
                assert offered.fresh_answering == counted.fresh_answering
                self.compared += 1
        return super().on_tick(view, now)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    requests=workloads(most=10, span_s=1.0),
    intra=st.sampled_from(sorted(INTRA)),
    interval_s=st.sampled_from([0.0, 0.0517]),
)
def test_phase_counts_equal_a_recount(intra: str, requests: list[SimRequest], interval_s: float) -> None:
    simulate(cluster(interval_s), requests, CheckCounts(), INTRA[intra])


class RecordFirstInstance(Policy):
    """Place everything on the first instance and record each view of it."""

    def __init__(self) -> None:
        self.views: list[InstanceView] = []

    def place(self, view: ClusterView, arrival: Arrival, now: float) -> Placement:
        self.views.append(next(iter(view.instances.values())))
        return Place("i000")


def prompts(*tokens: int, gap_s: float = 1e-4) -> list[SimRequest]:
    return [SimRequest(f"r{n}", gap_s * n, length, 0, 5) for n, length in enumerate(tokens)]


@pytest.mark.parametrize("interval_s", [0.0, 0.5])
def test_prefill_delay_is_the_time_of_the_backlog_by_the_profile(interval_s: float) -> None:
    spec = ClusterSpec.uniform(1, PROFILE, chunk_budget_tokens=100, kv_capacity_tokens=4_000)
    spec = replace(spec, report=ReportSpec(interval_s=interval_s))
    policy = RecordFirstInstance()
    simulate(spec, prompts(250, 70, 30), policy, Fcfs())
    base, prefill = PROFILE.prefill.base_ms, PROFILE.prefill
    delays_ms = [(view.prefill_delay_s or 0.0) * 1e3 for view in policy.views]
    assert delays_ms[0] == 0.0
    # The step in flight does not count yet: 250 tokens take three steps, then 320 take four.
    assert delays_ms[1] == pytest.approx(3 * base + prefill.ms(0, 250))
    assert delays_ms[2] == pytest.approx(4 * base + prefill.ms(0, 250) + prefill.ms(0, 70))


def test_prefill_delay_counts_only_the_remaining_tokens() -> None:
    spec = ClusterSpec.uniform(1, PROFILE, chunk_budget_tokens=100, kv_capacity_tokens=4_000)
    spec = replace(spec, report=ReportSpec(interval_s=0.0))
    policy = RecordFirstInstance()
    # The second request arrives during the second of three chunks.
    first_s = PROFILE.step_ms(PROFILE.prefill.ms(0, 100), 0, 0) / 1e3
    simulate(spec, prompts(250, 70, gap_s=first_s * 1.3), policy, Fcfs())
    left_ms = 2 * PROFILE.prefill.base_ms + PROFILE.prefill.ms(100, 250)
    assert (policy.views[1].prefill_delay_s or 0.0) * 1e3 == pytest.approx(left_ms)


@pytest.mark.parametrize(("when_full", "tokens"), [(WhenFull.HOST, 400), (WhenFull.WAIT, 0)])
def test_host_memory_counts_only_if_it_accepts_migrated_requests(when_full: WhenFull, tokens: int) -> None:
    policy = RecordFirstInstance()
    simulate(cluster(when_full=when_full), prompts(30), policy, Fcfs())
    assert policy.views[0].host_kv_capacity_tokens == tokens


def test_future_load_is_as_old_as_the_report() -> None:
    spec = replace(cluster(interval_s=10.0), stages=())
    policy = RecordFirstInstance()
    simulate(spec, prompts(30, 30, 30), policy, Fcfs())
    # Without a report since the start, placements are known but their future load is not.
    assert [view.waiting for view in policy.views] == [0, 1, 2]
    assert all(load == 0.0 for view in policy.views for load in view.future_load)
    assert math.isclose(policy.views[2].context_tokens, 60)


class MigrateOne(Policy):
    """Migrate the request `r0` from i000 to i001 once it decodes, and record the view of i001."""

    summary = "one migration"
    tick_interval_s = 0.02

    def __init__(self) -> None:
        self.asked_tokens = 0
        # (KV in use, open migrations to i001).
        self.held: list[tuple[int, int]] = []
        # (open migrations to i001, their context in tokens).
        self.coming: set[tuple[int, int]] = set()

    def place(self, view: ClusterView, arrival: Arrival, now: float) -> Placement:
        return Place("i000" if arrival.request_id == "r0" else "i001")

    def on_tick(self, view: ClusterView, now: float) -> Sequence[Action]:
        target = view.instances["i001"]
        self.held.append((target.kv_used_tokens, target.migrations_in))
        self.coming.add((target.migrations_in, target.coming_tokens))
        sent = [r for r in view.instances["i000"].requests if r.output_tokens and not self.asked_tokens]
        self.asked_tokens += sum(r.context_tokens for r in sent)
        return [Migrate(r.request_id, "i000", "i001", "test") for r in sent]


@pytest.mark.parametrize(("resident_tokens", "outcome"), [(40, "COMMITTED"), (230, "NO_ROOM")])
def test_a_migration_counts_at_its_target_from_its_order_to_its_end(
    resident_tokens: int, outcome: str
) -> None:
    """This includes reports before the target is asked for room, and targets that refuse."""
    spec = cluster(interval_s=0.005, when_full=WhenFull.REFUSE)
    # Allow several reports before the target is asked.
    spec = replace(
        spec, stages=(), migration=replace(spec.migration, room_last=True, open_s=0.1, commit_s=0.1)
    )
    policy = MigrateOne()
    moving, resident = prompts(90, resident_tokens)
    requests = [replace(moving, answer_tokens=60), replace(resident, answer_tokens=60)]
    (migration,) = simulate(spec, requests, policy, Fcfs()).migrations
    assert migration.outcome.name == outcome
    coming = [held for held, open_ in policy.held if open_]
    assert len(coming) > 3 and min(coming) >= min(330, resident_tokens + policy.asked_tokens)
    # It does not count afterwards.
    ended = next(n for n, (_, open_) in enumerate(policy.held) if open_) + len(coming)
    assert policy.held[ended][0] >= resident_tokens
    assert policy.coming == {(0, 0), (1, migration.context_tokens)}


class RecordRates(MoveEverything):
    """Record the migration rates in the views."""

    def __init__(self) -> None:
        self.rates: dict[str, set[float | None]] = {}

    def on_tick(self, view: ClusterView, now: float) -> Sequence[Action]:
        for name, instance in view.instances.items():
            self.rates.setdefault(name, set()).add(instance.migration_tokens_per_s)
        return super().on_tick(view, now)


def test_the_migration_rate_is_measured_from_migrations() -> None:
    spec = replace(cluster(), link=LinkSpec(bytes_per_s=1e8, latency_s=0.0))
    requests = [SimRequest(f"r{n}", 0.05 * n, 20 + n, 10, 60 + n) for n in range(12)]
    policy = RecordRates()
    simulate(spec, requests, policy, Fcfs())
    link_rate = 1e8 / PROFILE.kv_bytes_per_token
    seen = {rate for rates in policy.rates.values() for rate in rates}
    assert None in seen
    measured = seen - {None}
    assert measured and all(
        0.1 * link_rate < rate < 1.001 * link_rate for rate in measured if rate is not None
    )


class AskSpeeds(Policy):
    """Record what is known of each instance's step times."""

    def __init__(self) -> None:
        super().__init__()
        self.speeds: list[float | None] = []

    def place(self, view: ClusterView, arrival: Arrival, now: float) -> Placement:
        measured = [instance.measured for instance in view.instances.values()]
        self.speeds = [None if each is None else each.profile.decode.base_ms for each in measured]
        return Place(next(iter(view.instances)))


def test_step_times_are_known_by_instance_if_they_differ() -> None:
    decode = structs.replace(PROFILE.decode, base_ms=70.0)
    slow = structs.replace(PROFILE, decode=decode)
    requests = [SimRequest("r", 0.0, 10, 0, 5)]
    asked = AskSpeeds()
    simulate(ClusterSpec.of_kinds([(PROFILE, 2), (slow, 1)]), requests, asked, Fcfs())
    assert asked.speeds == [7.0, 7.0, 70.0]
    # Of equal ones a policy knows the profile that it was made with.
    simulate(ClusterSpec.uniform(2, PROFILE), requests, asked, Fcfs())
    assert asked.speeds == [None, None]
