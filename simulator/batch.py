"""The requests that decode on one instance: their KV, and when something next happens to one of them."""

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
    """Each of them makes one token a step. `boundary`: of the instance, where the last run ended."""

    __slots__ = ("_milestones", "blocks", "boundary", "jobs", "kv_tokens")

    def __init__(self, block_tokens: int) -> None:
        self.boundary = 0
        # Each with what its context is beyond the boundary: constant, since each makes one token a step.
        self.jobs: dict[Job, int] = {}
        self.blocks = DecodeBlocks(block_tokens)
        # Of their context, at the boundary.
        self.kv_tokens = 0
        # (boundary, order, version, job): the next milestone of each.
        self._milestones: list[tuple[int, int, int, Job]] = []

    def __len__(self) -> int:
        return len(self.jobs)

    def tokens_of(self, job: Job) -> int:
        """Output tokens that it has made."""
        return job.tokens + self.boundary - job.joined

    def join(self, job: Job) -> None:
        """It decodes from here on."""
        context = job.prompt + job.tokens
        job.state = JobState.DECODING
        job.joined = self.boundary
        job.residue = self.blocks.add(context, self.boundary)
        self.kv_tokens += context
        self.jobs[job] = context - self.boundary
        self.mark(job)

    def leave(self, job: Job, log: StepLog) -> int:
        """It decodes no longer; the blocks that it held."""
        boundary = self.boundary
        job.decoded(log, job.joined, boundary)
        job.tokens += boundary - job.joined
        job.joined = boundary
        job.version += 1
        del self.jobs[job]
        context = job.prompt + job.tokens
        self.kv_tokens -= context
        return self.blocks.remove(context, job.residue)

    def advance(self, steps: int) -> None:
        """A run has ended."""
        self.blocks.advance(self.boundary, steps)
        self.kv_tokens += steps * len(self.jobs)
        self.boundary += steps

    # ---- milestones

    def mark(self, job: Job) -> None:
        """Note the next milestone of one."""
        job.version += 1
        tokens = self.tokens_of(job)
        if tokens >= job.boundary_tokens:
            # It came beyond its stage's end unnoticed: the stage was moved, or it was.
            job.boundary_tokens = tokens + 1
        at = self.boundary + job.next_milestone(tokens) - tokens
        heapq.heappush(self._milestones, (at, job.order, job.version, job))

    def due(self) -> Iterator[Job]:
        """Those that have reached their milestone; each is to be marked again or to leave before the next."""
        milestones = self._milestones
        while milestones and milestones[0][0] <= self.boundary:
            _, _, version, job = heapq.heappop(milestones)
            if job.version == version:
                yield job

    def steps_to_milestone(self) -> int:
        """Steps until somebody reaches one; there must be somebody."""
        milestones = self._milestones
        while milestones[0][3].version != milestones[0][2]:
            heapq.heappop(milestones)
        return milestones[0][0] - self.boundary

    # ---- for the next run

    def steps_to_rank_change(self, intra: IntraPolicy) -> int:
        """Steps for which no rank changes."""
        least = NEVER
        for job in self.jobs:
            tokens = self.tokens_of(job)
            if tokens >= job.rank_until:
                job.rank_at(tokens, intra)
            left = job.rank_until - tokens
            if left < least:
                least = left
        return least

    def claims(self, intra: IntraPolicy) -> list[Claim[Job]]:
        """What each holds, and its rank."""
        size = self.blocks.block_tokens
        claims = []
        for job in self.jobs:
            tokens = self.tokens_of(job)
            rank = job.rank if tokens < job.rank_until else job.rank_at(tokens, intra)
            claims.append(Claim(rank, job, blocks_for(job.prompt + tokens, size)))
        return claims

    def lengths(self) -> NDArray[np.int64]:
        """Tokens of context of each."""
        return np.fromiter(self.jobs.values(), np.int64, len(self.jobs)) + self.boundary
