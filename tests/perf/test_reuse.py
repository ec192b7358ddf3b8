"""The value of fetched KV is at most what it saves, and never negative."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.perf.steps import StepModel, equivalent_tokens, held_tokens, load_s
from tailrace.profiles import built_in_profiles, load_profile

STEPS = StepModel.of_profile(load_profile("llama-3.1-8b-h100"))


@given(st.sampled_from(built_in_profiles()), st.integers(0, 100_000), st.integers(0, 100_000))
def test_host_memory_counts_between_none_and_device_memory(profile: str, device: int, more: int) -> None:
    steps = StepModel.of_profile(load_profile(profile))
    counted = held_tokens(steps, device, device + more)
    assert device <= counted <= device + more
    saved_s = steps.compute_s(device + more) - load_s(steps, more)
    if counted > device:
        # Exact to one token.
        assert steps.compute_s(counted) <= saved_s + 1e-9 < steps.compute_s(counted + 1) + 2e-9
    else:
        assert saved_s < steps.compute_s(device + 1)


def test_loading_takes_as_long_as_a_copy_over_the_link() -> None:
    profile = load_profile("llama-3.1-8b-h100")
    assert load_s(STEPS, 0) == 0.0
    assert load_s(STEPS, 2_000) == pytest.approx(profile.swap.ms(2_000 * profile.kv_bytes_per_token) / 1e3)
    # A long prefix keeps nine tenths of its value; a short one is not loaded.
    assert 0.85 < held_tokens(STEPS, 0, 10_000) / 10_000 < 0.95
    assert held_tokens(STEPS, 0, 40) == 0


@given(st.integers(0, 50_000), st.floats(0.0, 10.0), st.floats(0.0, 10.0))
def test_the_value_decreases_with_the_fetch_time(tokens: int, fetch_s: float, more_s: float) -> None:
    assert (
        0
        <= equivalent_tokens(STEPS, tokens, fetch_s + more_s)
        <= equivalent_tokens(STEPS, tokens, fetch_s)
        <= tokens
    )
