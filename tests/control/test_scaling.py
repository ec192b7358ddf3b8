"""The desired number of instances: what a load needs, and how the number follows it."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.cluster import InstanceState, InstanceView
from tailrace.lengths import LengthStatistics, Rows
from tailrace.perf.measured import Measured
from tailrace.perf.steps import NOMINAL as NOMINAL_NAME
from tailrace.perf.steps import StepModel
from tailrace.profiles import load_profile
from tailrace.scaling import DEFAULT_SCALING, DesiredInstances, Need, Scaling, need
from tailrace.slo import Slo
from worker_agent.engine.simulated.settings import at_speed

NOMINAL = StepModel.of_profile(None)
SLO = Slo()
CAPACITY = 100_000

lengths = st.integers(1, 20_000)
requests = st.lists(st.tuples(lengths, lengths), min_size=1, max_size=20)
slos = st.builds(
    Slo,
    ttft_s=st.none() | st.floats(1e-3, 100.0),
    tpot_s=st.none() | st.floats(1e-3, 10.0),
)


def instance(name: str = "a", **fields: object) -> InstanceView:
    return replace(
        InstanceView(name, kv_capacity_tokens=CAPACITY, max_num_seqs=256),
        **fields,  # type: ignore[arg-type]
    )


@st.composite
def loaded(draw: st.DrawFn) -> InstanceView:
    return instance(
        running=draw(st.integers(0, 256)),
        waiting=draw(st.integers(0, 1_000)),
        prefill_backlog_tokens=draw(st.integers(0, 1_000_000)),
        kv_used_tokens=draw(st.integers(0, CAPACITY)),
    )


fleets = st.lists(loaded(), min_size=1, max_size=5).map(
    lambda found: [replace(each, instance_id=str(number)) for number, each in enumerate(found)]
)


def of(done: list[tuple[int, int]], seconds: float = 60.0) -> LengthStatistics:
    """Requests that arrived and finished within so many seconds."""
    return LengthStatistics.of(seconds, [prompt for prompt, _ in done], done)


def needed(fleet: list[InstanceView], done: list[tuple[int, int]], slo: Slo = SLO) -> Need:
    return need(fleet, of(done), slo, DEFAULT_SCALING, NOMINAL)


@given(fleets, requests, slos, st.integers(2, 50))
def test_a_higher_rate_needs_more(
    fleet: list[InstanceView], done: list[tuple[int, int]], slo: Slo, times: int
) -> None:
    assert needed(fleet, done * times, slo).serving >= needed(fleet, done, slo).serving * (1 - 1e-9)


@given(fleets, requests, slos, st.floats(1.0, 10.0))
def test_longer_requests_need_more(
    fleet: list[InstanceView], done: list[tuple[int, int]], slo: Slo, factor: float
) -> None:
    longer = [(math.ceil(prompt * factor), math.ceil(output * factor)) for prompt, output in done]
    assert needed(fleet, longer, slo).serving >= needed(fleet, done, slo).serving * (1 - 1e-9)


@given(fleets, loaded(), requests, slos)
def test_more_on_an_instance_needs_more(
    fleet: list[InstanceView], more: InstanceView, done: list[tuple[int, int]], slo: Slo
) -> None:
    first = fleet[0]
    fuller = replace(
        first,
        running=first.running + more.running,
        waiting=first.waiting + more.waiting,
        # Of as many prompts: that the same tokens are of more is less work.
        prefill_backlog_tokens=(first.prefill_backlog_tokens + more.prefill_backlog_tokens)
        * (first.waiting + more.waiting + 1),
        kv_used_tokens=first.kv_used_tokens + more.kv_used_tokens,
    )
    before, after = needed(fleet, done, slo), needed([fuller, *fleet[1:]], done, slo)
    assert after.serving >= before.serving * (1 - 1e-9)
    assert after.holding >= before.holding


def test_nothing_needs_nothing() -> None:
    assert needed([instance()], []) == Need(0.0, 0)
    assert needed([], [(100, 100)]) == Need(0.0, 0)


def test_a_request_needs_an_instance_whatever_it_holds() -> None:
    for busy in (instance(running=1), instance(waiting=1), instance(running=1, kv_capacity_tokens=0)):
        assert needed([busy], []).holding == 1


def test_the_number_of_instances_does_not_change_what_a_rate_needs() -> None:
    done = [(1_000, 200)] * 6_000
    roomy = instance(kv_capacity_tokens=10 * CAPACITY, max_num_seqs=0)
    alone, many = needed([roomy], done), needed([replace(roomy, instance_id=str(n)) for n in range(8)], done)
    assert math.isclose(alone.serving, many.serving)
    # 100 requests a second, each 18 ms of prefill and 200 * 0.058 ms of decode steps, and what is left for
    # the steps' base.
    assert 100 * (0.018 + 200 * 58e-6) < alone.serving * DEFAULT_SCALING.utilization < 3.4


@given(
    st.lists(st.tuples(lengths, lengths), min_size=1, max_size=5),
    st.lists(st.tuples(lengths, lengths), min_size=1, max_size=5),
    slos,
    st.integers(1_000, 10_000_000),
    st.integers(0, 512),
)
def test_the_capacity_is_the_highest_rate_that_fits(
    arrived: list[tuple[int, int]],
    finished: list[tuple[int, int]],
    slo: Slo,
    kv_tokens: int,
    slots: int,
) -> None:
    """At that rate, a limit is reached and none exceeded; half of the rows stand for two requests each."""
    prompts, done = [prompt for prompt, _ in arrived], np.array(finished)
    found = LengthStatistics(
        60.0,
        (Rows(np.array([[prompt] for prompt in prompts]), 1), Rows(np.array([[prompts[0]]]), 2)),
        (Rows(done, 1), Rows(done[:1], 2)),
    )
    fleet = [instance(kv_capacity_tokens=kv_tokens, max_num_seqs=slots)]
    scaling = Scaling(utilization=0.5)
    serving = need(fleet, found, replace(slo, tpot_s=None), scaling, NOMINAL).serving
    prompts += [prompts[0]] * 2
    rate_per_s = len(prompts) / 60.0 / 0.5 / serving
    done = np.concatenate([done, done[:1], done[:1]])
    # Of each request: its prefill, and what it adds to each of its decode steps, token by token.
    prefill_s = sum(NOMINAL.compute_s(prompt) for prompt in prompts) / len(prompts)
    contexts = sum(output * (prompt + output / 2) for prompt, output in done.tolist()) / len(done)
    outputs = float(done[:, 1].mean())
    decodes_s = NOMINAL.per_request_s * outputs + NOMINAL.per_kv_token_s * contexts
    base_s = max(NOMINAL.decode_base_s, NOMINAL.prefill_base_s)
    busy = rate_per_s * (prefill_s + decodes_s)
    step_s = base_s / (1.0 - busy) if busy < 1.0 - 1e-9 else math.inf
    least_left = 0.1
    limits = [busy]
    if slo.ttft_s is not None:
        limits.append(busy / max(least_left, 1 - (base_s + prefill_s) / slo.ttft_s))
    if busy < 1.0 - 1e-9:
        limits.append(rate_per_s * step_s * contexts / kv_tokens)
        limits.append(rate_per_s * step_s * sum(prompts) / len(prompts) / NOMINAL.chunk_tokens)
        if slots:
            limits.append(rate_per_s * step_s * outputs / slots)
    assert max(limits) == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize(("tpot_s", "left"), [(0.0127, 0.5), (0.0064, 0.1), (0.03, 0.79)])
def test_the_tpot_slo_leaves_a_share_of_each_step(tpot_s: float, left: float) -> None:
    done = [(100, 1)] * 60
    base_s = NOMINAL.decode_base_s
    roomy = instance(kv_capacity_tokens=10**9, max_num_seqs=0)
    slo = Slo(ttft_s=None, tpot_s=tpot_s)
    expected = max(0.1, 1.0 - base_s / tpot_s)
    assert expected == pytest.approx(left, abs=0.01)
    work_s = NOMINAL.compute_s(100) + NOMINAL.per_request_s + NOMINAL.per_kv_token_s * 100.5
    assert needed([roomy], done, slo).serving == pytest.approx(work_s / expected / 0.7, rel=1e-6)
    # What runs takes its part of a step from what is left.
    batch_s = 50 * NOMINAL.per_request_s + 90_000 * NOMINAL.per_kv_token_s
    busy = replace(roomy, running=50, kv_used_tokens=100_000, coming_tokens=10_000)
    running = (batch_s + NOMINAL.compute_s(100) * tpot_s) / (tpot_s * expected) / 0.7
    assert needed([busy], done, slo).serving == pytest.approx(max(running, work_s / expected / 0.7), rel=1e-6)


def test_what_waits_is_worked_off_in_time() -> None:
    done = [(100, 10)] * 60
    queued = instance(waiting=300, prefill_backlog_tokens=30_000, coming_tokens=5)
    decodes_s = 300 * 10 * (NOMINAL.per_request_s + NOMINAL.per_kv_token_s * 105)
    extra = needed([queued], done).serving - needed([instance()], done).serving
    assert extra == pytest.approx((NOMINAL.backlog_s(30_000, 300) + decodes_s) / 30.0)


@pytest.mark.parametrize("prefilling", [False, True])
def test_an_engine_that_is_not_measured_is_as_fast_as_its_tokens_say(prefilling: bool) -> None:
    """The need is that of an engine of the same kind that has been measured."""
    slow, running, held = 8.0, 20, 40_000
    profile = at_speed(load_profile(NOMINAL_NAME), 1 / slow)
    done = [(4_000, 200)] * (30 if prefilling else 1)
    rate_per_s = len(done) / 60.0
    steps = StepModel.of_profile(profile)
    step_s = steps.decode_s(running, held) / (1.0 - rate_per_s * steps.compute_s(4_000.0))
    seen = instance(running=running, kv_used_tokens=held, token_interval_s=step_s)
    measured = replace(seen, measured=Measured.of_profile(profile, 2_048))
    found, expected = needed([seen], done), needed([measured], done)
    assert math.isclose(found.serving, expected.serving, rel_tol=1e-6)
    assert found.serving > 5 * needed([replace(seen, token_interval_s=0.0)], done).serving


def test_an_slo_that_an_idle_instance_misses_does_not_ask_for_everything() -> None:
    done = [(1_000, 200)] * 600
    assert needed([instance()], done, Slo(ttft_s=1e-3, tpot_s=1e-3)).serving < 100


def test_instances_that_drain_are_load_without_capacity() -> None:
    full = instance("b", state=InstanceState.DRAINING, kv_used_tokens=CAPACITY)
    found = needed([instance(kv_used_tokens=CAPACITY), full], [])
    assert found.holding == 2
    # Reserved at the target, and still held at the source.
    half = CAPACITY // 2
    moving = needed(
        [instance(kv_used_tokens=half, coming_tokens=half), replace(full, kv_used_tokens=half)], []
    )
    assert moving.holding == 1


@given(fleets, st.integers(0, 5))
def test_the_kv_that_is_held_fits_on_whatever_remains(fleet: list[InstanceView], smaller: int) -> None:
    fleet = [
        replace(each, kv_capacity_tokens=CAPACITY >> smaller) if number % 2 else each
        for number, each in enumerate(fleet)
    ]
    held = sum(each.kv_used_tokens for each in fleet)
    holding = needed(fleet, []).holding
    smallest = sorted(each.kv_capacity_tokens for each in fleet)[:holding]
    missing = max(0, holding - len(fleet)) * min(each.kv_capacity_tokens for each in fleet)
    assert sum(smallest) + missing >= held


# ---- over time


settings = st.builds(
    Scaling,
    least=st.integers(0, 5),
    most=st.integers(5, 50),
    up_delay_s=st.floats(0.0, 60.0),
    cooldown_s=st.floats(0.0, 600.0),
)
needs = st.builds(Need, st.floats(0.0, 1e6) | st.just(math.inf), st.integers(0, 60))


def follow(scaling: Scaling, present: int, samples: list[Need], every_s: float = 1.0) -> list[int]:
    """Return the desired numbers after each sample. `present` instances are there at first."""
    desired = DesiredInstances(scaling, 0.0)
    return [
        desired.update(sample, 0 if number else present, number * every_s)
        for number, sample in enumerate(samples)
    ]


@given(settings, st.integers(0, 100), st.lists(needs, max_size=50), st.floats(0.01, 100.0))
def test_the_number_is_bounded_and_holds_what_runs(
    scaling: Scaling, present: int, samples: list[Need], every_s: float
) -> None:
    counts = follow(scaling, present, samples, every_s)
    assert all(scaling.least <= count <= scaling.most for count in counts)
    for sample, count in zip(samples, counts, strict=True):
        assert count >= min(scaling.most, sample.holding)


@given(settings, st.integers(0, 100), needs)
def test_a_constant_load_changes_the_number_once(scaling: Scaling, present: int, load: Need) -> None:
    seconds = int(max(scaling.up_delay_s, scaling.cooldown_s)) + 2
    counts = follow(scaling, present, [load] * seconds)
    changes = sum(before != after for before, after in itertools.pairwise(counts))
    assert changes <= 1
    assert counts[-1] == min(
        scaling.most, max(scaling.least, load.holding, math.ceil(min(load.serving - 1e-9, 1e9)))
    )


@given(settings, st.integers(1, 50), st.lists(needs, min_size=2, max_size=50), st.floats(0.1, 100.0))
def test_it_shrinks_only_after_a_cooldown_that_asked_for_less(
    scaling: Scaling, present: int, samples: list[Need], every_s: float
) -> None:
    counts = follow(scaling, present, samples, every_s)
    for number, (before, after) in enumerate(itertools.pairwise(counts), 1):
        if after >= before:
            continue
        assert number * every_s >= scaling.cooldown_s
        recent = [
            sample
            for at, sample in enumerate(samples[: number + 1])
            if at * every_s >= number * every_s - scaling.cooldown_s
        ]
        assert all(
            max(sample.serving - 1e-9, sample.holding) <= max(after, scaling.least) for sample in recent
        )


@given(st.integers(2, 9))
def test_a_peak_shorter_than_the_delay_changes_nothing(seconds: int) -> None:
    low, high = Need(2.0, 0), Need(9.0, 0)
    counts = follow(DEFAULT_SCALING, 2, [*[low] * 30, *[high] * seconds, *[low] * 30])
    assert set(counts) == {2}


def test_growing_takes_a_delay_and_shrinking_a_cooldown() -> None:
    scaling = Scaling(up_delay_s=10.0, cooldown_s=300.0)
    low, high = Need(1.5, 0), Need(3.2, 1)
    counts = follow(scaling, 2, [*[low] * 20, *[high] * 20, *[low] * 400])
    assert counts.index(4) == 20 + 10
    assert counts[counts.index(4) :].index(2) + counts.index(4) == 40 + 300


def test_zero_ends_at_once_and_begins_after_a_cooldown() -> None:
    scaling = Scaling(least=0, up_delay_s=10.0, cooldown_s=300.0)
    counts = follow(scaling, 0, [Need(0.0, 0), Need(0.0, 1), *[Need(0.2, 1)] * 5, *[Need(0.0, 0)] * 400])
    assert counts[:2] == [0, 1]
    assert counts.index(0, 1) == 1 + 6 + 300


def test_before_the_first_cooldown_no_instance_is_removed() -> None:
    desired = DesiredInstances(Scaling(cooldown_s=10.0), 0.0)
    counts = [desired.update(Need(0.5, 0), present, now_s) for now_s, present in enumerate((1, 3, 2, 8))]
    assert counts == [1, 3, 3, 8]
    assert desired.update(Need(0.5, 0), 9, 10.0) == 1


def test_samples_that_do_not_count_any_more_are_dropped() -> None:
    desired = DesiredInstances(Scaling(up_delay_s=10.0, cooldown_s=30.0), 0.0)
    for now_s in range(1_000):
        desired.update(Need(1.0, 0), 1, now_s)
    assert len(desired._samples) == 31
