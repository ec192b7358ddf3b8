"""The desired and active instances that a scheduler exports by model."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from scheduler_svc.desired import LOOP, DesiredMetrics
from tailrace.actions import Refuse
from tailrace.cluster import Arrival, CachedTokens
from tailrace.control.active_policy import ActivePolicy
from tailrace.control.events import Arrived
from tailrace.control.guard import PlainCalls
from tailrace.control.live import LiveControl
from tailrace.control.reported_cluster import ReportedCluster
from tailrace.lengths import LengthStatistics
from tailrace.model_identity import ModelIdentity
from tailrace.records import PolicyRecord, ServiceRecord
from tailrace.scaling import Scaling
from tailrace.slo import Slo
from tailrace.telemetry.incidents import LOOP_FAILURES
from tests.scheduler.facts import GONE, event, instance, members, report_to, request, set_members, steady
from tests.static_members import StaticMembers

SCALING = Scaling(window_s=12.0, up_delay_s=2.0, cooldown_s=5.0)
DESIRED, ACTIVE = "tailrace_desired_instances", "tailrace_active_instances"


class Scheduler:
    """What exports the numbers, on a model that a test feeds."""

    def __init__(self, fleet: StaticMembers, scaling: Scaling = SCALING) -> None:
        self.members = fleet
        self.state = ReportedCluster()
        self.leading = asyncio.Event()
        self.leading.set()
        self.active = ActivePolicy(PolicyRecord(name="least_loaded"))
        set_members(self.state, fleet, 0.0)
        self.metrics = DesiredMetrics(self.state, fleet, self.active, scaling, self.leading)
        self._registry = CollectorRegistry()
        self._registry.register(self.metrics)

    def exported(self, name: str = DESIRED) -> dict[str, float]:
        """Return a metric's values by model."""
        families = {family.name: family.samples for family in self._registry.collect()}
        return {sample.labels["model"]: sample.value for sample in families[name]}

    def sample(self, *times_s: float) -> float:
        """Sample at these times; return what is desired of the tiny model then."""
        for now_s in times_s:
            self.metrics.sample(now_s)
        return self.exported()["tiny"]


def of_models(models: Mapping[str, str]) -> StaticMembers:
    """Return a membership of instances with these models."""
    return StaticMembers(
        instances={
            name: msgspec.structs.replace(instance(name), model=model) for name, model in models.items()
        }
    )


def test_it_exists_from_the_start_and_for_every_model() -> None:
    scheduler = Scheduler(of_models({"a": "tiny", "b": "tiny", "c": "large"}))
    scheduler.sample(0.0)
    assert scheduler.exported() == scheduler.exported(ACTIVE) == {"tiny": 2.0, "large": 1.0}
    # What is there is desired until a cool-down has asked for less.
    assert scheduler.sample(4.0) == 2.0
    assert scheduler.sample(5.0, 6.0) == 1.0


def test_a_model_without_instances_is_desired_once_a_front_end_serves_it() -> None:
    scheduler = Scheduler(StaticMembers())
    scheduler.metrics.sample(0.0)
    assert scheduler.exported() == {}
    front_end = ServiceRecord(
        kind="frontend", service_id="f", incarnation="1", address="", model="tiny", model_key="k"
    )
    scheduler.members.services["frontend", "f"] = front_end
    assert scheduler.sample(1.0) == 1.0
    assert scheduler.exported(ACTIVE) == {"tiny": 0.0}


def test_a_request_without_an_instance_makes_one_desired_at_once_until_none_asks() -> None:
    scheduler = Scheduler(members("a"), replace(SCALING, least=0))
    front_end = ServiceRecord(
        kind="frontend", service_id="f", incarnation="1", address="", model="large", model_key="k:w"
    )
    scheduler.members.instances["a"] = msgspec.structs.replace(
        instance("a"), model_identity=ModelIdentity("other", "", "")
    )
    set_members(scheduler.state, scheduler.members, 0.0)
    scheduler.members.services["frontend", "f"] = front_end

    def sample(now_s: float) -> float:
        scheduler.metrics.sample(now_s)
        return scheduler.exported()["large"]

    assert sample(0.0) == 0.0
    scheduler.metrics.asked_in_vain("other", 0.5)
    assert sample(1.0) == 0.0
    scheduler.metrics.asked_in_vain("k:w", 1.5)
    assert sample(2.0) == 1.0
    # The client has given up; its wish counts for a cool-down.
    assert [sample(now_s) for now_s in (4.0, 5.0, 9.0)] == [1.0, 1.0, 1.0]
    assert [sample(now_s) for now_s in (9.5, 10.0)] == [0.0, 0.0]


def test_a_model_goes_to_zero_once_nothing_arrives_or_runs() -> None:
    scheduler = Scheduler(members("a"), replace(SCALING, least=0))
    report_to(scheduler.state, steady("a", [request("r", prompt_tokens=100)]), 0.0)
    times_s = [float(second) for second in range(60)]
    assert scheduler.sample(*times_s) == 1.0
    report_to(scheduler.state, event("a", "r", GONE, output_tokens=7), 60.0)
    report_to(scheduler.state, steady("a"), 60.0)
    assert scheduler.sample(60.0, 64.0) == 1.0
    assert scheduler.sample(65.0, 66.0) == 0.0


def test_a_model_that_has_gone_is_not_exported() -> None:
    scheduler = Scheduler(members("a"))
    scheduler.sample(0.0)
    scheduler.members.instances.clear()
    set_members(scheduler.state, scheduler.members, 1.0)
    scheduler.metrics.sample(1.0)
    assert scheduler.exported() == scheduler.exported(ACTIVE) == {}


def test_only_the_leader_exports_and_a_standby_knows_the_load() -> None:
    scheduler = Scheduler(members("a"))
    scheduler.leading.clear()
    scheduler.metrics.sample(0.0)
    # Another scheduler places: the requests come with a report.
    report_to(scheduler.state, steady("a", [request(f"r{n}", prompt_tokens=8_000) for n in range(100)]), 1.0)
    scheduler.metrics.sample(1.0)
    scheduler.metrics.sample(2.0)
    scheduler.metrics.sample(3.0)
    assert scheduler.exported() == {}
    scheduler.leading.set()
    assert scheduler.exported()["tiny"] > 1


def test_draining_instances_are_not_active() -> None:
    scheduler = Scheduler(members("a", "b"))
    scheduler.members.draining = frozenset("b")
    set_members(scheduler.state, scheduler.members, 0.0)
    scheduler.sample(0.0)
    assert scheduler.exported(ACTIVE) == {"tiny": 1.0}


def test_arrivals_and_finished_requests_are_demand() -> None:
    scheduler = Scheduler(members("a"))
    for number in range(3):
        scheduler.state.place(Arrival(f"r{number}", 100, 10), "a", 1.0)
    scheduler.state.place(Arrival("cached", 100, 10, cached={"a": CachedTokens(64, 64)}), "a", 1.0)
    # Continues after its instance was lost: no new demand.
    scheduler.state.place(Arrival("old", 100, 10, output_tokens=5), "a", 1.0)
    report_to(scheduler.state, event("a", "r0", GONE, output_tokens=7), 2.0)
    lengths = scheduler.state.demand("tiny", 2.0)
    assert sorted(lengths.arrived()[0]) == [36, 100, 100, 100]
    assert [column.tolist() for column in lengths.finished()] == [[100], [7], [1.0]]
    assert len(scheduler.state.demand("tiny", 100.0).arrived()[0]) == 0


def test_what_is_refused_as_late_is_demand() -> None:
    scheduler = Scheduler(members("a"))
    control = LiveControl(scheduler.state, scheduler.active, _Nothing(), PlainCalls())
    scheduler.active.slo = Slo(admit=1.0)
    report = steady("a")
    report.load.prefill_delay_s = 100.0
    report_to(scheduler.state, report, 1.0)
    placed = control.handle(Arrived(Arrival("r", 300, 10), 1.0, 0.0))
    assert isinstance(placed.placement, Refuse) and placed.placement.final
    assert scheduler.state.demand("tiny", 1.0).arrived()[0].tolist() == [300]


class _Nothing:
    """Carries out nothing."""

    def submit(self, *_: object) -> None:
        """See Executor."""


def test_a_model_that_fails_does_not_keep_the_others_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler(of_models({"a": "bad", "b": "tiny"}))
    scheduler.sample(0.0)
    demand = scheduler.state.demand

    def fails(model: str, now_s: float) -> LengthStatistics:
        if model == "bad":
            raise ZeroDivisionError
        return demand(model, now_s)

    monkeypatch.setattr(scheduler.state, "demand", fails)
    before = LOOP_FAILURES.labels(LOOP)._value.get()
    report_to(scheduler.state, steady("b", [request(f"r{n}", prompt_tokens=8_000) for n in range(100)]), 1.0)
    assert scheduler.sample(1.0, 2.0, 3.0) > 1.0
    assert scheduler.exported()["bad"] == 1.0
    assert LOOP_FAILURES.labels(LOOP)._value.get() == before + 3
