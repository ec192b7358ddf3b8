"""Parameters that would end an engine, or slow every step, are refused before it has the request."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm", reason="the vLLM engine is not installed")

from vllm.sampling_params import RepetitionDetectionParams, SamplingParams

from worker_agent.engine.vllm import sampling_bounds
from worker_agent.engine.vllm.sampling_bounds import sampling_problem

pytestmark = pytest.mark.vllm


def params(bad_words: list[list[int]] | None = None, **given: Any) -> SamplingParams:
    made = SamplingParams(**given)
    made._bad_words_token_ids = bad_words
    return made


@pytest.mark.parametrize(
    ("of_v2", "problem"),
    [
        (params(), ""),
        (params(logit_bias=dict.fromkeys(range(1_024), 1.0)), ""),
        (params(logit_bias=dict.fromkeys(range(1_025), 1.0)), "1025 token ids in logit_bias"),
        (params(allowed_token_ids=list(range(1_025))), "1025 token ids in allowed_token_ids"),
        (params(max_tokens=1 << 31), "2147483648 max_tokens"),
        (params(bad_words=[[1]] * 129), "129 bad_words"),
        (params(bad_words=[[1] * 1_025]), "1025 tokens in bad_words"),
        (params(stop_token_ids=list(range(200))), ""),
    ],
)
def test_the_second_model_runner_has_rows_of_a_fixed_size(of_v2: SamplingParams, problem: str) -> None:
    found = sampling_problem(of_v2, True)
    assert found.startswith(problem) and bool(found) == bool(problem)
    assert not sampling_problem(of_v2, False)


def test_stops_count_where_they_are_masked() -> None:
    stops = params(stop_token_ids=list(range(129)), min_tokens=1)
    stops.update_from_generation_config({}, None)
    assert "129 token ids that stop" in sampling_problem(stops, True)


def test_patterns_are_bounded_on_every_runner() -> None:
    wide = params(repetition_detection=RepetitionDetectionParams(10**9, 200, 2))
    assert "max_pattern_size" in sampling_problem(wide, False)
    assert not sampling_problem(params(repetition_detection=RepetitionDetectionParams(64, 1, 3)), False)


def test_the_sizes_are_those_of_vllm() -> None:
    bias = pytest.importorskip("vllm.v1.worker.gpu.sample.logit_bias")
    sizes = (bias.MAX_NUM_ALLOWED_TOKEN_IDS, bias.MAX_NUM_LOGIT_BIAS_TOKENS, bias.MAX_NUM_STOP_TOKEN_IDS)
    assert sizes == (sampling_bounds.ALLOWED_MAX, sampling_bounds.BIASED_MAX, sampling_bounds.STOPS_MAX)
