"""The prompts of one instance that are not computed yet: what they take, and the chunks of the next steps."""

from __future__ import annotations

from bisect import insort

from simulator.events import NEVER
from simulator.job import Job
from simulator.steptime import StepTime
from tailrace.intra.base import Rank


class Prompts:
    """Those that have a place on the device, by rank; the work of those and of all that wait for one."""

    __slots__ = ("_squares", "_time", "_tokens", "chunks", "placed")

    def __init__(self, time: StepTime) -> None:
        self._time = time
        self.placed: list[tuple[Rank, Job]] = []
        # Of each step of the run: prompt tokens by job.
        self.chunks: list[tuple[Job, int]] = []
        # Left to compute: tokens, and of each prompt n * n - c * c, c of its n tokens being computed. What
        # prefill takes is linear in both.
        self._tokens = 0
        self._squares = 0

    # ---- the work

    def add(self, job: Job) -> None:
        """A prompt is to be computed, as a whole."""
        self._tokens += job.prefill_total
        self._squares += job.prefill_total * job.prefill_total

    def subtract(self, job: Job, tokens: int) -> None:
        """The next tokens of a prompt need not be computed any more."""
        start = job.prefill_done
        self._tokens -= tokens
        self._squares -= (start + tokens) * (start + tokens) - start * start

    def left_after(self, steps: int) -> tuple[int, int]:
        """(tokens, squares) left to compute after so many steps of the run."""
        tokens, squares = self._tokens, self._squares
        if steps:
            for job, chunk in self.chunks:
                start, end = job.prefill_done, job.prefill_done + chunk * steps
                tokens -= end - start
                squares -= end * end - start * start
        return tokens, squares

    def seconds_after(self, steps: int) -> float:
        """What is left takes so long, without the steps' bases."""
        return self._time.prompts_s(*self.left_after(steps))

    # ---- the steps

    def place(self, job: Job) -> None:
        """It has got its place on the device."""
        insort(self.placed, (job.rank, job), key=rank_of)

    def remove(self, job: Job) -> None:
        """It is computed, or has lost its place."""
        self.placed.remove((job.rank, job))

    def fill(self, budget: int) -> tuple[float, float, int]:
        """Choose the chunks: (seconds of the first, growth by step, steps that they stay the same for)."""
        if budget <= 0:
            return 0.0, 0.0, NEVER
        time = self._time
        job = self.placed[0][1]
        left = job.prefill_total - job.prefill_done
        if left >= budget:
            self.chunks = [(job, budget)]
            start = job.prefill_done
            return time.chunk_s(start, start + budget), time.chunk_growth_s(budget), left // budget
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
        """The chunks of the run that has ended."""
        chunks = self.chunks
        self.chunks = []
        return chunks


def rank_of(entry: tuple[Rank, Job]) -> Rank:
    """What queues of jobs are sorted by."""
    return entry[0]
