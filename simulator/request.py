"""A request as the workload gives it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SimRequest:
    """One request of a workload. Lengths in tokens, time in seconds from the start of the simulation.

    The lengths are what the model will do; only the simulator and an oracle predictor may look at them
    in advance. `reasoning_tokens` 0: a plain request, which answers from its first output token.
    """

    request_id: str
    arrival_s: float
    prompt_tokens: int
    reasoning_tokens: int
    answer_tokens: int

    def __post_init__(self) -> None:
        """Raises ValueError: a request has a prompt, an answer, and no negative length."""
        if self.prompt_tokens < 1 or self.answer_tokens < 1 or self.reasoning_tokens < 0:
            raise ValueError(
                f"request {self.request_id!r} needs a prompt and an answer of at least one token"
            )
        if not self.arrival_s >= 0.0:
            raise ValueError(f"request {self.request_id!r} arrives before the start: {self.arrival_s}")

    @property
    def output_tokens(self) -> int:
        """Reasoning and answer together."""
        return self.reasoning_tokens + self.answer_tokens
