"""PASCAL's and ARES's claims: well-formed experiments, verdicts on synthetic figures, and small runs."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from experiments.claims import ares, pascal
from experiments.claims.base import QUICK, WHOLE, Experiment, Figures, Finding, Verdict
from experiments.claims.pascal import serving as pascal_serving
from experiments.claims.pascal import single
from experiments.claims.pascal.circular import CircularRoundRobin
from experiments.claims.pascal.measure import serve as serve_pascal
from experiments.claims.pascal.tails import Comparison, mean_tails
from experiments.claims.saturation import poisson_at_load, saturation_rate
from experiments.claims.verdicts import (
    judge_bound,
    judge_effect,
    judge_ordering,
    judge_value,
    number,
    weakest,
)
from experiments.pascal_pacer import measure as measure_pacer
from experiments.pascal_pacer import shown_s
from simulator.cluster import ClusterSpec
from simulator.goodput import percentile_for, tail_by_bin
from simulator.request import SimRequest
from simulator.simulation import simulate
from simulator.views import JobTable
from simulator.workloads.pascal import reasoning_phase
from tailrace.actions import Action
from tailrace.cluster import ClusterView, Phase, RequestView
from tailrace.intra.base import JobView
from tailrace.intra.orders import Fcfs, QuantumRoundRobin
from tailrace.intra.pascal import PascalQueue
from tailrace.policy.least_loaded import FOOTPRINT, LeastLoaded
from tailrace.policy.pascal import Pascal
from tailrace.policy.requests import RequestTable, table_of
from tailrace.profiles import load_profile
from tests.policy.fleets import quick

ALL: tuple[Experiment, ...] = (*pascal.EXPERIMENTS, *ares.EXPERIMENTS)
HOLDS, EXCEEDS = Verdict.HOLDS, Verdict.EXCEEDS
DIRECTION, NOT = Verdict.DIRECTION, Verdict.DOES_NOT_HOLD


def test_every_row_is_claimed_once() -> None:
    ids = Counter(claim.claim_id for experiment in ALL for claim in experiment.claims)
    assert ids == Counter([*(f"P{n}" for n in range(1, 18)), *(f"A{n}" for n in range(1, 13))])


@pytest.mark.parametrize("experiment", ALL, ids=lambda e: e.name)
def test_runs_have_distinct_names_and_can_be_pickled(experiment: Experiment) -> None:
    assert len({run.name for run in experiment.runs}) == len(experiment.runs)
    assert pickle.loads(pickle.dumps(experiment.runs)) == experiment.runs


@pytest.mark.parametrize("experiment", [e for e in ALL if not e.runs], ids=lambda e: e.name)
def test_claims_that_cannot_be_checked_state_the_reason(experiment: Experiment) -> None:
    findings = experiment.judge({})
    assert [f.claim_id for f in findings] == [c.claim_id for c in experiment.claims]
    unchecked = {Verdict.NEEDS_GPU, Verdict.INPUT, Verdict.NOT_REPRODUCIBLE}
    assert all(f.verdict in unchecked and f.why for f in findings)


# ---- verdicts


@pytest.mark.parametrize(
    ("ours", "paper", "verdict"),
    [(-0.5, -0.6, HOLDS), (-0.81, -0.6, EXCEEDS), (-0.1, -0.6, DIRECTION), (0.1, -0.6, NOT), (0, 1, NOT)],
)
def test_an_effect_holds_within_a_third(ours: float, paper: float, verdict: Verdict) -> None:
    assert judge_effect(ours, paper) is verdict
    # Of what is no effect, more is not better.
    assert judge_value(ours, paper) is (DIRECTION if verdict is EXCEEDS else verdict)


def test_verdicts_of_bounds_orderings_and_parts() -> None:
    assert [judge_bound(x, 0.06, 0.5) for x in (0.08, 0.2, 0.6)] == [HOLDS, DIRECTION, NOT]
    orderings = ([True] * 3, [True, True, False], [True, False])
    assert [judge_ordering(x) for x in orderings] == [HOLDS, DIRECTION, NOT]
    assert weakest([HOLDS, NOT, DIRECTION]) is NOT
    assert weakest([HOLDS, EXCEEDS]) is EXCEEDS and weakest([EXCEEDS, DIRECTION]) is DIRECTION


# ---- load


def test_at_saturation_the_kv_is_full_on_average() -> None:
    profile = load_profile("r1-distill-qwen-32b-h100")
    requests = [SimRequest("a", 0.0, 100, 0, 1_000)]
    rate = saturation_rate(profile, requests, 1)
    # Little's law: at that rate, requests in flight times their mean context is the capacity.
    capacity = profile.kv_capacity_tokens
    step_s = profile.step_ms(0.0, round(capacity / 600), capacity) / 1e3
    assert rate * step_s * 1_000 * 600 == pytest.approx(capacity, rel=0.05)
    assert saturation_rate(profile, requests, 8) == pytest.approx(8 * rate)


def test_loads_send_the_same_requests() -> None:
    profile = load_profile("r1-distill-qwen-32b-h100")
    half, full = (poisson_at_load("x", reasoning_phase, 50, load, 3, profile, 1) for load in (0.5, 1.0))
    assert [r.reasoning_tokens for r in half] == [r.reasoning_tokens for r in full]
    assert half[-1].arrival_s == pytest.approx(2 * full[-1].arrival_s)


# ---- PASCAL


def test_tail_latency_by_reasoning_length() -> None:
    assert [percentile_for(n) for n in (4, 5, 9, 10, 19, 20, 99, 100)] == [None, 100, 100, 90, 90, 95, 95, 99]
    reasoning = np.array([0] * 5 + [255] + [256] * 4)
    tails = tail_by_bin(zip(reasoning.tolist(), range(10), strict=True))
    assert tails == {0: 5.0}
    assert mean_tails([{0: 1.0, 256: 2.0}, {0: 3.0}]) == {0: 2.0}
    comparison = Comparison({0: 1.0, 256: 3.0}, {0: 4.0, 256: 2.0, 512: 1.0})
    assert (comparison.best(), comparison.worst()) == (0, 256)
    assert comparison.change(0) == -0.75 and comparison.change_s(256) == 1.0
    with pytest.raises(ValueError):
        Comparison({0: 1.0}, {256: 1.0})


def _pascal_figures(**changes: Figures) -> dict[str, Figures]:
    """Return the figures that the paper reports; `changes` replace those of a scheduler."""
    tails = {
        "fcfs": [70.0, 60.0, 100.0],
        "rr": [25.0, 60.0, 150.0],
        "rr_circular": [40.0, 60.0, 110.0],
        "pascal": [25.0, 59.0, 106.0],
        "no_migration": [30.0, 60.0, 106.0],
        "non_adaptive": [30.0, 60.0, 106.0],
        "late_reports": [25.0, 59.0, 106.0],
    }
    base = {
        "violations": 0.02,
        "tokens_per_s": 100.0,
        "transfer_p99_s": 0.17,
        "ttft_p99_s": 90.0,
        "blocking_p99_s": 0.0,
        "migrations": 9.0,
    }
    latency = {"latency_p50_s": 10.0, "latency_p99_s": 20.0}
    own: dict[str, Mapping[str, float]] = {
        "pascal": {"violations": 0.0069, "ttft_p99_s": 81.0},
        "no_migration": {"blocking_p99_s": 27.0},
        "non_adaptive": {"violations": 0.0745, "latency_p50_s": 12.0, "latency_p99_s": 22.0},
    }
    figures: dict[str, Figures] = {}
    for run in pascal_serving.serving_rows(WHOLE).runs:
        arm = run.name.split("/")[1]
        bins = {"bins": [0.0, 512.0, 5120.0], "tails_s": tails[arm]}
        figures[run.name] = {**base, **latency, **own.get(arm, {}), **bins, **changes.get(arm, {})}
    return figures


def _by_id(findings: object) -> dict[str, Finding]:
    assert isinstance(findings, tuple)
    return {finding.claim_id: finding for finding in findings}


def test_pascal_claims_hold_with_the_figures_of_the_paper() -> None:
    found = _by_id(pascal_serving.judge(WHOLE, _pascal_figures()))
    assert list(found) == [f"P{n}" for n in range(1, 13)]
    # With these tails, RR's best bin is -29%, and its effect on the mixture is twice that of the paper.
    expected = dict.fromkeys(found, HOLDS) | {"P12": EXCEEDS}
    assert {name: finding.verdict for name, finding in found.items()} == expected
    assert "-64%" in found["P1"].ours
    # Beside the best bin: the tail of all requests, and RR's other reading.
    assert all(
        found[row].figures["alpaca_eval_overall_change"] == pytest.approx(-0.1) for row in ("P1", "P3")
    )
    assert found["P3"].figures["arena_hard_circular_best_change"] == pytest.approx(-0.375)
    assert found["P12"].figures["overall_change"] == pytest.approx(-0.1)


def test_findings_include_their_spread_over_seeds() -> None:
    figures = _pascal_figures()
    for name, run in list(figures.items()):
        _, arm, _, seed = name.split("/")
        if arm == "pascal":
            figures[name] = {**run, "violations": 0.001 * int(seed)}
    found = _by_id(pascal_serving.judge(WHOLE, figures))
    assert found["P9"].spreads["pascal"] == pytest.approx(0.00196, rel=0.01)
    assert found["P9"].spreads["non_adaptive"] == 0.0
    assert "0.30% ± 0.20%" in found["P9"].ours


def test_a_quick_check_has_the_same_rows_and_fewer_runs() -> None:
    quick, whole = pascal.experiments(QUICK), pascal.experiments(WHOLE)
    assert [e.claims for e in quick] == [e.claims for e in whole]
    assert 3 * sum(r.cost_s for e in quick for r in e.runs) < sum(r.cost_s for e in whole for r in e.runs)


def test_pascal_claims_do_not_hold_with_worse_figures() -> None:
    worse: Figures = {
        "violations": 0.5,
        "tokens_per_s": 50.0,
        "blocking_p99_s": 30.0,
        "tails_s": [80.0, 90.0, 200.0],
    }
    found = _by_id(pascal_serving.judge(WHOLE, _pascal_figures(pascal=worse)))
    for row in ("P1", "P2", "P3", "P4", "P5", "P6", "P8", "P9", "P11", "P12"):
        assert found[row].verdict is NOT, row
    figures = _pascal_figures(rr={"violations": 0.0}, non_adaptive={"violations": 0.02})
    part = _by_id(pascal_serving.judge(WHOLE, figures))
    assert part["P5"].verdict is NOT and part["P9"].verdict is DIRECTION


def test_single_gpu_claims_are_judged() -> None:
    def figures(short: float, long: float, attained: float, attained_long: float) -> Figures:
        return {
            "latency_short_s": short,
            "latency_long_s": long,
            "attained": attained,
            "attained_long": attained_long,
        }

    arms = {
        "oracle": figures(1.0, 10.0, 1.0, 1.0),
        "fcfs": figures(5.0, 12.0, 0.4, 0.4),
        "rr": figures(1.1, 17.0, 0.9, 0.98),
        "rr_circular": figures(2.0, 12.0, 0.5, 0.7),
    }
    runs = {run.name: arms[run.name.split("/")[1]] for run in single.one_gpu_rows(WHOLE).runs}
    found = _by_id(single.judge(WHOLE, runs))
    assert [f.verdict for f in found.values()] == [HOLDS, HOLDS, HOLDS, HOLDS]
    assert "1.20 ± 0.00x in circular order" in found["P13"].ours and "direction only" in found["P13"].why
    assert found["P14"].why.endswith("RR in circular order 50% ± 0%; holds at no load tried")
    assert found["P16"].ours.startswith("FCFS 5.00 ± 0.00x : 1.20 ± 0.00x, RR 1.10")
    assert "in circular order at no load tried" in found["P17"].why
    runs = {run.name: arms["oracle"] for run in single.one_gpu_rows(WHOLE).runs}
    assert [f.verdict for f in _by_id(single.judge(WHOLE, runs)).values()] == [NOT, NOT, NOT, NOT]


def test_a_late_answer_reduces_qoe() -> None:
    spec = ClusterSpec.uniform(1, load_profile("r1-distill-qwen-32b-h100"), max_num_seqs=1)
    requests = [SimRequest(f"r{n}", 0.0, 128, 0, 256) for n in range(2)]
    first, second = simulate(spec, requests, LeastLoaded(load=FOOTPRINT), Fcfs()).requests
    assert single.qoe_with_ttfat(first) == pytest.approx(1.0)
    assert second.qoe == 1.0 and second.ttft_s is not None
    # All tokens are d late, and reading takes D = 25.6 s: (D n - t) / ((D + d) n - t), t = p n (n - 1) / 2.
    late, area = second.ttft_s - 0.25, 25.5 * 256 - 0.1 * 256 * 255 / 2
    assert single.qoe_with_ttfat(second) == pytest.approx(area / (area + late * 256))


@pytest.mark.parametrize(
    "arm", ["fcfs", "rr", "rr_circular", "pascal", "no_migration", "non_adaptive", "late_reports"]
)
def test_a_small_run_of_pascal(arm: str) -> None:
    figures = serve_pascal("alpaca_eval", arm, 4.0, 50, 1)
    assert figures["finished"] == 50.0
    assert (number(figures, "migrations") > 0.0) == (arm in ("pascal", "non_adaptive", "late_reports"))


@quick
@given(
    st.lists(st.floats(0.0, 5.0), min_size=2, max_size=40).map(lambda gaps: np.cumsum(gaps)),
    st.floats(0.01, 1.0),
)
def test_the_pacer_shows_each_token_when_its_reader_gets_to_it(
    ready_s: NDArray[np.float64], pace_s: float
) -> None:
    shown = shown_s(ready_s, pace_s)
    due_s = -np.inf
    for ready, at in zip(ready_s, shown, strict=True):
        due_s = max(ready, due_s + pace_s)
        assert at == pytest.approx(due_s, abs=1e-9)
    # The longest wait for a token gets no longer than it was, or than the pace.
    assert np.diff(shown).max() <= max(np.diff(ready_s).max(), pace_s) + 1e-9


def test_pacing_is_judged_on_one_run() -> None:
    found = measure_pacer("pascal", 1.1, 120, 1)
    assert found["paced_stalled"] <= found["stalled"]
    # Answers are generated faster than they are read, so their last token is shown later.
    assert found["later_p50_s"] > 0.0


def test_turns_are_circular() -> None:
    order = CircularRoundRobin(quantum_tokens=10)

    def job(arrival: int, tokens: int) -> JobView:
        return JobView(arrival, Phase.REASONING, 5, tokens, tokens)

    first, second = order.rank(job(0, 9)), order.rank(job(1, 0))
    assert first < second and order.rank_holds(job(0, 9)) == 1
    # At the end of its turn it goes behind whoever waits, however many quanta those have used...
    again = order.rank(job(0, 10))
    assert second < again
    # ...but ahead of those that come later, unlike by quanta used.
    assert again < order.rank(job(2, 0))
    assert QuantumRoundRobin(quantum_tokens=10).rank(job(0, 10)) > QuantumRoundRobin().rank(job(2, 0))
    # A rank that is read again is the same.
    assert order.rank(job(0, 19)) == again
    assert order.takes_from(second, again) and not order.takes_from(again, second)


def test_requests_in_turn_are_served_in_figure_2c() -> None:
    # Two at a time: A and B decode, C waits until A's turn ends, and A then until B's does.
    profile = load_profile("r1-distill-qwen-32b-h100")
    spec = ClusterSpec.uniform(1, profile, max_num_seqs=2)
    requests = [SimRequest(name, at_s, 64, 0, 400) for name, at_s in (("a", 0.0), ("b", 0.5), ("c", 1.0))]
    order = CircularRoundRobin(quantum_tokens=160)
    done = {r.request_id: r for r in simulate(spec, requests, LeastLoaded(load=FOOTPRINT), order).requests}
    firsts = [done[name].ttft_s for name in "abc"]
    fcfs = simulate(spec, requests, LeastLoaded(load=FOOTPRINT), Fcfs()).requests[2].ttft_s
    assert firsts[2] is not None and fcfs is not None and firsts[2] < 0.6 * fcfs
    assert done["a"].preemptions_swapped >= 1 and done["b"].preemptions_swapped >= 1


class _Checked(Pascal):
    """Compare the incremental counts of each instance with a recount."""

    checks = 0

    def on_reasoning_ended(self, view: ClusterView, request: RequestView, now: float) -> Sequence[Action]:
        for instance in view.instances.values():
            assert isinstance(instance.requests, JobTable)
            for without in ("", request.request_id):
                counted = table_of(instance.requests).phase_load(300, without)
                each = RequestTable(tuple(instance.requests)).phase_load(300, without)
                assert (counted.reasoning, counted.fresh_answering) == (each.reasoning, each.fresh_answering)
                assert counted.least_pacer_slack_tokens == pytest.approx(each.least_pacer_slack_tokens)
                self.checks += 1
        return super().on_reasoning_ended(view, request, now)


def test_incremental_phase_counts_equal_a_recount() -> None:
    profile = load_profile("r1-distill-qwen-32b-h100")
    spec = ClusterSpec.uniform(3, profile, kv_capacity_tokens=12_000)
    requests = [
        SimRequest(r.request_id, r.arrival_s, 128, r.reasoning_tokens, 3 * r.reasoning_tokens)
        for r in poisson_at_load("x", reasoning_phase, 60, 1.5, 1, profile, 1)
    ]
    policy = _Checked()
    simulate(spec, requests, policy, PascalQueue(demotion_tokens=900))
    assert policy.checks > 100
