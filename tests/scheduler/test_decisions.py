"""Reports trigger the policy's decision points, in the leader only."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from scheduler_svc.actuator import without_swaps
from scheduler_svc.drainer import Drainer
from scheduler_svc.loop import DecisionLoop
from scheduler_svc.metrics import SchedulerMetrics
from tailrace.actions import Action, Migrate, Place, Placement, Refuse, SetPool, WhenFull
from tailrace.cluster import Arrival, ClusterView, Pool, RequestView, Stage
from tailrace.control.active_policy import ActivePolicy
from tailrace.control.events import MigrationClosed, MigrationOpened
from tailrace.control.guard import PolicyGuard
from tailrace.control.live import LiveControl
from tailrace.control.reported_cluster import ReportedCluster
from tailrace.policy.base import Policy
from tailrace.policy.parameters import Value
from tailrace.records import PolicyRecord
from tailrace.slo import Slo
from tailrace.v1 import types_pb2
from tests.scheduler.facts import (
    ANSWERING,
    PREFILL,
    REASONING,
    event,
    members,
    report_to,
    request,
    set_members,
    steady,
)
from tests.waiting import WAIT_S


class Recorder(Policy):
    """Record the calls; place on `choice`."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.choice = "a"
        self.also: tuple[Action, ...] = ()
        self.pull_from = ""
        self.seen: list[ClusterView] = []

    def place(self, view: ClusterView, arrival: Arrival, now: float) -> Placement:
        return Place(self.choice, self.also, self.pull_from) if self.choice else Refuse("full")

    def on_prefill_done(self, view: ClusterView, request: RequestView, now: float) -> Sequence[Action]:
        self.calls.append(("prefill_done", request.request_id))
        self.seen.append(view)
        return (Migrate(request.request_id, request.instance_id, "b", "test"),)

    def on_reasoning_ended(self, view: ClusterView, request: RequestView, now: float) -> Sequence[Action]:
        self.calls.append(("reasoning_ended", request.request_id))
        return ()

    def on_length_boundary(self, view: ClusterView, request: RequestView, now: float) -> Sequence[Action]:
        self.calls.append(("length_boundary", request.request_id))
        return ()

    def on_tick(self, view: ClusterView, now: float) -> Sequence[Action]:
        raise RuntimeError("an error in the policy")


class RecordingExecutor:
    """Record the submitted actions."""

    def __init__(self) -> None:
        self.actions: list[Action] = []

    def submit(self, actions: Sequence[Action], policy: str, when_full: WhenFull = WhenFull.REFUSE) -> None:
        self.actions += actions


class Scheduler:
    """The deciding half of a scheduler."""

    def __init__(self) -> None:
        self.state = ReportedCluster()
        set_members(self.state, members("a", "b"), 0.0)
        self.active = ActivePolicy(PolicyRecord(name="least_loaded"))
        self.policy = self.active.policy = Recorder()
        self.executor = RecordingExecutor()
        self.leading = asyncio.Event()
        self.leading.set()
        self.metrics = SchedulerMetrics(CollectorRegistry())
        self.control = LiveControl(self.state, self.active, self.executor, PolicyGuard(self.metrics))
        self.loop = DecisionLoop(self.control, self.leading, self.metrics)

    def place(self, request_id: str = "r", excluded: frozenset[str] = frozenset()) -> tuple[str, str]:
        """Return the instance and the reason of a refusal."""
        reply = self.loop.place(Arrival(request_id, 10, 10, excluded=excluded, frontend_id="f"))
        return reply.instance_id, reply.refusal


@pytest.fixture
def scheduler() -> Scheduler:
    """Return a scheduler with two instances."""
    return Scheduler()


@pytest.mark.parametrize(
    ("name", "parameters", "pace_s"),
    [("least_loaded", {}, 0.0), ("pascal", {}, 0.1), ("pascal", {"pacer": False}, 0.0)],
)
def test_pascal_has_answers_shown_at_the_readers_pace(
    scheduler: Scheduler, name: str, parameters: dict[str, Value], pace_s: float
) -> None:
    scheduler.active.follow(PolicyRecord(name=name, parameters=parameters), Slo())
    reply = scheduler.loop.place(Arrival("r", 10, 10, frontend_id="f"))
    assert (reply.policy, reply.pace_s) == (name, pace_s)


def test_phase_events_reach_the_policy_in_order(scheduler: Scheduler) -> None:
    scheduler.place()
    scheduler.loop.handle_report(event("a", "r", REASONING), 1.0)
    scheduler.loop.handle_report(event("a", "r", ANSWERING, output_tokens=9), 2.0)
    assert scheduler.policy.calls == [("prefill_done", "r"), ("reasoning_ended", "r")]
    assert scheduler.executor.actions == [Migrate("r", "a", "b", "test")]


def test_a_request_without_reasoning_has_one_event(scheduler: Scheduler) -> None:
    scheduler.place()
    scheduler.loop.handle_report(event("a", "r", ANSWERING), 1.0)
    assert scheduler.policy.calls == [("prefill_done", "r")]


def test_a_standby_tracks_the_state_but_does_not_decide(scheduler: Scheduler) -> None:
    scheduler.leading.clear()
    scheduler.loop.handle_report(event("a", "r", REASONING), 1.0)
    assert scheduler.policy.calls == []
    assert scheduler.state.request("r") is not None
    assert scheduler.place("q") == ("a", "")


def test_a_tick_sees_the_time_of_the_previous_one(scheduler: Scheduler) -> None:
    """Only ticks of the same policy count: another policy has its own periods."""
    seen_by_policy: list[tuple[float | None, float]] = []

    class RecordTicks(Recorder):
        def on_tick(self, view: ClusterView, now: float) -> Sequence[Action]:
            seen_by_policy.append((view.last_tick_s, now))
            return ()

    scheduler.active.policy = RecordTicks()
    for _ in range(3):
        scheduler.loop.tick()
    assert [last_s for last_s, _ in seen_by_policy] == [None, seen_by_policy[0][1], seen_by_policy[1][1]]
    scheduler.active.policy = RecordTicks()
    scheduler.loop.tick()
    assert seen_by_policy[-1][0] is None


def test_a_tick_sees_the_lengths_its_policy_requires(scheduler: Scheduler) -> None:
    seen_by_policy: list[int | None] = []

    class RecordLengths(Recorder):
        lengths_period_s: float | None = 60.0

        def on_tick(self, view: ClusterView, now: float) -> Sequence[Action]:
            seen_by_policy.append(None if view.lengths is None else len(view.lengths.arrived()[0]))
            return ()

    scheduler.active.policy = RecordLengths()
    # A standby records lengths, too.
    scheduler.leading.clear()
    scheduler.loop.handle_report(steady("a"), time.monotonic())
    scheduler.place("r")
    scheduler.leading.set()
    scheduler.loop.tick()
    assert seen_by_policy == [1]
    scheduler.active.policy = Recorder()
    scheduler.loop.handle_report(steady("a"), time.monotonic())
    assert scheduler.state.lengths(time.monotonic()) is None


async def test_a_new_term_starts_without_a_previous_tick(scheduler: Scheduler) -> None:
    seen_by_policy: list[float | None] = []
    ticked = asyncio.Event()

    class RecordTicks(Recorder):
        tick_interval_s = 0.01

        def on_tick(self, view: ClusterView, now: float) -> Sequence[Action]:
            seen_by_policy.append(view.last_tick_s)
            ticked.set()
            return ()

    async def wait_for_ticks(count: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while len(seen_by_policy) < count:
                await ticked.wait()
                ticked.clear()

    scheduler.active.policy = RecordTicks()
    async with asyncio.TaskGroup() as tasks:
        ticking = tasks.create_task(scheduler.loop.run_ticks())
        await wait_for_ticks(2)
        assert seen_by_policy[0] is None and seen_by_policy[1] is not None
        scheduler.leading.clear()
        # Wait until it no longer leads.
        async with asyncio.timeout(WAIT_S):
            while scheduler.control.runner.last_tick_s is not None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        seen_by_policy.clear()
        scheduler.leading.set()
        await wait_for_ticks(1)
        assert seen_by_policy[0] is None
        ticking.cancel()


async def test_a_slow_tick_leaves_the_loop_as_long_as_it_took(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(Recorder):
        tick_interval_s = 0.05

        def on_tick(self, view: ClusterView, now: float) -> Sequence[Action]:
            events.append("tick")
            clock.now_s += 0.08
            return ()

    class Clock:
        """The time, which only ticks and sleeping spend."""

        now_s = 100.0

        def monotonic(self) -> float:
            return self.now_s

        def time(self) -> float:
            return self.now_s

    async def sleep(seconds: float) -> None:
        events.append(round(seconds, 6))
        clock.now_s += seconds
        if len(events) > 6:
            raise asyncio.CancelledError

    events, clock = list[str | float](), Clock()
    monkeypatch.setattr("scheduler_svc.loop.time", clock)
    monkeypatch.setattr("scheduler_svc.loop.asyncio.sleep", sleep)
    scheduler.active.policy = Slow()
    with pytest.raises(asyncio.CancelledError):
        await scheduler.loop.run_ticks()
    assert events == [0.05, *["tick", 0.08] * 3]


def test_an_outgrown_stage_is_reported_once(scheduler: Scheduler) -> None:
    facts = members("a", "b")
    facts.stages = (Stage(0, 120, ("a",)), Stage(120, 4096, ("b",)))
    set_members(scheduler.state, facts, 0.0)
    scheduler.loop.handle_report(steady("a", [request("r", output_tokens=19)]), 1.0)
    assert scheduler.policy.calls == []
    for second in (2.0, 3.0):
        scheduler.loop.handle_report(steady("a", [request("r", output_tokens=20)]), second)
    assert scheduler.policy.calls == [("length_boundary", "r")]
    scheduler.loop.handle_report(steady("b", [request("r", epoch=1, output_tokens=5000)]), 4.0)
    assert scheduler.policy.calls == [("length_boundary", "r")] * 2


def test_policy_errors_are_counted(scheduler: Scheduler) -> None:
    scheduler.loop.tick()
    assert scheduler.metrics.policy_errors.labels("least_loaded", "tick")._value.get() == 1


@pytest.mark.parametrize("choice", ["nobody", "b"])
def test_an_invalid_placement_is_replaced(scheduler: Scheduler, choice: str) -> None:
    scheduler.policy.choice = choice
    assert scheduler.place(excluded=frozenset("b")) == ("a", "")


def test_actions_of_a_placement_are_submitted(scheduler: Scheduler) -> None:
    scheduler.policy.also = (SetPool("a", Pool.DECODE_TO_PREFILL),)
    assert scheduler.place() == ("a", "")
    assert scheduler.executor.actions == [SetPool("a", Pool.DECODE_TO_PREFILL)]
    # The fallback placement does not need the policy's actions.
    assert scheduler.place(excluded=frozenset("a")) == ("b", "")
    assert len(scheduler.executor.actions) == 1


def test_refusals_have_a_reason(scheduler: Scheduler) -> None:
    scheduler.policy.choice = ""
    assert scheduler.place() == ("", "full")
    scheduler.active.follow(PolicyRecord(name="round_robin"), Slo())
    assert scheduler.place(excluded=frozenset("ab")) == ("", "no active instance")


def test_an_unknown_policy_keeps_the_present_one(scheduler: Scheduler) -> None:
    scheduler.active.follow(PolicyRecord(name="none_such"), Slo())
    assert scheduler.active.name == "least_loaded"
    scheduler.active.follow(PolicyRecord(name="round_robin"), Slo())
    assert scheduler.active.name == "round_robin"
    scheduler.active.follow(None, Slo())
    assert scheduler.active.name == "least_loaded"


def test_opposite_migrations_are_dropped() -> None:
    there, back = Migrate("r1", "a", "b", ""), Migrate("r2", "b", "a", "")
    pool = SetPool("a", Pool.DECODE)
    again = Migrate("r1", "a", "c", "")
    also = Migrate("r3", "a", "b", "")
    assert without_swaps([there, pool, back, again, also]) == [there, pool, also]


def _draining(scheduler: Scheduler, count: int) -> Drainer:
    """Return a drainer: `a` drains with `count` requests; `b` and `c` are free."""
    facts = members("a", "b", "c")
    facts.draining = frozenset("a")
    set_members(scheduler.state, facts, 0.0)
    report_to(scheduler.state, steady("a", [request(f"r{n}") for n in range(count)]), 1.0)
    return Drainer(scheduler.state, scheduler.executor, scheduler.leading)


def test_draining_migrates_decoding_requests_and_retries(scheduler: Scheduler) -> None:
    drainer = _draining(scheduler, 4)
    drainer.run_once(1.0)
    moves = [a for a in scheduler.executor.actions if isinstance(a, Migrate)]
    assert sorted(m.request_id for m in moves) == ["r0", "r1", "r2", "r3"]
    assert sorted(m.target_id for m in moves) == ["b", "b", "c", "c"]
    # After 2, 4, 8, 16 seconds and then every 16 seconds.
    for second, tries in ((2.5, 1), (3.0, 2), (6.5, 2), (7.0, 3), (15.0, 4), (31.0, 5), (47.0, 6), (63.0, 7)):
        drainer.run_once(second)
        assert len(scheduler.executor.actions) == 4 * tries


def test_draining_limits_concurrent_migrations(scheduler: Scheduler) -> None:
    drainer = _draining(scheduler, 20)
    drainer.run_once(1.0)
    assert len(scheduler.executor.actions) == 8
    for action in scheduler.executor.actions:
        assert isinstance(action, Migrate)
        moving = scheduler.state.request(action.request_id)
        assert moving is not None
        scheduler.state.order(MigrationOpened(moving, action.target_id))
    drainer.run_once(1.5)
    assert len(scheduler.executor.actions) == 8
    scheduler.state.apply(MigrationClosed("r0"))
    drainer.run_once(1.6)
    # The next request is migrated; this one is retried later.
    assert [a.request_id for a in scheduler.executor.actions if isinstance(a, Migrate)][8:] == ["r8"]


def test_draining_avoids_instances_with_incompatible_kv(scheduler: Scheduler) -> None:
    drainer = _draining(scheduler, 2)
    facts = members("a", "b", "c")
    facts.draining = frozenset("a")
    other = msgspec.structs.replace(facts.instances["b"], model_fingerprint="other")
    facts.instances = {**facts.instances, "b": other}
    set_members(scheduler.state, facts, 2.0)
    drainer.run_once(2.0)
    assert {a.target_id for a in scheduler.executor.actions if isinstance(a, Migrate)} == {"c"}


def test_a_waiting_prompt_is_not_migrated(scheduler: Scheduler) -> None:
    drainer = _draining(scheduler, 0)
    waiting = request("w")
    waiting.state = types_pb2.REQUEST_STATE_WAITING
    report_to(scheduler.state, steady("a", [request("p", phase=PREFILL), waiting]), 1.0)
    drainer.run_once(1.0)
    assert scheduler.executor.actions == []


def test_a_new_policy_decides_about_outgrown_requests_again(scheduler: Scheduler) -> None:
    facts = members("a", "b")
    facts.stages = (Stage(0, 120, ("a",)), Stage(120, 4096, ("b",)))
    set_members(scheduler.state, facts, 0.0)
    scheduler.loop.handle_report(steady("a", [request("r", output_tokens=20)]), 1.0)
    successor = scheduler.active.policy = Recorder()
    for second in (2.0, 3.0):
        scheduler.loop.handle_report(steady("a", [request("r", output_tokens=20)]), second)
    assert successor.calls == [("length_boundary", "r")]
