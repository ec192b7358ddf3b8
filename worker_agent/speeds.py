"""What a worker's profile says of its load: Arrow's two quantities (section 5.3)."""

from __future__ import annotations

from dataclasses import dataclass

from tailrace.policy.arrow.load import max_running_tokens
from tailrace.policy.arrow.ttft import TtftPredictor
from tailrace.profiles import Profile

# Length of prompts and requests where none is given; as tailrace.policy.arrow.policy assumes.
_CONTEXT_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Speeds:
    """Of one worker. Without a profile there are none, and the policies go by theirs."""

    ttft: TtftPredictor
    prefill_s_per_token: float
    max_running_tokens: int

    @staticmethod
    def of(profile: Profile, tpot_s: float) -> Speeds:
        """By the profile of the very engine. `tpot_s`: most seconds between two tokens of a request."""
        ttft = TtftPredictor.of_profile(profile)
        return Speeds(
            ttft,
            ttft.prefill_s(_CONTEXT_TOKENS) / _CONTEXT_TOKENS,
            max_running_tokens(profile, tpot_s, _CONTEXT_TOKENS),
        )

    def prefill_delay_s(self, backlog_tokens: int, prompts: int) -> float:
        """Seconds until a prefill that arrives now would start, behind so many prompts not yet prefilled."""
        return self.ttft.backlog_s(backlog_tokens, prompts)
