"""What a worker's profile says of the prompts that wait."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.profiles import load_profile
from worker_agent.speeds import Speeds

SPEEDS = Speeds.of(load_profile("llama-3.1-8b-h100"), 0.1)


def test_a_long_prompt_takes_more_than_as_many_tokens_of_short_ones() -> None:
    long, short = [64_000], [1_000] * 64
    assert SPEEDS.prefill_delay_s(64_000, long) > 2 * SPEEDS.prefill_delay_s(64_000, short)


@given(prompts=st.lists(st.integers(1, 100_000), min_size=1, max_size=8), share=st.floats(0.0, 1.0))
def test_what_is_computed_is_not_waited_for(prompts: list[int], share: float) -> None:
    left = round(sum(prompts) * share)
    whole_s = SPEEDS.ttft.queue_s(prompts)
    assert SPEEDS.prefill_delay_s(left, prompts) == pytest.approx(whole_s * left / sum(prompts))


def test_what_is_computed_anew_is_waited_for_too() -> None:
    assert SPEEDS.prefill_delay_s(0, []) == 0.0
    assert SPEEDS.prefill_delay_s(3_000, [1_000]) == pytest.approx(
        SPEEDS.ttft.prefill_s(1_000) + SPEEDS.ttft.prefill_s(2_000)
    )
