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
    # Names of what the prompt, and what is made after it, consist of: a unit of `unit_tokens` each, from the
    # first on, as far as they are known. Equal names: equal tokens, and equal tokens before them.
    unit_names: tuple[int, ...] = ()
    unit_tokens: int = 0
    # The conversation that it belongs to; empty: not known.
    session_id: str = ""

    def __post_init__(self) -> None:
        """Raises ValueError: a request has a prompt, an answer, and no negative length."""
        if self.prompt_tokens < 1 or self.answer_tokens < 1 or self.reasoning_tokens < 0:
            raise ValueError(
                f"request {self.request_id!r} needs a prompt and an answer of at least one token"
            )
        if not self.arrival_s >= 0.0:
            raise ValueError(f"request {self.request_id!r} arrives before the start: {self.arrival_s}")

    @property
    def named_prompt_units(self) -> int:
        """Units with a name that are all prompt, without the last token, which is computed in any case."""
        if not self.unit_names:
            return 0
        return min(len(self.unit_names), (self.prompt_tokens - 1) // self.unit_tokens)

    @property
    def output_tokens(self) -> int:
        """Reasoning and answer together."""
        return self.reasoning_tokens + self.answer_tokens
