"""The desired number of instances: what a load needs, and how the number follows it."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.cluster import InstanceState, InstanceView
from tailrace.lengths import LengthStatistics
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


def test_the_number_of_instances_does_not_change_what_a_rate_needs() -> None:
    done = [(1_000, 200)] * 6_000
    roomy = instance(kv_capacity_tokens=10 * CAPACITY, max_num_seqs=0)
    alone, many = needed([roomy], done), needed([replace(roomy, instance_id=str(n)) for n in range(8)], done)
    assert math.isclose(alone.serving, many.serving)
    # 100 requests a second, each 18 ms of prefill and 200 * 0.058 ms of decode steps, and what is left for
    # the steps' base.
    assert 100 * (0.018 + 200 * 58e-6) < alone.serving * DEFAULT_SCALING.utilization < 3.4


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
    least=st.integers(1, 5),
    most=st.integers(5, 50),
    up_delay_s=st.floats(0.0, 60.0),
    cooldown_s=st.floats(0.0, 600.0),
)
needs = st.builds(Need, st.floats(0.0, 1e6) | st.just(math.inf), st.integers(0, 60))


def follow(scaling: Scaling, present: int, samples: list[Need], every_s: float = 1.0) -> list[int]:
    """Return the desired numbers before the first sample, and after each."""
    desired = DesiredInstances(scaling, present, 0.0)
    counts = [desired.count]
    for number, sample in enumerate(samples):
        counts.append(desired.update(sample, number * every_s))
    return counts


@given(settings, st.integers(0, 100), st.lists(needs, max_size=50), st.floats(0.01, 100.0))
def test_the_number_is_bounded_and_holds_what_runs(
    scaling: Scaling, present: int, samples: list[Need], every_s: float
) -> None:
    counts = follow(scaling, present, samples, every_s)
    assert all(scaling.least <= count <= scaling.most for count in counts)
    for sample, count in zip(samples, counts[1:], strict=True):
        assert count >= min(scaling.most, sample.holding)


@given(settings, st.integers(0, 100), needs)
def test_a_constant_load_changes_the_number_once(scaling: Scaling, present: int, load: Need) -> None:
    seconds = int(max(scaling.up_delay_s, scaling.cooldown_s)) + 2
    counts = follow(scaling, present, [load] * seconds)
    changes = sum(before != after for before, after in itertools.pairwise(counts))
    # What is held counts before the rest.
    assert changes <= 2
    assert counts == sorted(counts) or counts == sorted(counts, reverse=True)
    assert counts[-1] == min(
        scaling.most, max(scaling.least, load.holding, math.ceil(min(load.serving - 1e-9, 1e9)))
    )


@given(settings, st.integers(1, 50), st.lists(needs, min_size=2, max_size=50), st.floats(0.1, 100.0))
def test_it_shrinks_only_after_a_cooldown_that_asked_for_less(
    scaling: Scaling, present: int, samples: list[Need], every_s: float
) -> None:
    counts = follow(scaling, present, samples, every_s)
    for number, (before, after) in enumerate(itertools.pairwise(counts)):
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
    assert counts.index(4) == 1 + 20 + 10
    assert counts[counts.index(4) :].index(2) + counts.index(4) == 1 + 40 + 300
