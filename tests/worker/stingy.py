"""An order that lets each step carry only so much of any prompt."""

from __future__ import annotations

from tailrace.intra.orders import Fcfs


class Stingy(Fcfs):
    """So many prompt tokens a step; 0: no step is to carry any."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens

    def prefill_budget(self, step_tokens: int, decoding: int) -> int:
        return self.tokens
