"""A request of a workload."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SimRequest:
    """One request of a workload. Lengths are in tokens, time in seconds from the start of the simulation.

    The output lengths are what the model will produce; only the simulator and an oracle predictor may use
    them in advance. A plain request has 0 `reasoning_tokens` and answers from its first output token.
    """

    request_id: str
    arrival_s: float
    prompt_tokens: int
    reasoning_tokens: int
    answer_tokens: int
    # Names of the units, of `unit_tokens` each, of which the prompt and the output consist, from the first on
    # and as far as known. Equal names mean equal tokens with equal tokens before them.
    unit_names: tuple[int, ...] = ()
    unit_tokens: int = 0
    # The conversation it belongs to; empty: unknown.
    session_id: str = ""

    def __post_init__(self) -> None:
        """Raise ValueError for a missing prompt or answer, a negative length or a negative time."""
        if self.prompt_tokens < 1 or self.answer_tokens < 1 or self.reasoning_tokens < 0:
            raise ValueError(
                f"request {self.request_id!r} needs a prompt and an answer of at least one token"
            )
        if not self.arrival_s >= 0.0:
            raise ValueError(f"request {self.request_id!r} arrives before the start: {self.arrival_s}")

    @property
    def named_prompt_units(self) -> int:
        """Return the named units that lie entirely in the prompt without its last token, which is always
        computed."""
        if not self.unit_names:
            return 0
        return min(len(self.unit_names), (self.prompt_tokens - 1) // self.unit_tokens)

    @property
    def output_tokens(self) -> int:
        """Return the number of reasoning and answer tokens."""
        return self.reasoning_tokens + self.answer_tokens
