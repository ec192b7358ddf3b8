"""Placements are refused if the first token would be too late."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.actions import Place, Refuse
from tailrace.cluster import Arrival, CachedTokens, InstanceView, Phase
from tailrace.control.admission import TtftAdmission, kv_wait_s
from tailrace.perf.measured import Measured
from tailrace.perf.qoe_model import QoeModel
from tailrace.perf.steps import StepModel
from tailrace.perf.ttft import TtftPredictor
from tailrace.profiles import load_profile
from tailrace.slo import Slo
from tests.policy.fleets import cluster, instance, quick, request

# One millisecond per token.
TTFT = TtftPredictor(0.0, 1e-3, 0.0)
ADMISSION = TtftAdmission(2.0)
ARRIVAL = Arrival("new", 1_000, 100, 0)


def waiting(*prompts: int) -> InstanceView:
    """Return an instance with these prompts waiting."""
    held = tuple(request(f"p{i}", "a", n, phase=Phase.PREFILL) for i, n in enumerate(prompts))
    return replace(instance("a", held), ttft=TTFT)


def test_slos_without_admission_refuse_nothing() -> None:
    assert TtftAdmission.of(Slo()) is None
    assert TtftAdmission.of(Slo(ttft_s=None, admit=1.0)) is None
    assert TtftAdmission.of(Slo(ttft_s=3.0, admit=0.5)) == TtftAdmission(1.5)


def test_a_late_arrival_is_refused_for_good_with_the_reason() -> None:
    early, late = cluster(waiting(900)), cluster(waiting(900, 200))
    assert ADMISSION.evaluate(early, ARRIVAL, Place("a")) == Place("a")
    assert ADMISSION.evaluate(late, ARRIVAL, Place("a")) == Refuse(
        "its first token would arrive in 2.1 s, and the limit is 2 s", final=True
    )


def test_an_arrival_exactly_at_the_limit_is_admitted() -> None:
    view = cluster(replace(waiting(), prefill_delay_s=1.5))
    half = replace(ARRIVAL, prompt_tokens=500)
    first_s = ADMISSION.first_token_s(view.instances["a"], half)
    assert first_s is not None and first_s == pytest.approx(2.0)
    assert TtftAdmission(first_s).evaluate(view, half, Place("a")) == Place("a")
    assert isinstance(TtftAdmission(math.nextafter(first_s, 0.0)).evaluate(view, half, Place("a")), Refuse)


@pytest.mark.parametrize(
    "arrival",
    [
        replace(ARRIVAL, admitted=True),
        replace(ARRIVAL, output_tokens=1),
        replace(ARRIVAL, cached={"a": CachedTokens(500, 500)}),
    ],
    ids=["admitted before", "resumed", "half of it cached"],
)
def test_arrivals_that_are_always_admitted(arrival: Arrival) -> None:
    view = cluster(waiting(900, 200))
    assert ADMISSION.evaluate(view, arrival, Place("a")) == Place("a")


def test_a_prefix_to_be_pulled_counts_as_cached() -> None:
    view = cluster(waiting(900, 200), instance("b"))
    arrival = replace(ARRIVAL, cached={"b": CachedTokens(500, 500, 500)})
    assert ADMISSION.evaluate(view, arrival, Place("a", pull_from="b")) == Place("a", pull_from="b")
    assert isinstance(ADMISSION.evaluate(view, arrival, Place("a")), Refuse)


def test_a_reported_delay_takes_precedence_over_the_backlog() -> None:
    view = cluster(replace(waiting(900, 200), prefill_delay_s=0.3))
    assert ADMISSION.evaluate(view, ARRIVAL, Place("a")) == Place("a")
    assert isinstance(ADMISSION.evaluate(view, ARRIVAL, Place("unknown")), Place)


def test_an_instance_of_unknown_speed_admits_everything() -> None:
    unknown = replace(waiting(900_000), ttft=None)
    assert ADMISSION.evaluate(cluster(unknown), ARRIVAL, Place("a")) == Place("a")
    nominal = load_profile("llama-3.1-8b-h100")
    measured = Measured(nominal, TTFT, StepModel.of_profile(nominal), QoeModel.of_profile(nominal))
    assert isinstance(
        ADMISSION.evaluate(cluster(replace(unknown, measured=measured)), ARRIVAL, Place("a")), Refuse
    )


def test_a_refusal_of_the_policy_is_unchanged() -> None:
    assert ADMISSION.evaluate(cluster(waiting()), ARRIVAL, Refuse("full")) == Refuse("full")


def test_the_wait_for_kv_that_must_be_freed_first() -> None:
    # 10 requests of 1,000 tokens, 900 of them prompt: in the fluid limit all KV is freed in 100 steps of 20
    # ms,
    # and growth takes a tenth of it.
    running = tuple(request(f"r{i}", "a", 892, 100) for i in range(10))
    full = instance("a", running, capacity=sum(r.kv_tokens for r in running))
    assert kv_wait_s(replace(full, kv_capacity_tokens=20_000), 1_000) == 0.0
    freed_per_s = full.kv_used_tokens / 2.0
    assert kv_wait_s(full, 1_000) == pytest.approx(1_000 / (freed_per_s * (1 - 1_000 / full.kv_used_tokens)))
    # Host memory counts as room: requests can be swapped out.
    assert kv_wait_s(replace(full, host_kv_capacity_tokens=5_000), 1_000) == 0.0
    # All requests are predicted to finish at once.
    ending = replace(full, requests=tuple(replace(r, predicted_remaining_tokens=1.0) for r in running))
    assert kv_wait_s(ending, 1_000) < 0.01
    # Growth equals what is freed: there is room once all running requests finish.
    growing = replace(full, requests=tuple(replace(r, predicted_remaining_tokens=2e3) for r in running))
    assert kv_wait_s(growing, 1_000) == pytest.approx(2_000 * 0.02)


def test_free_kv_suffices_exactly() -> None:
    """The prefill backlog is subtracted; an overfull host memory does not reduce the device's room."""
    running = (request("r", "a", 900, 100),)
    held = running[0].kv_tokens
    waiting = replace(instance("a", running, capacity=held + 1_500), prefill_backlog_tokens=500)
    assert kv_wait_s(waiting, 1_000) == 0.0 < kv_wait_s(waiting, 1_001)
    over = replace(waiting, host_kv_tokens=300, host_kv_capacity_tokens=200)
    assert kv_wait_s(over, 1_000) == 0.0 < kv_wait_s(over, 1_001)
    host = replace(waiting, host_kv_tokens=100, host_kv_capacity_tokens=200)
    assert kv_wait_s(host, 1_100) == 0.0 < kv_wait_s(host, 1_101)


def test_requests_about_to_finish_take_one_step() -> None:
    running = tuple(
        replace(request(f"r{i}", "a", 900, 100), kv_tokens=1_000, predicted_remaining_tokens=0.0)
        for i in range(4)
    )
    full = instance("a", running, capacity=4_000, token_interval_s=0.02)
    assert kv_wait_s(full, 4_000) == pytest.approx(0.02)
    assert kv_wait_s(full, 1_000) == pytest.approx(0.005)


@pytest.mark.parametrize(
    ("remaining", "tokens", "steps"),
    [
        # Growth takes a tenth of what is freed.
        (100.0, 900, 100.0 * 900 / 4_000 / 0.9),
        # Growth takes all of it.
        (1_000.0, 900, 1_000.0),
        # More than the KV in use: later requests are assumed to finish at the same rate.
        (2_000.0, 6_000, 3_000.0),
        # Growth prolongs the wait, but not beyond the end of all requests.
        (900.0, 3_000, 900.0),
    ],
)
def test_growth_takes_part_of_the_freed_kv(remaining: float, tokens: int, steps: float) -> None:
    running = tuple(
        replace(request(f"r{i}", "a", 900, 100), kv_tokens=1_000, predicted_remaining_tokens=remaining)
        for i in range(4)
    )
    full = instance("a", running, capacity=4_000, token_interval_s=0.02)
    assert kv_wait_s(full, tokens) == pytest.approx(steps * 0.02)


def test_without_a_token_interval_only_free_kv_counts() -> None:
    full = instance("a", (request("r", "a", 900, 100),), capacity=1_008, token_interval_s=0.0)
    assert (kv_wait_s(full, 1_008), kv_wait_s(full, 1_009)) == (0.0, math.inf)


def test_a_shared_prefix_needs_no_room() -> None:
    running = tuple(request(f"r{i}", "a", 60_000, 2_000) for i in range(4))
    # The requests share a prefix of 60,000 tokens.
    shared = replace(instance("a", running, capacity=100_000), kv_used_tokens=70_000, ttft=TTFT)
    arrival = replace(ARRIVAL, prompt_tokens=62_000, cached={"a": CachedTokens(60_000, 60_000, 60_000)})
    assert ADMISSION.first_token_s(shared, arrival) == pytest.approx(2.0)
    unknown = replace(arrival, cached={})
    assert ADMISSION.first_token_s(shared, unknown) > 62.0  # type: ignore[operator]


def test_a_prefix_of_another_model_does_not_count() -> None:
    arrival = replace(ARRIVAL, cached={"other": CachedTokens(900, 900, 900)})
    placement = Place("a", pull_from="other")
    assert isinstance(ADMISSION.evaluate(cluster(waiting(900, 200)), arrival, placement), Refuse)


def test_a_prompt_that_never_fits_is_refused() -> None:
    empty = replace(instance("a", capacity=500), ttft=TTFT)
    assert kv_wait_s(empty, 1_000) == math.inf
    result = ADMISSION.evaluate(cluster(empty), replace(ARRIVAL, prompt_tokens=1_000), Place("a"))
    assert isinstance(result, Refuse) and "at an unknown time" in result.reason
    # Prompts in prefill hold the KV and nothing decodes: their time is part of the prefill delay.
    assert kv_wait_s(replace(empty, kv_used_tokens=500), 400) == 0.0


@quick
@given(
    st.lists(st.integers(1, 30_000), max_size=5),
    st.lists(st.tuples(st.integers(1, 30_000), st.integers(1, 5_000)), max_size=80),
    st.integers(1, 20_000),
    st.integers(0, 20_000),
    st.integers(1, 400_000),
    st.integers(0, 400_000),
)
def test_more_work_never_makes_the_first_token_earlier(
    prompts: list[int], running: list[tuple[int, int]], tokens: int, more: int, capacity: int, used: int
) -> None:
    held = [request(f"p{i}", "a", n, phase=Phase.PREFILL) for i, n in enumerate(prompts)]
    held += [request(f"r{i}", "a", prompt, output) for i, (prompt, output) in enumerate(running)]
    # KV in use is independent of the requests: it is corrected between reports, and shared prefixes count
    # once.
    present = replace(
        instance("a", tuple(held), capacity=capacity), kv_used_tokens=min(used, capacity), ttft=TTFT
    )
    with_more_backlog = replace(present, prefill_backlog_tokens=present.prefill_backlog_tokens + more)

    def first_token_s(view: InstanceView, prompt: int) -> float:
        found = ADMISSION.first_token_s(view, replace(ARRIVAL, prompt_tokens=prompt))
        assert found is not None and found >= 0.0
        return found

    assert first_token_s(with_more_backlog, tokens) >= first_token_s(present, tokens)
    assert first_token_s(present, tokens + more) >= first_token_s(present, tokens)
