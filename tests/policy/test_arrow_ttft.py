"""The TTFT predictor recovers the function it was fitted to, and its predictions are always plausible."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.perf.steps import UNLIMITED_TOKENS, max_running_tokens
from tailrace.perf.ttft import TtftPredictor
from tailrace.profiles import DecodeModel, load_profile
from tests.policy.fleets import quick

LENGTHS = (16, 128, 512, 1_024, 4_096, 16_384, 65_536)


@quick
@given(base=st.floats(1e-4, 1.0), linear=st.floats(1e-6, 1e-3), squared=st.floats(1e-11, 1e-8))
def test_fit_recovers_a_quadratic(base: float, linear: float, squared: float) -> None:
    truth = TtftPredictor(base, linear, squared)
    found = TtftPredictor.fit([(tokens, truth.prefill_s(tokens)) for tokens in LENGTHS])
    for tokens in (100, 3_000, 50_000):
        assert found.prefill_s(tokens) == pytest.approx(truth.prefill_s(tokens), rel=1e-6)


@quick
@given(st.lists(st.tuples(st.integers(1, 100_000), st.floats(1e-4, 1e2)), min_size=1, max_size=20))
def test_predictions_never_decrease_with_length(samples: list[tuple[int, float]]) -> None:
    found = TtftPredictor.fit(samples)
    predicted = [found.prefill_s(tokens) for tokens in range(0, 100_000, 5_000)]
    assert predicted == sorted(predicted)
    assert predicted[0] >= 0.0


@pytest.mark.parametrize("samples", [[], [(0, 1.0)], [(10, 0.0)]])
def test_unusable_samples_are_rejected(samples: list[tuple[int, float]]) -> None:
    with pytest.raises(ValueError, match="samples"):
        TtftPredictor.fit(samples)


@quick
@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=50))
def test_a_backlog_known_only_as_a_sum_is_a_lower_bound(lengths: list[int]) -> None:
    ttft = TtftPredictor(0.01, 1e-5, 1e-9)
    lower_bound_s = ttft.backlog_s(sum(lengths), len(lengths))
    assert lower_bound_s <= ttft.queue_s(lengths) * (1 + 1e-9)
    equal = [lengths[0]] * len(lengths)
    assert ttft.backlog_s(sum(equal), len(equal)) == pytest.approx(ttft.queue_s(equal))


def test_an_empty_backlog_takes_no_time() -> None:
    assert TtftPredictor(0.01, 1e-5, 1e-9).backlog_s(0, 0) == 0.0


@pytest.mark.parametrize("name", ["llama-3.1-8b-h100", "r1-distill-qwen-32b-h100"])
def test_the_predictor_of_a_profile_approximates_chunked_prefill(name: str) -> None:
    """The quadratic is within 15% of the time of the chunked prefill, at any length."""
    profile = load_profile(name)
    ttft = TtftPredictor.of_profile(profile)
    for tokens in (50, 700, 5_000, 40_000, 120_000):
        chunks = -(-tokens // 2_048)
        exact_s = (chunks * profile.prefill.base_ms + profile.prefill.ms(0, tokens)) / 1e3
        assert ttft.prefill_s(tokens) == pytest.approx(exact_s, rel=0.15)


def test_max_running_tokens_is_the_largest_count_within_the_slo() -> None:
    profile = load_profile("llama-3.1-8b-h100")
    most = max_running_tokens(profile, 0.05, 1_000)

    def step_s(tokens: float) -> float:
        return (profile.decode.base_ms + profile.decode.ms(0, 0)) / 1e3 + (
            profile.decode.ms_per_request * tokens / 1_000 + profile.decode.ms_per_kv_token * tokens
        ) / 1e3

    assert step_s(most) <= 0.05 < step_s(most + 2)
    assert max_running_tokens(profile, 0.001, 1_000) == 0


@pytest.mark.parametrize("slope_ms", [0.0, 1e-300])
def test_max_running_tokens_of_a_profile_whose_steps_do_not_grow_is_unlimited(slope_ms: float) -> None:
    measured = load_profile("llama-3.1-8b-h100")
    flat = DecodeModel(base_ms=20.0, ms_per_request=slope_ms, ms_per_kv_token=slope_ms)
    profile = msgspec.structs.replace(measured, decode=flat)
    assert max_running_tokens(profile, 0.05, 1_000) == UNLIMITED_TOKENS
    assert max_running_tokens(profile, 0.02, 1_000) == 0
