"""The TTFT predictor (Arrow, sections 4.2 and 5.3): a quadratic function of the prompt's length."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from tailrace.perf.fit import fit_costs
from tailrace.profiles import Profile

# Lengths at which a profile is sampled: powers of two, as far as the paper's longest prompts go.
_SAMPLED: Final = tuple(2**power for power in range(5, 18))


@dataclass(frozen=True, slots=True)
class TtftPredictor:
    """Predict the seconds to prefill L tokens alone: base_s + per_token_s * L + per_token_squared_s * L^2.

    No coefficient is negative, so that a longer prompt never takes less time.
    """

    base_s: float
    per_token_s: float
    per_token_squared_s: float

    @staticmethod
    def fit(samples: Sequence[tuple[int, float]]) -> TtftPredictor:
        """Fit (prompt tokens, seconds) samples by least squares (section 5.3, "TTFT predictor").

        Raise ValueError without samples of positive length and time.
        """
        rows = [(tokens, seconds) for tokens, seconds in samples if tokens > 0 and seconds > 0.0]
        if not rows:
            raise ValueError("a TTFT fit needs samples of positive length and time")
        tokens = np.array([row[0] for row in rows], dtype=np.float64)
        seconds = np.array([row[1] for row in rows], dtype=np.float64)
        work = np.stack([np.ones_like(tokens), tokens, tokens**2], axis=1)
        return TtftPredictor(*map(float, fit_costs(work, seconds)))

    @staticmethod
    def of_profile(profile: Profile, chunk_tokens: int = 2048) -> TtftPredictor:
        """Return the predictor that profiling an instance with this profile would give.

        Prompts are prefilled in chunks of `chunk_tokens` (section 5.4; vLLM's default step budget), each a
        step with its own base.
        """
        samples: list[tuple[int, float]] = []
        for tokens in _SAMPLED:
            steps = -(-tokens // chunk_tokens)
            milliseconds = steps * profile.prefill.base_ms + profile.prefill.ms(0, tokens)
            samples.append((tokens, milliseconds / 1e3))
        return TtftPredictor.fit(samples)

    def prefill_s(self, tokens: int) -> float:
        """Return the seconds to prefill one prompt of this length (p_1 in section 4.1)."""
        return self.base_s + (self.per_token_s + self.per_token_squared_s * tokens) * tokens

    def saved_s(self, cached_tokens: int) -> float:
        """Return the prefill seconds saved if the first `cached_tokens` of a prompt are cached."""
        return (self.per_token_s + self.per_token_squared_s * cached_tokens) * cached_tokens

    def queue_s(self, lengths: Iterable[int]) -> float:
        """Return the queueing delay behind prompts that are prefilled one after the other (Eq. 1 and 2)."""
        return sum(self.prefill_s(tokens) for tokens in lengths)

    def backlog_s(self, tokens: int, prompts: int) -> float:
        """Return the queueing delay behind a backlog of which only the sum is known.

        Prompts are assumed to have equal lengths, which gives the least possible `queue_s`.
        """
        if tokens <= 0:
            return 0.0
        count = max(1, prompts)
        return count * self.base_s + (self.per_token_s + self.per_token_squared_s * tokens / count) * tokens
