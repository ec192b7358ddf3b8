"""Reports reach the policy's decision points, and only the leader's policy is asked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from scheduler_svc.actuator import without_swaps
from scheduler_svc.decisions import Decider, Placer
from scheduler_svc.drainer import Drainer
from scheduler_svc.metrics import SchedulerMetrics
from tailrace.actions import Action, Migrate, Place, Placement, Refuse, SetPool, WhenFull
from tailrace.cluster import Arrival, ClusterView, Incoming, Pool, RequestView, Stage
from tailrace.control.live import LiveControl
from tailrace.control.reported_cluster import ReportedCluster
from tailrace.control.runner import ActivePolicy, GuardedCalls
from tailrace.policy.base import Policy
from tailrace.records import PolicyRecord
from tailrace.slo import Slo
from tailrace.v1 import types_pb2
from tests.scheduler.facts import ANSWERING, PREFILL, REASONING, event, members, request, steady


class Recorder(Policy):
    """Notes what it is asked; places on `choice`."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.choice = "a"
        self.also: tuple[Action, ...] = ()
        self.pull_from = ""
        self.seen: list[ClusterView] = []

    def place(self, view: ClusterView, arrival: Arrival, now: float) -> Placement:
        return Place(self.choice, self.also, self.pull_from) if self.choice else Refuse("full")

    def on_prefill_done(self, view: ClusterView, request: RequestView, now: float) -> Sequence[Action]:
        self.asked.append(("prefill_done", request.request_id))
        self.seen.append(view)
        return (Migrate(request.request_id, request.instance_id, "b", "test"),)

    def on_reasoning_ended(self, view: ClusterView, request: RequestView, now: float) -> Sequence[Action]:
        self.asked.append(("reasoning_ended", request.request_id))
        return ()

    def on_length_boundary(self, view: ClusterView, request: RequestView, now: float) -> Sequence[Action]:
        self.asked.append(("length_boundary", request.request_id))
        return ()

    def on_tick(self, view: ClusterView, now: float) -> Sequence[Action]:
        raise RuntimeError("a policy's own mistake")


class RecordingExecutor:
    """Notes what it is given."""

    def __init__(self) -> None:
        self.actions: list[Action] = []

    def submit(self, actions: Sequence[Action], policy: str, when_full: WhenFull = WhenFull.REFUSE) -> None:
        self.actions += actions


class Scheduler:
    """The deciding half of a scheduler."""

    def __init__(self) -> None:
        self.state = ReportedCluster()
        self.state.set_members(members("a", "b"), 0.0)
        self.active = ActivePolicy(PolicyRecord(name="least_loaded"))
        self.policy = self.active.policy = Recorder()
        self.executor = RecordingExecutor()
        self.leading = asyncio.Event()
        self.leading.set()
        self.metrics = SchedulerMetrics(CollectorRegistry())
        self.control = LiveControl(self.state, self.active, self.executor, GuardedCalls(self.metrics))
        self.decider = Decider(self.control, self.leading)
        self.placer = Placer(self.control, self.metrics)

    def place(self, request_id: str = "r", excluded: frozenset[str] = frozenset()) -> tuple[str, str]:
        """Instance and refusal."""
        decision = self.placer.place(Incoming(request_id, "f", 10, 0, 10, excluded))
        return decision.instance_id, decision.refusal


@pytest.fixture
def scheduler() -> Scheduler:
    """One with two instances."""
    return Scheduler()


def test_phases_in_order(scheduler: Scheduler) -> None:
    scheduler.place()
    scheduler.decider.handle_report(event("a", "r", REASONING), 1.0)
    scheduler.decider.handle_report(event("a", "r", ANSWERING, output_tokens=9), 2.0)
    assert scheduler.policy.asked == [("prefill_done", "r"), ("reasoning_ended", "r")]
    assert scheduler.executor.actions == [Migrate("r", "a", "b", "test")]


def test_without_reasoning(scheduler: Scheduler) -> None:
    scheduler.place()
    scheduler.decider.handle_report(event("a", "r", ANSWERING), 1.0)
    assert scheduler.policy.asked == [("prefill_done", "r")]


def test_a_standby_follows_but_does_not_decide(scheduler: Scheduler) -> None:
    scheduler.leading.clear()
    scheduler.decider.handle_report(event("a", "r", REASONING), 1.0)
    assert scheduler.policy.asked == []
    assert scheduler.state.request("r") is not None
    assert scheduler.place("q") == ("a", "")


def test_a_tick_is_told_of_the_one_before_it(scheduler: Scheduler) -> None:
    """Of the same policy's: what another one did by its periods says nothing about this one's."""
    told: list[tuple[float | None, float]] = []

    class Ticks(Recorder):
        def on_tick(self, view: ClusterView, now: float) -> Sequence[Action]:
            told.append((view.last_tick_s, now))
            return ()

    scheduler.active.policy = Ticks()
    for _ in range(3):
        scheduler.decider.tick()
    assert [last_s for last_s, _ in told] == [None, told[0][1], told[1][1]]
    scheduler.active.policy = Ticks()
    scheduler.decider.tick()
    assert told[-1][0] is None


def test_a_tick_sees_the_lengths_that_its_policy_asks_for(scheduler: Scheduler) -> None:
    told: list[int | None] = []

    class Plans(Recorder):
        lengths_period_s: float | None = 60.0

        def on_tick(self, view: ClusterView, now: float) -> Sequence[Action]:
            told.append(None if view.lengths is None else len(view.lengths.arrived()[0]))
            return ()

    scheduler.active.policy = Plans()
    # A standby counts, too.
    scheduler.leading.clear()
    scheduler.decider.handle_report(steady("a"), time.monotonic())
    scheduler.place("r")
    scheduler.leading.set()
    scheduler.decider.tick()
    assert told == [1]
    scheduler.active.policy = Recorder()
    scheduler.decider.handle_report(steady("a"), time.monotonic())
    assert scheduler.state.lengths(time.monotonic()) is None


async def test_who_leads_again_knows_of_no_tick_before(scheduler: Scheduler) -> None:
    told: list[float | None] = []
    ticked = asyncio.Event()

    class Ticks(Recorder):
        tick_interval_s = 0.01

        def on_tick(self, view: ClusterView, now: float) -> Sequence[Action]:
            told.append(view.last_tick_s)
            ticked.set()
            return ()

    async def wait_for_ticks(count: int) -> None:
        async with asyncio.timeout(20.0):
            while len(told) < count:
                await ticked.wait()
                ticked.clear()

    scheduler.active.policy = Ticks()
    async with asyncio.TaskGroup() as tasks:
        ticking = tasks.create_task(scheduler.decider.run_ticks())
        await wait_for_ticks(2)
        assert told[0] is None and told[1] is not None
        scheduler.leading.clear()
        # Until it waits to lead.
        async with asyncio.timeout(20.0):
            while scheduler.control.runner.last_tick_s is not None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        told.clear()
        scheduler.leading.set()
        await wait_for_ticks(1)
        assert told[0] is None
        ticking.cancel()


def test_an_outgrown_stage_is_told_of_once(scheduler: Scheduler) -> None:
    facts = members("a", "b")
    facts.stages = (Stage(0, 120, ("a",)), Stage(120, 4096, ("b",)))
    scheduler.state.set_members(facts, 0.0)
    scheduler.decider.handle_report(steady("a", [request("r", output_tokens=19)]), 1.0)
    assert scheduler.policy.asked == []
    for second in (2.0, 3.0):
        scheduler.decider.handle_report(steady("a", [request("r", output_tokens=20)]), second)
    assert scheduler.policy.asked == [("length_boundary", "r")]
    scheduler.decider.handle_report(steady("b", [request("r", epoch=1, output_tokens=5000)]), 4.0)
    assert scheduler.policy.asked == [("length_boundary", "r")] * 2


def test_a_policy_that_fails_is_counted(scheduler: Scheduler) -> None:
    scheduler.decider.tick()
    assert scheduler.metrics.policy_errors.labels("least_loaded", "tick")._value.get() == 1


@pytest.mark.parametrize("choice", ["nobody", "b"])
def test_a_placement_that_must_not_be_is_stood_in_for(scheduler: Scheduler, choice: str) -> None:
    scheduler.policy.choice = choice
    assert scheduler.place(excluded=frozenset("b")) == ("a", "")


def test_what_comes_with_a_placement_is_carried_out(scheduler: Scheduler) -> None:
    scheduler.policy.also = (SetPool("a", Pool.DECODE_TO_PREFILL),)
    assert scheduler.place() == ("a", "")
    assert scheduler.executor.actions == [SetPool("a", Pool.DECODE_TO_PREFILL)]
    # The stand-in's placement does not need what the policy's did.
    assert scheduler.place(excluded=frozenset("a")) == ("b", "")
    assert len(scheduler.executor.actions) == 1


def test_refusals(scheduler: Scheduler) -> None:
    scheduler.policy.choice = ""
    assert scheduler.place() == ("", "full")
    scheduler.active.follow(PolicyRecord(name="round_robin"), Slo())
    assert scheduler.place(excluded=frozenset("ab")) == ("", "no active instance")


def test_a_policy_unknown_here_leaves_the_present_one(scheduler: Scheduler) -> None:
    scheduler.active.follow(PolicyRecord(name="none_such"), Slo())
    assert scheduler.active.name == "least_loaded"
    scheduler.active.follow(PolicyRecord(name="round_robin"), Slo())
    assert scheduler.active.name == "round_robin"
    scheduler.active.follow(None, Slo())
    assert scheduler.active.name == "least_loaded"


def test_no_swaps_in_one_go() -> None:
    there, back = Migrate("r1", "a", "b", ""), Migrate("r2", "b", "a", "")
    pool = SetPool("a", Pool.DECODE)
    again = Migrate("r1", "a", "c", "")
    also = Migrate("r3", "a", "b", "")
    assert without_swaps([there, pool, back, again, also]) == [there, pool, also]


def _draining(scheduler: Scheduler, count: int) -> Drainer:
    """Of three instances `a` drains, with so many requests; `b` and `c` are free."""
    facts = members("a", "b", "c")
    facts.draining = frozenset("a")
    scheduler.state.set_members(facts, 0.0)
    scheduler.state.apply(steady("a", [request(f"r{n}") for n in range(count)]), 1.0)
    return Drainer(scheduler.state, scheduler.executor, scheduler.leading)


def test_draining_moves_what_is_decoded_and_goes_on_trying(scheduler: Scheduler) -> None:
    drainer = _draining(scheduler, 4)
    drainer.run_once(1.0)
    moves = [a for a in scheduler.executor.actions if isinstance(a, Migrate)]
    assert sorted(m.request_id for m in moves) == ["r0", "r1", "r2", "r3"]
    assert sorted(m.target_id for m in moves) == ["b", "b", "c", "c"]
    # After 2, 4, 8, 16 and then always 16 seconds.
    for second, tries in ((2.5, 1), (3.0, 2), (6.5, 2), (7.0, 3), (15.0, 4), (31.0, 5), (47.0, 6), (63.0, 7)):
        drainer.run_once(second)
        assert len(scheduler.executor.actions) == 4 * tries


def test_draining_orders_a_few_migrations_at_a_time(scheduler: Scheduler) -> None:
    drainer = _draining(scheduler, 20)
    drainer.run_once(1.0)
    assert len(scheduler.executor.actions) == 8
    for action in scheduler.executor.actions:
        assert isinstance(action, Migrate)
        moving = scheduler.state.request(action.request_id)
        assert moving is not None
        scheduler.state.migration_opened(moving, action.target_id)
    drainer.run_once(1.5)
    assert len(scheduler.executor.actions) == 8
    scheduler.state.migration_closed("r0")
    drainer.run_once(1.6)
    # Its own turn comes again later; another one's has come.
    assert [a.request_id for a in scheduler.executor.actions if isinstance(a, Migrate)][8:] == ["r8"]


def test_draining_moves_nothing_to_where_its_kv_does_not_fit(scheduler: Scheduler) -> None:
    drainer = _draining(scheduler, 2)
    facts = members("a", "b", "c")
    facts.draining = frozenset("a")
    other = msgspec.structs.replace(facts.instances["b"], model_fingerprint="other")
    facts.instances = {**facts.instances, "b": other}
    scheduler.state.set_members(facts, 2.0)
    drainer.run_once(2.0)
    assert {a.target_id for a in scheduler.executor.actions if isinstance(a, Migrate)} == {"c"}


def test_a_prompt_that_waits_is_not_migrated(scheduler: Scheduler) -> None:
    drainer = _draining(scheduler, 0)
    waiting = request("w")
    waiting.state = types_pb2.REQUEST_STATE_WAITING
    scheduler.state.apply(steady("a", [request("p", phase=PREFILL), waiting]), 1.0)
    drainer.run_once(1.0)
    assert scheduler.executor.actions == []


def test_another_policy_is_asked_about_what_has_outgrown_its_stage(scheduler: Scheduler) -> None:
    facts = members("a", "b")
    facts.stages = (Stage(0, 120, ("a",)), Stage(120, 4096, ("b",)))
    scheduler.state.set_members(facts, 0.0)
    scheduler.decider.handle_report(steady("a", [request("r", output_tokens=20)]), 1.0)
    successor = scheduler.active.policy = Recorder()
    for second in (2.0, 3.0):
        scheduler.decider.handle_report(steady("a", [request("r", output_tokens=20)]), second)
    assert successor.asked == [("length_boundary", "r")]
