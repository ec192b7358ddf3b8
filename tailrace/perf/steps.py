"""Model step, prefill and load times in seconds, from a profile.

KV that is fetched from host memory or from another instance, instead of computed, is valued in tokens: the
length of the shorter prefix that would save as much time if it were on the device already. Policies compare
instances by that.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Final, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from tailrace.profiles import Profile, load_profile

Floats = NDArray[np.float64]
# A scalar for one instance, or an array with one entry per instance: the formulas are the same.
Number = TypeVar("Number", float, Floats)

# The default profile. Decisions depend on the ratios of its coefficients, which differ little between dense
# models and GPUs: in the built-in profiles, a decode step's base takes as long as the prefill of 323 or 365
# tokens, and reading the KV of 287 or 490 tokens takes as long as one more request in the batch.
NOMINAL: Final = "llama-3.1-8b-h100"


@dataclass(frozen=True, slots=True)
class StepTimes(Generic[Number]):
    """Coefficients in seconds; see `tailrace.profiles` for the two formulas."""

    prefill_base_s: Number
    per_token_s: Number
    per_token_squared_s: Number
    decode_base_s: Number
    per_request_s: Number
    per_kv_token_s: Number
    # Maximum prompt tokens per step.
    chunk_tokens: Number

    def decode_s(self, requests: Number, kv_tokens: Number) -> Number:
        """Return the seconds of one decode step."""
        return self.decode_base_s + self.per_request_s * requests + self.per_kv_token_s * kv_tokens

    def compute_s(self, tokens: Number) -> Number:
        """Return the prefill seconds of one prompt without the constant overhead of its steps."""
        return (self.per_token_s + self.per_token_squared_s * tokens) * tokens

    def backlog_s(self, tokens: Number, prompts: Number) -> Number:
        """Return the same for a backlog of which only the sum is known.

        Prompts are assumed to have equal lengths, which gives the least possible time. `prompts`: at least 1.
        """
        return (self.per_token_s + self.per_token_squared_s * tokens / prompts) * tokens


@dataclass(frozen=True, slots=True)
class StepModel(StepTimes[float]):
    """The step times of one instance."""

    kv_bytes_per_token: int
    # Seconds to copy KV from host memory to the device: per request, and per token.
    load_base_s: float
    load_per_token_s: float

    @staticmethod
    def of_profile(profile: Profile | None, chunk_tokens: int = 2048) -> StepModel:
        """Create the model from a profile; None: the nominal one. `chunk_tokens`: vLLM's default."""
        profile = profile if profile is not None else load_profile(NOMINAL)
        prefill, decode, swap = profile.prefill, profile.decode, profile.swap
        return StepModel(
            prefill.base_ms / 1e3,
            prefill.ms_per_token / 1e3,
            prefill.ms_per_token_squared / 1e3,
            decode.base_ms / 1e3,
            decode.ms_per_request / 1e3,
            decode.ms_per_kv_token / 1e3,
            chunk_tokens,
            profile.kv_bytes_per_token,
            swap.base_ms / 1e3,
            profile.kv_bytes_per_token / swap.bytes_per_s,
        )


UNLIMITED_TOKENS: Final = 2**53
"""Larger than any KV capacity, and exact in JSON and in floating point."""


def max_running_tokens(profile: Profile, tpot_slo_s: float, context_tokens: int) -> int:
    """Return Max Running Tokens: the most tokens in a batch for which a decode step is within the TPOT SLO
    (Arrow, section 5.3, "Instance Load Evaluation", third bullet).

    As profiling would measure it with requests of `context_tokens` each. The instance's KV capacity is a
    further limit. UNLIMITED_TOKENS: no load makes a step too long.
    """
    decode = profile.decode
    spare_ms = tpot_slo_s * 1e3 - decode.base_ms
    if spare_ms <= 0.0:
        return 0
    per_token_ms = decode.ms_per_kv_token + decode.ms_per_request / max(1, context_tokens)
    # If steps take the same time at any load, fitted slopes are 0, or so small that the quotient overflows.
    if per_token_ms * UNLIMITED_TOKENS <= spare_ms:
        return UNLIMITED_TOKENS
    return int(spare_ms / per_token_ms)


def load_s(steps: StepModel, tokens: int) -> float:
    """Return the seconds to copy the KV of `tokens` of one request from host memory to the device."""
    return steps.load_base_s + steps.load_per_token_s * tokens if tokens > 0 else 0.0


def equivalent_tokens(steps: StepModel, tokens: int, fetch_s: float) -> int:
    """Return how many tokens on the device save as much time as `tokens` that take `fetch_s` to fetch."""
    left_s = max(0.0, steps.compute_s(tokens) - fetch_s)
    linear, square = steps.per_token_s, steps.per_token_squared_s
    if square > 0.0:
        return min(tokens, int((sqrt(linear * linear + 4.0 * square * left_s) - linear) / (2.0 * square)))
    return min(tokens, int(left_s / linear)) if linear > 0.0 else tokens


def held_tokens(steps: StepModel, device: int, total: int) -> int:
    """Return an instance's cached tokens as equivalent tokens on its device.

    `device`: tokens on its device; `total`: tokens there or in host memory. The latter are loaded if that
    takes less time than computing them, and count less the loading time.
    """
    if total <= device:
        return device
    return max(device, equivalent_tokens(steps, total, load_s(steps, total - device)))
