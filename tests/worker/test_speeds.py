"""Estimates from a worker's profile for its waiting prompts."""

from __future__ import annotations

import math
from typing import cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.perf.steps import UNLIMITED_TOKENS
from tailrace.profiles import DecodeModel, PrefillModel, load_profile
from tailrace.slo import Slo
from tailrace.store.membership import Membership
from tests.static_members import StaticMembers
from worker_agent.settings import WorkerSettings
from worker_agent.speeds import KnownSpeeds, Speeds

SPEEDS = Speeds.of(load_profile("llama-3.1-8b-h100"), 0.1)


def test_long_prompt_takes_longer_than_short_ones_with_as_many_tokens() -> None:
    long, short = [64_000], [1_000] * 64
    assert SPEEDS.prefill_delay_s(64_000, long) > 2 * SPEEDS.prefill_delay_s(64_000, short)


@given(prompts=st.lists(st.integers(1, 100_000), min_size=1, max_size=8), share=st.floats(0.0, 1.0))
def test_computed_tokens_do_not_add_to_the_wait(prompts: list[int], share: float) -> None:
    left = round(sum(prompts) * share)
    whole_s = SPEEDS.ttft.queue_s(prompts)
    assert SPEEDS.prefill_delay_s(left, prompts) == pytest.approx(whole_s * left / sum(prompts))


def test_recomputed_tokens_add_to_the_wait() -> None:
    assert SPEEDS.prefill_delay_s(0, []) == 0.0
    assert SPEEDS.prefill_delay_s(3_000, [1_000]) == pytest.approx(
        SPEEDS.ttft.prefill_s(1_000) + SPEEDS.ttft.prefill_s(2_000)
    )


times_ms = st.floats(0.0, 1e3)
# A step of one token takes at least a nanosecond.
coefficients = st.tuples(times_ms, times_ms, times_ms).filter(lambda each: sum(each) >= 1e-6)


@given(
    decode=coefficients,
    prefill=coefficients,
    tpot_s=st.floats(1e-3, 1.0),
)
def test_any_fitted_profile_can_be_reported(
    decode: tuple[float, float, float], prefill: tuple[float, float, float], tpot_s: float
) -> None:
    """Fits of flat, noisy steps can have slopes of zero; a worker with such a profile must still report."""
    profile = msgspec.structs.replace(
        load_profile("llama-3.1-8b-h100"),
        prefill=PrefillModel(base_ms=prefill[0], ms_per_token=prefill[1], ms_per_token_squared=prefill[2]),
        decode=DecodeModel(base_ms=decode[0], ms_per_request=decode[1], ms_per_kv_token=decode[2]),
    )
    speeds = Speeds.of(profile, tpot_s)
    assert 0 <= speeds.max_running_tokens <= UNLIMITED_TOKENS
    delay_s = speeds.prefill_delay_s(3_000, [1_000, 2_000])
    assert math.isfinite(delay_s) and delay_s >= 0.0


def test_step_times_of_zero_are_refused() -> None:
    with pytest.raises(ValueError, match=r"prefill: .* no step takes any time"):
        PrefillModel(base_ms=5e-324, ms_per_token=0.0, ms_per_token_squared=0.0)
    with pytest.raises(ValueError, match=r"decode: .* no step takes any time"):
        DecodeModel(base_ms=5e-324, ms_per_request=0.0, ms_per_kv_token=0.0)


def test_max_running_tokens_follow_the_slo_of_the_deployment() -> None:
    members, profile = StaticMembers(), load_profile("llama-3.1-8b-h100")
    known = KnownSpeeds(profile, WorkerSettings(), "kind", cast("Membership", members))
    assert known.current() == Speeds.of(profile, 0.15)
    assert known.current() is known.current()
    members.slo = Slo(2.0, 0.02)
    assert known.current() == Speeds.of(profile, 0.02)
    members.slo = Slo(2.0, None)
    assert known.current() == Speeds.of(profile, 0.15)
    nobody = KnownSpeeds(None, WorkerSettings(), "kind", cast("Membership", members))
    assert nobody.current() is None
