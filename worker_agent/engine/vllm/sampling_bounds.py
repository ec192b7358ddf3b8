"""Sampling parameters with which a request would end its engine, or slow every other one.

vLLM's API server accepts them. Its model runner V2 has rows of a fixed size for each request and raises
within the step when one does not fit: that ends the engine, with all its requests, and the next one that the
request is placed on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import vllm.envs as envs
from vllm.sampling_params import SamplingParams

# Of vLLM's LogitBiasState (v1/worker/gpu/sample/logit_bias.py, MAX_NUM_...).
ALLOWED_MAX: Final = 1_024
BIASED_MAX: Final = 1_024
STOPS_MAX: Final = 128
# Its rows of lengths are of 32 bits; far above any context, so that prompt and output fit together.
LENGTH_MAX: Final = 1 << 30

PATTERN_MAX: Final = 256
"""Longest pattern of `repetition_detection`. The scheduler compares each length in Python for every token: a
quarter of a microsecond each, in the step of all."""


def sampling_problem(params: SamplingParams, use_v2_model_runner: bool) -> str:
    """Return why no engine may run a request with these parameters; empty: it may."""
    for what, count, most in _bounds(params, use_v2_model_runner):
        if count > most:
            return f"{count} {what}; at most {most} are supported"
    return ""


def _bounds(params: SamplingParams, use_v2_model_runner: bool) -> Iterator[tuple[str, int, int]]:
    """Yield what is counted, how many there are, and how many there may be."""
    if (repetition := params.repetition_detection) is not None:
        yield "max_pattern_size of repetition_detection", repetition.max_pattern_size, PATTERN_MAX
    if not use_v2_model_runner:
        return
    yield "max_tokens", params.max_tokens or 0, LENGTH_MAX
    yield "token ids in allowed_token_ids", len(params.allowed_token_ids or ()), ALLOWED_MAX
    yield "token ids in logit_bias", len(params.logit_bias or ()), BIASED_MAX
    words = params.bad_words_token_ids or ()
    yield "bad_words", len(words), envs.VLLM_MAX_NUM_BAD_WORDS
    yield "tokens in bad_words", sum(map(len, words)), envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS
    if params.min_tokens > 0:
        yield "token ids that stop, with min_tokens", len(params.all_stop_token_ids), STOPS_MAX
