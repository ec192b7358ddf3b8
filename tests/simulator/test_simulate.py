"""The public entry point: results, reproducibility, stale views, limits and errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from simulator.cluster import ClusterSpec, ReportSpec
from simulator.request import SimRequest
from simulator.simulation import SimulationError, simulate
from tailrace.actions import Action, Migrate, Place, Placement, Refuse, SetPool, SetStages
from tailrace.cluster import Arrival, ClusterView, Phase, Pool, RequestState, RequestView, Stage
from tailrace.control.admission import TtftAdmission
from tailrace.intra.orders import Fcfs
from tailrace.intra.pascal import PascalQueue
from tailrace.policy.base import Policy
from tailrace.policy.least_loaded import LeastLoaded
from tailrace.policy.round_robin import RoundRobin
from tailrace.policy.static_pools import StaticPools
from tailrace.slo import Slo
from tests.simulator.moving import MoveEverything
from tests.simulator.worlds import PROFILE

SPEC = ClusterSpec.uniform(3, PROFILE)


def _requests(count: int, every_s: float = 0.05) -> list[SimRequest]:
    return [
        SimRequest(f"r{n}", n * every_s, 20 + n * 37 % 200, (n % 3) * 40, 1 + n * 53 % 150)
        for n in range(count)
    ]


@pytest.mark.parametrize("policy", [MoveEverything(), LeastLoaded()])
def test_equal_arguments_give_equal_results(policy: Policy) -> None:
    def run() -> object:
        result = simulate(SPEC, _requests(60), policy, PascalQueue(), seed=3, sample_interval_s=0.3)
        return (
            result.requests,
            result.migrations,
            result.events_processed,
            result.series.kv_used_tokens.tolist(),
        )

    assert run() == run()


def test_overload_is_refused_on_arrival_and_the_rest_meets_its_slo() -> None:
    # The KV of three instances suffices for about a third of the load.
    requests = [replace(each, reasoning_tokens=0) for each in _requests(600, every_s=0.01)]
    slo = Slo(ttft_s=1.0, tpot_s=None, admit=0.25)

    def run(admission: TtftAdmission | None) -> tuple[int, int, float]:
        done = simulate(SPEC, requests, LeastLoaded(), Fcfs(), admission=admission).requests
        waits = [r.ttft_s for r in done if r.ttft_s is not None and not r.refused]
        return sum(bool(r.refused) for r in done), sum(slo.met_by(r) for r in done), max(waits)

    unlimited = run(None)
    refused, kept, longest_s = run(TtftAdmission.of(slo))
    assert unlimited[0] == 0 and refused > 100
    assert kept > 2 * unlimited[1]
    assert longest_s < 0.25 * unlimited[2]


def test_static_pools_separate_prefill_and_decode() -> None:
    spec = SPEC.with_pools([Pool.PREFILL, Pool.DECODE, Pool.DECODE])
    result = simulate(spec, _requests(40, every_s=0.3), StaticPools(), Fcfs())
    for record in result.requests:
        assert record.placements[0].instance_id == "i000"
        if record.output_tokens > 30:
            assert record.instance_id in ("i001", "i002")
            assert record.migrations == 1


def test_a_tick_sees_the_time_of_the_previous_one() -> None:
    seen: list[tuple[float | None, float]] = []

    class RecordTicks(LeastLoaded):
        tick_interval_s = 0.5

        def on_tick(self, view: ClusterView, now: float) -> Sequence[Action]:
            seen.append((view.last_tick_s, now))
            return ()

    simulate(SPEC, _requests(20), RecordTicks(), Fcfs())
    assert [last_s for last_s, _ in seen] == [None, *(now for _, now in seen[:-1])]


def test_records_are_in_the_order_of_the_requests() -> None:
    requests = _requests(20)[::-1]
    result = simulate(SPEC, requests, RoundRobin(), Fcfs())
    assert [record.request_id for record in result.requests] == [request.request_id for request in requests]


def test_an_idle_instance_takes_the_time_given_by_the_profile() -> None:
    [record] = simulate(SPEC, [SimRequest("r", 1.0, 100, 0, 3)], RoundRobin(), Fcfs()).requests
    prefill_s = PROFILE.step_ms(PROFILE.prefill.ms(0, 100), 0, 0) / 1e3
    assert record.ttft_s == pytest.approx(prefill_s)
    steps_s = sum(PROFILE.step_ms(0.0, 1, kv) for kv in (101, 102)) / 1e3
    assert record.tpot_s == pytest.approx(steps_s / 2)
    assert record.queue_s == 0.0
    assert record.qoe == 1.0


def test_a_long_prompt_is_chunked() -> None:
    spec = ClusterSpec.uniform(1, PROFILE, chunk_budget_tokens=100)
    [record] = simulate(spec, [SimRequest("r", 0.0, 1_050, 0, 1)], RoundRobin(), Fcfs()).requests
    ends = [*range(100, 1_001, 100), 1_050]
    starts = [0, *ends[:-1]]
    wanted = (
        sum(PROFILE.step_ms(PROFILE.prefill.ms(a, b), 0, 0) for a, b in zip(starts, ends, strict=True)) / 1e3
    )
    assert record.ttft_s == pytest.approx(wanted)


def test_series_are_sampled_at_the_interval() -> None:
    result = simulate(SPEC, _requests(40), RoundRobin(), Fcfs(), sample_interval_s=0.25)
    series = result.series
    assert np.allclose(np.diff(series.times_s), 0.25)
    assert series.kv_used_tokens.shape == (len(series.times_s), 3)
    assert series.kv_used_tokens.max() > 0
    assert (series.kv_used_tokens <= PROFILE.kv_capacity_tokens).all()
    assert series.decoding.max() > 0
    assert [change.pool for change in series.pools] == [None] * 3


def test_progress_ends_at_one() -> None:
    seen: list[float] = []
    simulate(SPEC, _requests(30), RoundRobin(), Fcfs(), progress=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


def test_a_request_that_cannot_fit_is_refused_with_a_reason() -> None:
    requests = [SimRequest("long", 0.0, 1_900, 0, 200), SimRequest("short", 0.0, 10, 0, 2)]
    result = simulate(SPEC, requests, RoundRobin(), Fcfs())
    assert "longer than" in result.requests[0].refused
    assert result.requests[0].finish_s is None
    assert result.requests[1].finish_s is not None


class Recorder(Policy):
    """Record everything the policy sees."""

    tick_interval_s = 0.1

    def __init__(self, actions: Sequence[Action] = ()) -> None:
        self.seen: list[tuple[float, tuple[int, int, int], list[RequestView]]] = []
        self.ended: list[tuple[float, RequestView]] = []
        self.grown: list[RequestView] = []
        self._actions = actions

    def place(self, view: ClusterView, arrival: Arrival, now: float) -> Placement:
        self._see(view, now)
        return Refuse("no") if arrival.prompt_tokens == 1 else Place("i000")

    def on_reasoning_ended(self, view: ClusterView, request: RequestView, now: float) -> Sequence[Action]:
        self.ended.append((now, request))
        return ()

    def on_length_boundary(self, view: ClusterView, request: RequestView, now: float) -> Sequence[Action]:
        self.grown.append(request)
        return ()

    def on_tick(self, view: ClusterView, now: float) -> Sequence[Action]:
        self._see(view, now)
        actions, self._actions = self._actions, ()
        return actions

    def _see(self, view: ClusterView, now: float) -> None:
        instance = view.instances["i000"]
        counts = (instance.running, instance.waiting, instance.prefill_backlog_tokens)
        self.seen.append((now, counts, list(instance.requests)))


def test_placements_count_immediately_and_progress_when_reported() -> None:
    policy = Recorder()
    spec = replace(SPEC, report=ReportSpec(interval_s=1.0, delay_s=0.05))
    simulate(spec, [SimRequest("a", 0.0, 50, 0, 400), SimRequest("b", 0.01, 60, 0, 400)], policy, Fcfs())
    _, counts, requests = policy.seen[1]
    assert counts == (0, 1, 50)
    assert [r.state for r in requests] == [RequestState.WAITING]
    # Until the first report, within a second, no request counts as running.
    first_running = next(now for now, counts, _ in policy.seen if counts[0])
    known = [requests for now, _, requests in policy.seen if now >= first_running]
    assert {r.output_tokens for r in known[0]} != {0}
    # Between reports the view does not change.
    tokens = {tuple(r.output_tokens for r in requests) for requests in known}
    assert len(tokens) < len(known) / 3


def test_exact_views_change_with_every_step() -> None:
    policy = Recorder()
    spec = replace(SPEC, report=ReportSpec(interval_s=0.0, delay_s=0.0))
    simulate(spec, [SimRequest("a", 0.0, 50, 0, 400)], policy, Fcfs())
    counts = [requests[0].output_tokens for _, _, requests in policy.seen[1:] if requests]
    assert counts == sorted(set(counts))
    assert len(counts) > 20


def test_phase_events_arrive_after_the_delay_with_the_earlier_state() -> None:
    policy = Recorder()
    spec = replace(SPEC, report=ReportSpec(interval_s=0.5, delay_s=0.03))
    [record] = simulate(spec, [SimRequest("a", 0.0, 50, 10, 40)], policy, Fcfs()).requests
    [(now, request)] = policy.ended
    assert request.phase is Phase.ANSWERING
    assert (request.output_tokens, request.reasoning_tokens, request.phase_tokens) == (10, 10, 0)
    assert record.first_answer_s is not None
    assert now < record.first_answer_s + 0.03
    assert record.answer_blocking_s == pytest.approx(0.0, abs=1e-9)


def test_an_outgrown_stage_is_reported_once() -> None:
    stages = (Stage(0, 100, ("i000",)), Stage(100, 1 << 20, ("i001", "i002")))
    policy = Recorder()
    simulate(replace(SPEC, stages=stages), [SimRequest("a", 0.0, 50, 0, 200)], policy, Fcfs())
    assert [request.context_tokens for request in policy.grown] == [100]


def test_new_stages_report_requests_beyond_them() -> None:
    stages = (Stage(0, 60, ("i000",)), Stage(60, 1 << 20, ("i001", "i002")))
    policy = Recorder((SetStages(stages), SetPool("i001", Pool.DECODE)))
    result = simulate(SPEC, [SimRequest("a", 0.0, 50, 0, 200)], policy, Fcfs())
    assert len(policy.grown) == 1
    assert policy.grown[0].context_tokens >= 60
    assert result.series.stages[-1].stages == stages
    assert result.series.pools[-1].pool is Pool.DECODE


def test_refusals_are_recorded() -> None:
    result = simulate(SPEC, [SimRequest("a", 0.0, 1, 0, 5)], Recorder(), Fcfs())
    assert result.requests[0].refused == "no"


@pytest.mark.parametrize(
    "action",
    [Migrate("nobody", "i000", "i001", ""), Migrate("a", "i000", "nowhere", ""), SetPool("nowhere", None)],
)
def test_actions_with_unknown_names_are_errors(action: Action) -> None:
    with pytest.raises(SimulationError, match=r"(nobody|nowhere)' is not"):
        simulate(SPEC, [SimRequest("a", 0.0, 50, 0, 400)], Recorder([action]), Fcfs())


def test_duplicate_ids_are_rejected() -> None:
    with pytest.raises(ValueError, match="distinct"):
        simulate(SPEC, [SimRequest("a", 0.0, 5, 0, 1), SimRequest("a", 1.0, 5, 0, 1)], RoundRobin(), Fcfs())


@pytest.mark.parametrize(("prompt", "answer", "at_s"), [(0, 1, 0.0), (1, 0, 0.0), (1, 1, -1.0)])
def test_impossible_requests_are_rejected(prompt: int, answer: int, at_s: float) -> None:
    with pytest.raises(ValueError, match="'x'"):
        SimRequest("x", at_s, prompt, 0, answer)
