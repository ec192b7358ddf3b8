"""Batch orders whose effects are easy to see: one that reorders prompts, and one that limits them."""

from __future__ import annotations

from tailrace.intra.base import IntraPolicy, JobView, Rank
from tailrace.intra.orders import Fcfs


class ByLength(IntraPolicy):
    """Shortest prompt first: a short one overtakes every longer one."""

    def rank(self, job: JobView) -> Rank:
        return (job.prompt_tokens, job.arrival)


class Stingy(Fcfs):
    """First come, first served, with this many prompt tokens per step; 0: none."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens

    def prefill_budget(self, step_tokens: int, decoding: int) -> int:
        return self.tokens


class Mistaken(ByLength):
    """Shortest prompt first, with a mistake after so many ranks."""

    ranks = 8

    def rank(self, job: JobView) -> Rank:
        self.ranks -= 1
        if self.ranks < 0:
            raise ZeroDivisionError("a mistake")
        return super().rank(job)
