"""The decoding requests of one instance: their KV, and the next event of each."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from simulator.blocks import DecodeBlocks, blocks_for
from simulator.events import NEVER
from simulator.job import Job, JobState
from simulator.steplog import StepLog
from tailrace.intra.allocate import Claim
from tailrace.intra.base import IntraPolicy


class Batch:
    """The decoding batch. Each request gains one token per step. `boundary` is where the instance's last run
    ended."""

    __slots__ = ("_milestones", "blocks", "boundary", "jobs", "kv_tokens")

    def __init__(self, block_tokens: int) -> None:
        self.boundary = 0
        # Each job's context length minus the boundary: constant, since both grow by one per step.
        self.jobs: dict[Job, int] = {}
        self.blocks = DecodeBlocks(block_tokens)
        # Context tokens of all jobs at the boundary.
        self.kv_tokens = 0
        # (boundary, order, version, job) of each job's next milestone.
        self._milestones: list[tuple[int, int, int, Job]] = []

    def __len__(self) -> int:
        return len(self.jobs)

    def tokens_of(self, job: Job) -> int:
        """Return the job's output tokens at the boundary."""
        return job.tokens + self.boundary - job.joined

    def join(self, job: Job) -> None:
        """Start decoding a job."""
        context = job.prompt + job.tokens
        job.state = JobState.DECODING
        job.joined = self.boundary
        job.residue = self.blocks.add(context, self.boundary)
        self.kv_tokens += context
        self.jobs[job] = context - self.boundary
        self.schedule_milestone(job)

    def leave(self, job: Job, log: StepLog) -> int:
        """Stop decoding a job. Return the blocks that it held."""
        boundary = self.boundary
        job.record_decoding(log, job.joined, boundary)
        job.tokens += boundary - job.joined
        job.joined = boundary
        job.version += 1
        del self.jobs[job]
        context = job.prompt + job.tokens
        self.kv_tokens -= context
        return self.blocks.remove(context, job.residue)

    def advance(self, steps: int) -> None:
        """Account for the end of a run of `steps` steps."""
        self.blocks.advance(self.boundary, steps)
        self.kv_tokens += steps * len(self.jobs)
        self.boundary += steps

    # ---- milestones

    def schedule_milestone(self, job: Job) -> None:
        """Schedule the job's next milestone."""
        job.version += 1
        tokens = self.tokens_of(job)
        if tokens >= job.boundary_tokens:
            # The job passed its stage's end without an event: the stage was changed, or the job was moved.
            job.boundary_tokens = tokens + 1
        at = self.boundary + job.next_milestone(tokens) - tokens
        heapq.heappush(self._milestones, (at, job.order, job.version, job))

    def due(self) -> Iterator[Job]:
        """Yield jobs that have reached their milestone; each must be rescheduled or leave before the next is
        taken."""
        milestones = self._milestones
        while milestones and milestones[0][0] <= self.boundary:
            _, _, version, job = heapq.heappop(milestones)
            if job.version == version:
                yield job

    def steps_to_milestone(self) -> int:
        """Return the steps until the next milestone. The batch must not be empty."""
        milestones = self._milestones
        while milestones[0][3].version != milestones[0][2]:
            heapq.heappop(milestones)
        return milestones[0][0] - self.boundary

    # ---- for the next run

    def steps_to_rank_change(self, intra: IntraPolicy) -> int:
        """Return the number of steps during which no rank changes."""
        least = NEVER
        for job in self.jobs:
            tokens = self.tokens_of(job)
            if tokens >= job.rank_until:
                job.rank_at(tokens, intra)
            remaining = job.rank_until - tokens
            if remaining < least:
                least = remaining
        return least

    def claims(self, intra: IntraPolicy) -> list[Claim[Job]]:
        """Return each job's rank and the blocks it holds."""
        size = self.blocks.block_tokens
        claims = []
        for job in self.jobs:
            tokens = self.tokens_of(job)
            rank = job.rank if tokens < job.rank_until else job.rank_at(tokens, intra)
            claims.append(Claim(rank, job, blocks_for(job.prompt + tokens, size)))
        return claims

    def lengths(self) -> NDArray[np.int64]:
        """Return the context length of each job, in tokens."""
        return np.fromiter(self.jobs.values(), np.int64, len(self.jobs)) + self.boundary
