"""Waiting prompts are returned and placed again; views at ticks contain the lengths of the period."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.cluster import ClusterSpec, ReportSpec
from simulator.events import NEVER
from simulator.instance import Instance
from simulator.records import SimResult
from simulator.request import SimRequest
from simulator.simulation import simulate
from tailrace.actions import Action, Place, Placement, Refuse, ReturnPrompts
from tailrace.cluster import Arrival, ClusterView, InstanceView, RequestState, Stage
from tailrace.intra.orders import Fcfs
from tailrace.lengths import LengthStatistics
from tailrace.policy.cascade.policy import Cascade
from tailrace.policy.least_loaded import LeastLoaded
from tests.simulator.moving import MoveEverything
from tests.simulator.worlds import INTRA, PROFILE, Watched, assert_empty, recount, workloads


class ReturnEverything(MoveEverything):
    """Return every waiting prompt and migrate running requests at each tick."""

    def on_tick(self, view: ClusterView, now: float) -> Sequence[Action]:
        waiting = [
            ReturnPrompts(
                name, tuple(r.request_id for r in instance.requests if r.state is RequestState.WAITING)
            )
            for name, instance in view.instances.items()
        ]
        return [*super().on_tick(view, now), *(action for action in waiting if action.request_ids)]

    def place(self, view: ClusterView, arrival: Arrival, now: float) -> Placement:
        names = [name for name in view.instances if name not in arrival.excluded]
        return Place(names[arrival.seq % len(names)])


def spec_of(interval_s: float = 0.0517) -> ClusterSpec:
    spec = ClusterSpec.uniform(
        3,
        PROFILE,
        kv_capacity_tokens=400,
        block_tokens=8,
        host_kv_bytes=400 * PROFILE.kv_bytes_per_token,
        max_num_seqs=3,
        chunk_budget_tokens=32,
    )
    return replace(spec, report=ReportSpec(interval_s=interval_s, delay_s=0.0021))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    requests=workloads(most=14, span_s=0.3),
    intra=st.sampled_from(sorted(INTRA)),
    interval_s=st.sampled_from([0.0, 0.0517]),
)
def test_every_token_is_generated_once_despite_returns(
    requests: list[SimRequest], intra: str, interval_s: float
) -> None:
    def run(most: int) -> tuple[Watched, SimResult]:
        simulation = Watched(spec_of(interval_s), requests, ReturnEverything(), INTRA[intra], most)
        return simulation, simulation.run(None)

    with pytest.MonkeyPatch.context() as patch:
        begin = Instance._plan_run

        def checked(instance: Instance, now: float) -> None:
            begin(instance, now)
            recount(instance)

        patch.setattr(Instance, "_plan_run", checked)
        jumping, result = run(NEVER)
        stepping, expected = run(1)
    for record, other in zip(result.requests, expected.requests, strict=True):
        times = jumping.token_times[record.request_id]
        assert len(times) == record.output_tokens and (np.diff(times) > 0).all()
        assert [p.instance_id for p in record.placements] == [p.instance_id for p in other.placements]
        assert len(record.placements) > record.migrations
    assert stepping.token_times.keys() == jumping.token_times.keys()
    for instance in jumping.instances:
        assert_empty(instance)


class FirstThenSecond(LeastLoaded):
    """Place everything on the first instance, and returned prompts on the second."""

    tick_interval_s = 0.2

    def __init__(self) -> None:
        self.views: list[InstanceView] = []
        self.arrivals: list[Arrival] = []

    def place(self, view: ClusterView, arrival: Arrival, now: float) -> Placement:
        self.arrivals.append(arrival)
        return Place("i001" if arrival.excluded else "i000")

    def on_tick(self, view: ClusterView, now: float) -> Sequence[Action]:
        self.views.append(view.instances["i000"])
        waiting = [r.request_id for r in view.instances["i000"].requests if r.state is RequestState.WAITING]
        return [ReturnPrompts("i000", ("nobody", *waiting)[1:])] if waiting else []


def test_a_waiting_prompt_is_placed_elsewhere_and_a_running_one_stays() -> None:
    requests = [SimRequest("a", 0.0, 300, 0, 90), SimRequest("b", 0.01, 300, 0, 50)]
    policy = FirstThenSecond()
    first, second = simulate(spec_of(0.05), requests, policy, Fcfs()).requests
    assert [p.instance_id for p in first.placements] == ["i000"]
    assert [p.instance_id for p in second.placements] == ["i000", "i001"]
    assert second.migrations == 0 and second.queue_s is not None
    assert policy.arrivals[-1].excluded == {"i000"}
    assert [arrival.seq for arrival in policy.arrivals] == [0, 1, 2]
    # The tick is at 0.2 s; ordering, placing and submitting take a few milliseconds.
    assert 0.2 < second.placements[1].at_s < 0.21
    # The scheduler stops counting it immediately.
    assert [view.waiting for view in policy.views[:2]] == [1, 0]


def test_a_prompt_without_another_place_stays() -> None:
    class Refusing(FirstThenSecond):
        def place(self, view: ClusterView, arrival: Arrival, now: float) -> Placement:
            return Refuse("full") if arrival.excluded else Place("i000")

    requests = [SimRequest("a", 0.0, 300, 0, 60), SimRequest("b", 0.01, 300, 0, 50)]
    result = simulate(spec_of(0.05), requests, Refusing(), Fcfs())
    assert all(r.finish_s is not None and len(r.placements) == 1 for r in result.requests)


def test_ticks_see_the_lengths_of_the_period() -> None:
    seen: list[tuple[float, LengthStatistics | None]] = []

    class RecordLengths(LeastLoaded):
        tick_interval_s = 1.0
        lengths_period_s: float | None = 4.0

        def on_tick(self, view: ClusterView, now: float) -> Sequence[Action]:
            seen.append((now, view.lengths))
            return ()

    requests = [SimRequest(f"r{n}", 0.013 + n * 0.5, 20 + n, 0, 5) for n in range(20)]
    result = simulate(ClusterSpec.uniform(1, PROFILE), requests, RecordLengths(), Fcfs())
    assert len(seen) > 8
    for now, lengths in seen:
        assert lengths is not None
        since_s = now - lengths.seconds
        assert now - 4.0 - 4.0 / 12 < since_s <= max(0.0, now - 4.0) + 1e-9
        expected = {r.prompt_tokens for r in result.requests if since_s < r.arrival_s <= now}
        assert set(lengths.arrived()[0].tolist()) - expected <= {
            r.prompt_tokens for r in result.requests if r.arrival_s == pytest.approx(since_s)
        }
        assert expected <= set(lengths.arrived()[0].tolist())
        prompts, outputs, _ = lengths.finished()
        done = {r.prompt_tokens for r in result.requests if (r.finish_s or 1e9) <= now}
        assert set(prompts.tolist()) <= done and set(outputs.tolist()) <= {5}


def test_waiting_prompts_follow_a_new_plan() -> None:
    """Long prompts overload the short stage; when the stages change, waiting prompts move."""
    spec = replace(
        ClusterSpec.uniform(4, PROFILE, kv_capacity_tokens=4_000, max_model_len=4_096),
        stages=(Stage(0, 2_000, ("i000",)), Stage(2_000, 131_072, ("i001", "i002", "i003"))),
    )
    requests = [SimRequest(f"r{n:03d}", n * 0.05, 1_500 if n % 3 else 30, 0, 10) for n in range(300)]
    policy = Cascade(PROFILE, replan_s=5.0, plan_requests=20.0)
    result = simulate(spec, requests, policy, Fcfs())
    changed = [change.at_s for change in result.series.stages[1:]]
    returned = [r for r in result.requests if len(r.placements) > 1 + r.migrations]
    assert returned and changed
    for record in returned:
        assert record.placements[0].instance_id == "i000"
        assert record.placements[1].at_s > min(changed)
    waited = np.array([r.ttft_s for r in result.requests if r.arrival_s > 10.0])
    assert waited.mean() < np.mean([r.ttft_s for r in result.requests if r.arrival_s < 5.0])
