"""Step times of a profile, in the form needed for runs of steps with one batch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tailrace.perf.length_penalty import FittedLengthPenalty
from tailrace.profiles import Profile

Lengths = Callable[[], NDArray[np.int64]]


class StepTime:
    """Durations of steps in seconds; equal to Profile.step_ms."""

    __slots__ = (
        "_decode_base",
        "_mixed_base",
        "_penalty",
        "_per_kv_token",
        "_per_request",
        "_per_token",
        "_per_token_squared",
        "_prefill_base",
    )

    def __init__(self, profile: Profile, penalty: FittedLengthPenalty | None) -> None:
        self._prefill_base = profile.prefill.base_ms / 1e3
        self._per_token = profile.prefill.ms_per_token / 1e3
        self._per_token_squared = profile.prefill.ms_per_token_squared / 1e3
        self._decode_base = profile.decode.base_ms / 1e3
        self._mixed_base = max(self._prefill_base, self._decode_base)
        self._per_request = profile.decode.ms_per_request / 1e3
        self._per_kv_token = profile.decode.ms_per_kv_token / 1e3
        self._penalty = penalty

    @property
    def shortest_s(self) -> float:
        """Return the time of a step that decodes one short request."""
        return self._decode_base + self._per_request

    def chunk_s(self, start: int, end: int) -> float:
        """Return the time to prefill tokens [start, end) of one prompt, without the base time of the step."""
        return self._per_token * (end - start) + self._per_token_squared * (end * end - start * start)

    def prompts_s(self, tokens: int, squares: int) -> float:
        """Return the time to prefill parts of prompts, without the base time: their tokens and end**2 -
        start**2, summed."""
        return self._per_token * tokens + self._per_token_squared * squares

    def chunk_growth_s(self, tokens: int) -> float:
        """Return by how much each chunk of `tokens` of one prompt takes longer than the one before."""
        return 2 * self._per_token_squared * tokens * tokens

    def overhead_s(self, decoding: int, kv_tokens: int) -> float:
        """Return the time of a step with prefill apart from its chunks, without the length penalty."""
        if not decoding:
            return self._prefill_base
        return self._mixed_base + self._per_request * decoding + self._per_kv_token * kv_tokens

    def run(self, chunk_s: float, decoding: int, kv_tokens: int, lengths: Lengths) -> tuple[float, float]:
        """Return (duration of the first step, growth per step from decoding) with `chunk_s` of prefill in
        each step.

        Each decode adds one token to the KV per step. The penalty, if any, is that of the batch at the start.
        """
        if not decoding:
            return self._prefill_base + chunk_s, 0.0
        base = self._mixed_base if chunk_s else self._decode_base
        per_kv_token = self._per_kv_token
        factor = 1.0
        if self._penalty is not None:
            batch = lengths()
            per_kv_token *= self._penalty.attention_factor(batch)
            factor = self._penalty.step_factor(batch)
        decode = self._per_request * decoding + per_kv_token * kv_tokens
        if factor == 1.0:
            return base + chunk_s + decode, per_kv_token * decoding
        # The part of prefill beyond a decode step's base does not depend on the batch's lengths.
        extra = base - self._decode_base + chunk_s
        return extra + factor * (self._decode_base + decode), factor * per_kv_token * decoding
