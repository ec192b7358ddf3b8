"""An order that limits the prompt tokens of each step."""

from __future__ import annotations

from tailrace.intra.orders import Fcfs


class Stingy(Fcfs):
    """First come, first served, with this many prompt tokens per step; 0: none."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens

    def prefill_budget(self, step_tokens: int, decoding: int) -> int:
        return self.tokens
