"""The prompts of one instance that are not fully computed: their remaining work, and the chunks of the next
run."""

from __future__ import annotations

from bisect import insort

from simulator.events import NEVER
from simulator.job import Job
from simulator.steptime import StepTime
from tailrace.intra.base import Rank


class Prompts:
    """Prompts with space on the device, by rank, and the remaining work of these and of queued ones."""

    __slots__ = ("_squares", "_time", "_tokens", "chunks", "placed")

    def __init__(self, time: StepTime) -> None:
        self._time = time
        self.placed: list[tuple[Rank, Job]] = []
        # Prompt tokens that each step of the run computes, by job.
        self.chunks: list[tuple[Job, int]] = []
        # Remaining work: tokens, and the sum of n * n - c * c over prompts of n tokens with c computed.
        # Prefill time is linear in both.
        self._tokens = 0
        self._squares = 0

    # ---- the work

    def add(self, job: Job) -> None:
        """Add the whole prompt of a job to the remaining work."""
        self._tokens += job.prefill_total
        self._squares += job.prefill_total * job.prefill_total

    def subtract(self, job: Job, tokens: int) -> None:
        """Remove the next tokens of a prompt from the remaining work."""
        start = job.prefill_done
        self._tokens -= tokens
        self._squares -= (start + tokens) * (start + tokens) - start * start

    def remaining_after(self, steps: int) -> tuple[int, int]:
        """Return (tokens, squares) of the remaining work after this many steps of the run."""
        tokens, squares = self._tokens, self._squares
        if steps:
            for job, chunk in self.chunks:
                start, end = job.prefill_done, job.prefill_done + chunk * steps
                tokens -= end - start
                squares -= end * end - start * start
        return tokens, squares

    def remaining_s_after(self, steps: int) -> float:
        """Return the seconds that the remaining work takes after this many steps, without the base time of
        each step."""
        return self._time.prompts_s(*self.remaining_after(steps))

    # ---- the steps

    def place(self, job: Job) -> None:
        """Add a prompt that was given space on the device."""
        insort(self.placed, (job.rank, job), key=rank_of)

    def remove(self, job: Job) -> None:
        """Remove a prompt that is computed or has lost its space."""
        self.placed.remove((job.rank, job))

    def plan_chunks(self, budget: int) -> tuple[float, float, int]:
        """Plan the chunks of a run. Return (seconds of the first step's, growth per step, steps with equal
        chunks)."""
        if budget <= 0:
            return 0.0, 0.0, NEVER
        time = self._time
        job = self.placed[0][1]
        remaining = job.prefill_total - job.prefill_done
        if remaining >= budget:
            self.chunks = [(job, budget)]
            start = job.prefill_done
            return time.chunk_s(start, start + budget), time.chunk_growth_s(budget), remaining // budget
        seconds = 0.0
        for _, job in self.placed:
            start = job.prefill_done
            tokens = min(budget, job.prefill_total - start)
            self.chunks.append((job, tokens))
            seconds += time.chunk_s(start, start + tokens)
            budget -= tokens
            if not budget:
                break
        return seconds, 0.0, 1

    def take_chunks(self) -> list[tuple[Job, int]]:
        """Return the chunks of the run that has ended, and clear them."""
        chunks = self.chunks
        self.chunks = []
        return chunks


def rank_of(entry: tuple[Rank, Job]) -> Rank:
    """Return the sort key of queues of jobs."""
    return entry[0]
