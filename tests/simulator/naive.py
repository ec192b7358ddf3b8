"""A reference that simulates one instance step by step and records the time of each token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from simulator.cluster import InstanceSpec
from simulator.request import SimRequest
from tailrace.cluster import Phase
from tailrace.intra.allocate import Claim, Room, allocate
from tailrace.intra.base import IntraPolicy, JobView, Rank
from tailrace.intra.earliest_due import nominal_s


@dataclass(eq=False)
class NaiveJob:
    request: SimRequest
    order: int
    where: str = "queued"
    times: list[float] = field(default_factory=list)
    prefilled: int = 0
    to_prefill: int = 0
    work_ahead_s: float = 0.0
    swaps: int = 0
    recomputes: int = 0
    passed_blocks: int = 0
    lapsed: bool = False

    @property
    def context(self) -> int:
        return self.request.prompt_tokens + len(self.times)

    def rank(self, intra: IntraPolicy) -> Rank:
        generated, reasoning = len(self.times), self.request.reasoning_tokens
        phase = Phase.ANSWERING if generated >= reasoning else Phase.REASONING
        in_phase = generated - reasoning if phase is Phase.ANSWERING else generated
        if not generated:
            phase, in_phase = Phase.PREFILL, 0
        return intra.rank(self.view(phase, generated, in_phase))

    def view(self, phase: Phase, generated: int, in_phase: int) -> JobView:
        request = self.request
        began = self.times[max(0, request.reasoning_tokens - 1)] if phase is Phase.ANSWERING else 0.0
        return JobView(
            self.order,
            phase,
            request.prompt_tokens,
            generated,
            in_phase,
            request.arrival_s,
            self.work_ahead_s,
            began,
            self.lapsed,
        )


class Naive:
    def __init__(self, spec: InstanceSpec, requests: Sequence[SimRequest], intra: IntraPolicy) -> None:
        self.spec = spec
        self.intra = intra
        ordered = sorted(requests, key=lambda request: request.arrival_s)
        self.arrivals = [NaiveJob(request, order) for order, request in enumerate(ordered)]
        self.jobs = list(self.arrivals)
        self.waiting: list[NaiveJob] = []
        self.prefilling: list[NaiveJob] = []
        self.decoding: list[NaiveJob] = []
        self.host_blocks = 0
        self.now = 0.0

    def run(self) -> dict[str, NaiveJob]:
        while any(len(job.times) < job.request.output_tokens for job in self.jobs):
            self.step()
        return {job.request.request_id: job for job in self.jobs}

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.spec.block_tokens)

    def step(self) -> None:
        busy = self.decoding or self.prefilling or self.waiting
        if not busy:
            self.now = max(self.now, self.arrivals[0].request.arrival_s)
        self.add_arrivals(self.now)
        stall_s, preempted = self.share_memory()
        if preempted and not self.decoding and not self.prefilling:
            again, _ = self.share_memory()
            # No step began, so the copies of the first round are not waited for.
            stall_s = again
        chunks: list[tuple[NaiveJob, int]] = []
        budget = self.intra.prefill_budget(self.spec.chunk_budget_tokens, len(self.decoding))
        for job in sorted(self.prefilling, key=lambda job: job.rank(self.intra)):
            tokens = min(budget, job.to_prefill - job.prefilled)
            if tokens:
                chunks.append((job, tokens))
                budget -= tokens
        profile = self.spec.profile
        prefill_ms = sum(profile.prefill.ms(job.prefilled, job.prefilled + n) for job, n in chunks)
        kv_tokens = sum(job.context for job in self.decoding)
        end = self.now + stall_s + profile.step_ms(prefill_ms, len(self.decoding), kv_tokens) / 1e3
        # Arrivals during the step see the state at its start.
        self.add_arrivals(math.nextafter(end, 0.0))
        self.now = end
        for job in list(self.decoding):
            self.emit(job)
        for job, tokens in chunks:
            job.prefilled += tokens
            if job.prefilled == job.to_prefill:
                self.prefilling.remove(job)
                self.decoding.append(job)
                self.emit(job)

    def add_arrivals(self, until: float) -> None:
        while self.arrivals and self.arrivals[0].request.arrival_s <= until:
            job = self.arrivals.pop(0)
            job.to_prefill = job.request.prompt_tokens
            queued = [j for j in self.waiting if j.where == "queued"]
            left = [(j.to_prefill, j.prefilled) for j in (*queued, *self.prefilling)]
            job.work_ahead_s = nominal_s(sum(n - c for n, c in left), sum(n * n - c * c for n, c in left))
            self.waiting.append(job)

    def emit(self, job: NaiveJob) -> None:
        job.times.append(self.now)
        if len(job.times) == job.request.output_tokens:
            self.decoding.remove(job)

    def share_memory(self) -> tuple[float, bool]:
        intra = self.intra
        for job in self.waiting:
            lapses_s = None if job.times else intra.lapses_s(job.view(Phase.PREFILL, 0, 0))
            job.lapsed = job.lapsed or (lapses_s is not None and lapses_s <= self.now)
        running = [Claim(j.rank(intra), j, self.blocks(j.context)) for j in self.decoding]
        running += [Claim(j.rank(intra), j, self.blocks(j.to_prefill)) for j in self.prefilling]
        free = self.spec.kv_blocks - sum(claim.blocks for claim in running)
        waiting = []
        for job in sorted(self.waiting, key=lambda job: job.rank(intra)):
            prompt = job.to_prefill if job.where == "queued" else 0
            blocks = self.blocks(prompt or job.context)
            waiting.append(Claim(job.rank(intra), job, blocks, prompt, job.passed_blocks))
        budget = intra.prefill_budget(self.spec.chunk_budget_tokens, len(self.decoding))
        room = Room(self.spec.kv_blocks, free, self.spec.max_num_seqs - len(running), budget)
        prefilling = sorted((j.rank(intra), j.to_prefill - j.prefilled) for j in self.prefilling)
        grants = allocate(intra, lambda: running, waiting, room, prefilling)
        for job, blocks in grants.passed:
            job.passed_blocks += blocks
        stall_s = 0.0
        for job in grants.preempt:
            stall_s += self.preempt(job)
        for job in grants.admit:
            self.waiting.remove(job)
            if job.where == "swapped":
                stall_s += self.swap_s(self.blocks(job.context))
                self.host_blocks -= self.blocks(job.context)
                self.decoding.append(job)
            else:
                self.prefilling.append(job)
        used = sum(self.blocks(j.context) for j in self.decoding)
        used += sum(self.blocks(j.to_prefill) for j in self.prefilling)
        assert used <= self.spec.kv_blocks
        return stall_s, bool(grants.preempt)

    def swap_s(self, blocks: int) -> float:
        swap = self.spec.profile.swap
        return swap.base_ms / 1e3 + blocks * self.spec.block_bytes / swap.bytes_per_s

    def preempt(self, job: NaiveJob) -> float:
        self.waiting.append(job)
        job.passed_blocks = 0
        blocks = self.blocks(job.context)
        if job in self.decoding:
            self.decoding.remove(job)
            if (self.host_blocks + blocks) * self.spec.block_bytes <= self.spec.host_kv_bytes:
                self.host_blocks += blocks
                job.where = "swapped"
                job.swaps += 1
                return self.swap_s(blocks)
        else:
            self.prefilling.remove(job)
        job.where = "queued"
        job.recomputes += 1
        job.prefilled, job.to_prefill = 0, job.context
        return 0
