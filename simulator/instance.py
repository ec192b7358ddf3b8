"""Simulate one instance: continuous batching with chunked prefill, skipping over runs of equal steps.

Between two events a batch is constant: each decode adds one token per step, and one prompt that fills the
budget by itself is prefilled in equal chunks. The step durations of such a run grow linearly (steplog.py), so
the whole run is one event, at its end. Anything that happens to an instance in the middle of a run takes
effect at the end of the step in flight: the run is cut there (`wake`).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol

from simulator.batch import Batch
from simulator.blocks import blocks_for
from simulator.cluster import InstanceSpec
from simulator.events import NEVER, EventQueue
from simulator.host_memory import HostMemory
from simulator.intervals import StepRunIntervals
from simulator.job import Job, JobState
from simulator.prefix_cache import PrefixCache
from simulator.prompts import Prompts, rank_of
from simulator.steplog import StepLog, StepRun
from simulator.steptime import StepTime
from tailrace.cluster import Pool
from tailrace.intra.allocate import Claim, Room, allocate
from tailrace.intra.base import FEWEST_DECODING, IntraPolicy, Rank, TokenIntervals
from tailrace.intra.earliest_due import nominal_s
from tailrace.perf.transfer_rate import TransferRate

# Steps for which the length-heterogeneity penalty of a batch is treated as constant.
_PENALTY_STEPS = 32
# Steps after which prompts that are kept back are considered again.
_KEPT_BACK_STEPS = 8


class Listener(Protocol):
    """Receive the events of an instance. Called at step boundaries; must not call back into the instance
    synchronously."""

    def prefill_done(self, instance: Instance, job: Job, now: float) -> None:
        """Handle the first output token of a request."""

    def reasoning_ended(self, instance: Instance, job: Job, now: float) -> None:
        """Handle the last reasoning token of a request."""

    def stage_outgrown(self, instance: Instance, job: Job, now: float) -> None:
        """Handle a context that has reached the upper length bound of the instance's stage."""

    def finished(self, instance: Instance, job: Job, now: float) -> None:
        """Handle the last token of a request."""

    def preempted(self, instance: Instance, job: Job, now: float) -> None:
        """Handle the preemption of a request from the device."""


class Snapshot(Protocol):
    """A snapshot of an instance whose contents are read only when needed."""

    def read_all(self) -> None:
        """Read everything that is still unread: the instance is about to change."""


class Instance:
    """One engine. Attributes describe the last step boundary; `*_at` methods look into the current run."""

    def __init__(
        self,
        spec: InstanceSpec,
        intra: IntraPolicy,
        events: EventQueue,
        listener: Listener,
        max_steps: int = NEVER,
        cache: PrefixCache | None = None,
    ) -> None:
        """Create an idle instance. `max_steps` limits the steps of a run: 1 simulates every step. Without a
        `cache`, no prefix is kept."""
        self.spec = spec
        self.instance_id = spec.instance_id
        self.pool: Pool | None = spec.pool
        self.total_blocks = spec.kv_blocks
        self.block_tokens = spec.block_tokens
        self.log = StepLog()
        # Context length at which the instance's stage ends, in tokens.
        self.stage_end = NEVER
        # Sorted by rank.
        self.waiting: list[tuple[Rank, Job]] = []
        # Jobs held back from decoding that keep blocks on the device.
        self.paused: dict[Job, None] = {}
        self.migrations_in = 0
        self.migrations_out = 0
        # Measured rate of KV that migrations bring in.
        self.incoming = TransferRate()
        unit_blocks = cache.unit_blocks if cache is not None and spec.host_caching else 0
        self.host = HostMemory(spec.host_kv_bytes // spec.block_bytes, unit_blocks)
        self.step_s = 0.0
        self.swap_s = 0.0
        self.cache = cache
        self._intra = intra
        self._events = events
        self._listener = listener
        self._time = StepTime(spec.profile, spec.penalty)
        self._max_steps = min(max_steps, _PENALTY_STEPS if spec.penalty is not None else NEVER)
        self._watermark = int(intra.watermark * self.total_blocks)
        self._batch = Batch(spec.block_tokens)
        self._prompts = Prompts(self._time)
        # Blocks and batch slots of everything else on the device: prefilling, paused, reserved for imports.
        self._other_blocks = 0
        self._reserved_slots = 0
        # Context tokens of all jobs here that are not decoding.
        self.idle_context = 0
        # Blocks copied to host memory because the device evicted them; the next step waits for the copy.
        self._copied_blocks = 0
        # Called in order at the next boundary.
        self._at_boundary: list[Callable[[float], None]] = []
        # Imports waiting for room, in order: tried at each boundary until one fails.
        self.imports: list[Callable[[float], bool]] = []
        self._run = StepRun()
        # Identifies the current run, so that end events of cut runs can be ignored.
        self._version = 0
        self._starting = False
        self._intervals = StepRunIntervals()
        # Snapshots to read before the next change.
        self.snapshots: list[Snapshot] = []

    # ---- queries, valid at any time

    @property
    def boundary(self) -> int:
        """Return the number of steps completed before the current run."""
        return self._batch.boundary

    @property
    def decoding(self) -> Mapping[Job, int]:
        """Return the jobs of the decoding batch, each with its context length minus the boundary."""
        return self._batch.jobs

    @property
    def prefilling(self) -> Sequence[tuple[Rank, Job]]:
        """Return the jobs with prefill space on the device, by rank."""
        return self._prompts.placed

    def boundary_at(self, now: float) -> int:
        """Return the last boundary reached by `now`."""
        return self._batch.boundary + self._run.ended(now)

    def used_blocks_at(self, boundary: int) -> int:
        """Return the blocks in use or reserved on the device at a boundary of the current run."""
        batch = self._batch
        growth = batch.blocks.allocated(batch.boundary, boundary - batch.boundary)
        return batch.blocks.used + growth + self._other_blocks

    def decode_tokens_at(self, boundary: int) -> int:
        """Return the context tokens of the decoding batch at a boundary of the current run."""
        batch = self._batch
        return batch.kv_tokens + (boundary - batch.boundary) * len(batch)

    def token_interval_s(self, now: float) -> float:
        """Return the mean time between tokens over the last one to two seconds, as workers report it; 0.0 if
        there were none."""
        run = self._run
        return self._intervals.mean_s(now, run, run.ended(now), len(self._batch))

    def backlog_at(self, boundary: int) -> int:
        """Return the prompt tokens not yet computed at a boundary of the current run."""
        return self._prompts.remaining_after(boundary - self._batch.boundary)[0]

    def backlog_s_at(self, boundary: int) -> float:
        """Return the seconds that those prompt tokens take, without the overhead of each step."""
        return self._prompts.remaining_s_after(boundary - self._batch.boundary)

    def prefill_s(self, tokens: int) -> float:
        """Return the seconds that one whole prompt takes, without the overhead of each step."""
        return self._time.chunk_s(0, tokens)

    def prefill_overhead(self, decoding: int, kv_tokens: int) -> tuple[float, int]:
        """Return (overhead in seconds of a prefill step, its prompt token budget) alongside this decoding
        batch."""
        budget = self._intra.prefill_budget(self.spec.chunk_budget_tokens, decoding)
        return self._time.overhead_s(decoding, kv_tokens), max(1, budget)

    @property
    def host_capacity_blocks(self) -> int:
        """Return the capacity of host memory, in blocks."""
        return self.host.total_blocks

    @property
    def host_blocks(self) -> int:
        """Return the blocks of swapped-out requests in host memory; cached blocks yield to them."""
        return self.host.swapped_blocks

    @property
    def is_empty(self) -> bool:
        """Return whether it holds no request and reserves no memory."""
        return not (
            self._run.steps
            or self._batch.jobs
            or self.waiting
            or self._prompts.placed
            or self.paused
            or self._other_blocks
            or self.host_blocks
        )

    @property
    def slots_taken(self) -> int:
        """Return the number of batch slots that are occupied, held back or reserved."""
        return len(self._batch) + len(self._prompts.placed) + len(self.paused) + self._reserved_slots

    # ---- commands, allowed at any time

    def submit(self, job: Job, now: float) -> None:
        """Queue an arriving request."""
        self._before_change()
        job.instance_id = self.instance_id
        job.work_ahead_s = nominal_s(*self._prompts.remaining_after(self._run.ended(now)))
        job.state = JobState.QUEUED
        job.prefill_done = 0
        job.prefill_total = job.prompt + job.tokens
        job.blocks = 0
        self._prompts.add(job)
        self._credit_cached(job)
        self.idle_context += job.prompt + job.tokens
        self._set_stage(job)
        self._schedule_lapse(job, now)
        first = self._enqueue(job)
        if first or self._intra.pass_over:
            self.wake(now)

    def count_leading(self, names: Sequence[int]) -> int:
        """Return how many of these units are cached on the device or on the host, counted without a gap from
        the first."""
        cache, host = self.cache, self.host
        if cache is None:
            return 0
        count = 0
        for name in names:
            if name not in cache and name not in host:
                break
            count += 1
        return count

    def insert_prefix(self, names: Sequence[int], now: float) -> None:
        """Add transferred units to the prefix cache, which must exist."""
        assert self.cache is not None
        self._before_change()
        self.cache.insert(names)
        self._evict()
        if self.host.caches:
            # The next step waits until evicted units have been copied to the host.
            self.wake(now)

    def waits(self, job: Job) -> bool:
        """Return whether the job is queued here as a new prompt with nothing computed."""
        return job.instance_id == self.instance_id and job.state is JobState.QUEUED and not job.tokens

    def withdraw(self, job: Job, now: float) -> None:
        """Remove a queued prompt that is placed on another instance."""
        self._before_change()
        self.waiting.remove((job.rank, job))
        self.idle_context -= job.prompt
        self._prompts.subtract(job, job.prefill_total - job.prefill_done)
        self.wake(now)

    def wake(self, now: float) -> None:
        """Reschedule at the next step boundary, because something changed."""
        if self._run.steps:
            if self._run.cut(now):
                self._schedule_end()
        elif not self._starting:
            self._starting = True
            self._events.schedule(now, self._start)

    def at_boundary(self, action: Callable[[float], None], now: float) -> None:
        """Call `action` at the next boundary, before the next run is planned."""
        self._at_boundary.append(action)
        self.wake(now)

    def reserve(self, blocks: int, now: float) -> bool:
        """Reserve blocks and a batch slot for an import, to be consumed by `receive` or returned by
        `unreserve`. Return whether both were available."""
        watermark = min(self._watermark, max(0, self.total_blocks - blocks))
        if self.slots_taken >= self.spec.max_num_seqs or not self._reserve_blocks(blocks, watermark, now):
            return False
        self._reserved_slots += 1
        return True

    def extend(self, blocks: int, now: float) -> bool:
        """Reserve more blocks for an import that already has its slot. Return whether they were available."""
        return self._reserve_blocks(blocks, 0, now)

    def unreserve(self, blocks: int, now: float) -> None:
        """Return the blocks and the slot reserved for an import."""
        self._before_change()
        self._other_blocks -= blocks
        self._reserved_slots -= 1
        self.wake(now)

    def _reserve_blocks(self, blocks: int, watermark: int, now: float) -> bool:
        run = self._run
        # Leave the blocks that the step in flight will allocate.
        inflight = self.boundary + min(run.ended(now) + 1, run.steps)
        if blocks + watermark > self.total_blocks - self.used_blocks_at(inflight):
            return False
        self._before_change()
        self._other_blocks += blocks
        self.wake(now)
        return True

    def reserve_host(self, blocks: int) -> bool:
        """Reserve host memory. Return whether it was available."""
        self._before_change()
        return self.host.reserve(blocks)

    def unreserve_host(self, blocks: int) -> None:
        """Return reserved host memory."""
        self._before_change()
        self.host.release(blocks)

    def hold_swapped(self, job: Job) -> None:
        """Prevent a swapped-out job from being resumed while its KV migrates from the host. It stays in
        `waiting`."""
        self._before_change()
        job.state = JobState.PAUSED

    # ---- commands, allowed at a boundary only

    def pause(self, job: Job) -> None:
        """Stop decoding a job. It keeps the blocks of its computed KV: all tokens but the latest."""
        self._batch.leave(job, self.log)
        job.blocks = blocks_for(job.prompt + job.tokens - 1, self.block_tokens)
        job.state = JobState.PAUSED
        self.paused[job] = None
        self._other_blocks += job.blocks
        self.idle_context += job.prompt + job.tokens

    def resume(self, job: Job) -> None:
        """Resume a paused job; one held in host memory waits for its turn again."""
        if job not in self.paused:
            job.state = JobState.SWAPPED
            return
        self._unpause(job)
        self._batch.join(job)

    def release(self, job: Job, now: float) -> None:
        """Free what a paused job held, after it has moved to another instance."""
        self._before_change()
        if job in self.paused:
            self._release_kv(job)
            self._unpause(job)
        else:
            self.waiting.remove((job.rank, job))
            self.idle_context -= job.prompt + job.tokens
            self.host.release(job.blocks)
        self.wake(now)

    def receive(self, job: Job, reserved_blocks: int) -> None:
        """Resume an imported job in the room reserved for it."""
        self._other_blocks -= reserved_blocks
        self._reserved_slots -= 1
        job.instance_id = self.instance_id
        job.rank_until = 0
        self._set_stage(job)
        self._name_units(job, job.prompt + job.tokens - 1)
        self._batch.join(job)

    def receive_on_host(self, job: Job, blocks: int) -> None:
        """Queue an imported job whose KV is in the host memory reserved for it."""
        job.instance_id = self.instance_id
        job.state = JobState.SWAPPED
        job.blocks = blocks
        job.rank_until = 0
        self.idle_context += job.prompt + job.tokens
        self._set_stage(job)
        self._enqueue(job)

    def set_stage_end(self, end: int, now: float) -> None:
        """Set the upper length bound of the instance's stage. Decoding jobs already beyond it are reported as
        they continue."""
        if end == self.stage_end:
            return
        self.stage_end = end
        for job in [
            *self._batch.jobs,
            *self.paused,
            *(j for _, j in self._prompts.placed),
            *(j for _, j in self.waiting),
        ]:
            self._set_stage(job)
        self.at_boundary(self._reschedule_milestones, now)

    # ---- the run

    def _start(self, now: float) -> None:
        self._starting = False
        if self._run.steps:
            # The instance was woken while it was planning a run.
            self.wake(now)
        else:
            self._plan_run(now)

    def _schedule_end(self) -> None:
        self._version += 1
        version = self._version

        def end(now: float) -> None:
            if self._version == version:
                self._end_run(now)

        self._events.schedule(self._run.end_s(), end)

    def _before_change(self) -> None:
        """Read all outstanding snapshots before the state changes."""
        if self.snapshots:
            for snapshot in self.snapshots:
                snapshot.read_all()
            self.snapshots.clear()

    def _end_run(self, now: float) -> None:
        self._before_change()
        run, batch = self._run, self._batch
        steps = run.steps
        self.log.close(steps)
        self._intervals.add(run, steps, len(batch))
        self.step_s = run.last_step_s()
        run.steps = 0
        batch.advance(steps)
        for job in batch.due():
            self._reach_milestone(job, now)
        for job, tokens in self._prompts.take_chunks():
            self._add_computed(job, tokens * steps, now)
        self._plan_run(now)

    def _plan_run(self, now: float) -> None:
        self._before_change()
        while self._at_boundary:
            actions = self._at_boundary
            self._at_boundary = []
            for action in actions:
                action(now)
        self._evict()
        while self.imports and self.imports[0](now):
            self.imports.pop(0)
        batch, prompts = self._batch, self._prompts
        stall_s = 0.0
        limit = self._max_steps
        preempted = False
        if self.waiting or batch.blocks.used + self._other_blocks > self.total_blocks:
            stall_s, preempted, kept_back = self._allocate(now)
            short = preempted
            # Blocks that a preempted job shared are still in use, so more jobs may have to go.
            while short and batch.blocks.used + self._other_blocks > self.total_blocks:
                extra_s, short, _ = self._allocate(now)
                stall_s += extra_s
            if kept_back:
                limit = min(limit, _KEPT_BACK_STEPS)
            if preempted:
                limit = 1
            elif self.waiting and self._intra.preemptive:
                limit = min(limit, batch.steps_to_rank_change(self._intra))
        decoding = len(batch)
        chunk_s = growth_s = 0.0
        if prompts.placed:
            budget = self._intra.prefill_budget(self.spec.chunk_budget_tokens, decoding)
            chunk_s, growth_s, whole = prompts.plan_chunks(budget)
            if prompts.chunks:
                limit = min(limit, whole)
        if self.host.caches:
            self._evict()
            if self._copied_blocks and (decoding or prompts.chunks):
                stall_s += self._swap_s(self._copied_blocks)
                self._copied_blocks = 0
        if not decoding and not prompts.chunks:
            self.step_s = 0.0
            if preempted:
                # The freed memory may admit another job.
                self.wake(now)
            return
        first_s, increment_s = self._time.run(chunk_s, decoding, batch.kv_tokens, batch.lengths)
        if decoding:
            limit = min(limit, batch.steps_to_milestone())
            free = self.total_blocks - batch.blocks.used - self._other_blocks
            if self.host.caches and self.cache is not None:
                # A step that evicts waits for the copy, so the run ends before it.
                free = self.cache.slack(free)
            limit = batch.blocks.steps_until(batch.boundary, free, limit)
        self.swap_s += stall_s
        self._run = run = StepRun(now + stall_s, first_s, increment_s + growth_s, limit)
        self.step_s = first_s
        self.log.open(batch.boundary, run.start_s, first_s, run.increment_s)
        for job, _ in prompts.chunks:
            if job.queue_s is None:
                job.queue_s = now - job.request.arrival_s
        self._schedule_end()

    # ---- memory

    def _allocate(self, now: float) -> tuple[float, bool, bool]:
        """Admit and preempt. Return (seconds of copies to and from host memory, whether any job was
        preempted, whether prompts were kept back)."""
        room = Room(
            self.total_blocks,
            self.total_blocks - self._batch.blocks.used - self._other_blocks,
            self.spec.max_num_seqs - self.slots_taken,
            self._intra.prefill_budget(self.spec.chunk_budget_tokens, len(self._batch)),
            self._token_intervals(now),
        )
        prefilling = ((rank, job.prefill_total - job.prefill_done) for rank, job in self._prompts.placed)
        grants = allocate(self._intra, self._running_claims, self._waiting_claims(), room, prefilling)
        stall_s = 0.0
        for job in grants.preempt:
            stall_s += self._preempt(job, now)
        for job in grants.admit:
            stall_s += self._admit(job)
        for job, blocks in grants.passed:
            job.passed_blocks += blocks
        return stall_s, bool(grants.preempt), grants.kept_back > 0

    def _token_intervals(self, now: float) -> TokenIntervals | None:
        if not self._intra.may_keep_back:
            return None
        if sum(not job.migrating for job in self._batch.jobs) < FEWEST_DECODING:
            return None
        mean_s = self.token_interval_s(now)
        return TokenIntervals(now, mean_s, self._time.shortest_s) if mean_s else None

    def _running_claims(self) -> list[Claim[Job]]:
        prefilling = (Claim(rank, job, job.blocks) for rank, job in self._prompts.placed)
        return [*self._batch.claims(self._intra), *prefilling]

    def _waiting_claims(self) -> Iterator[Claim[Job]]:
        paused = JobState.PAUSED
        return (self._waiting_claim(rank, job) for rank, job in self.waiting if job.state is not paused)

    def _waiting_claim(self, rank: Rank, job: Job) -> Claim[Job]:
        if job.state is JobState.SWAPPED:
            return Claim(rank, job, job.blocks, 0, job.passed_blocks)
        blocks = blocks_for(job.prefill_total, self.block_tokens)
        if self.cache is not None:
            blocks -= self.cache.in_use(job.request.unit_names[: self._available_units(job)])
        return Claim(rank, job, blocks, job.prefill_total - job.prefill_done, job.passed_blocks)

    def _admit(self, job: Job) -> float:
        """Admit a waiting job. Return the seconds to copy its KV or its prefix from host memory."""
        self.waiting.remove((job.rank, job))
        if job.state is JobState.SWAPPED:
            self.idle_context -= job.prompt + job.tokens
            self.host.release(job.blocks)
            self._batch.join(job)
            return self._swap_s(job.blocks)
        job.state = JobState.PREFILLING
        job.blocks = blocks_for(job.prefill_total, self.block_tokens)
        self._other_blocks += job.blocks
        load_s = self._acquire_prefix(job)
        self._prompts.place(job)
        return load_s

    def _swap_s(self, blocks: int) -> float:
        """Return the seconds to copy KV to or from host memory: of one request, or of all blocks that a step
        evicts."""
        return self.spec.profile.swap.ms(blocks * self.spec.block_bytes) / 1e3

    def _preempt(self, job: Job, now: float) -> float:
        """Preempt a job. Return the seconds that copying its KV to host memory takes."""
        stall_s = 0.0
        self._release_kv(job)
        if job.state is JobState.DECODING:
            blocks = self._batch.leave(job, self.log)
            self.idle_context += job.prompt + job.tokens
            if self.host.reserve(blocks):
                job.state = JobState.SWAPPED
                job.blocks = blocks
                job.swapped += 1
                stall_s = self._swap_s(blocks)
            else:
                self._drop_kv(job)
        else:
            self._prompts.remove(job)
            self._other_blocks -= job.blocks
            self._prompts.subtract(job, job.prefill_total - job.prefill_done)
            self._drop_kv(job)
        self._schedule_lapse(job, now)
        self._enqueue(job)
        self._listener.preempted(self, job, now)
        return stall_s

    def _drop_kv(self, job: Job) -> None:
        job.state = JobState.QUEUED
        job.recomputed += 1
        job.blocks = 0
        job.prefill_done = 0
        job.prefill_total = job.prompt + job.tokens
        self._prompts.add(job)
        self._credit_cached(job)

    def _enqueue(self, job: Job) -> bool:
        """Insert a job into the queue by rank. Return whether it is now first."""
        rank = job.rank_at(job.tokens, self._intra)
        job.passed_blocks = 0
        insort(self.waiting, (rank, job), key=rank_of)
        return self.waiting[0][1] is job

    def _schedule_lapse(self, job: Job, now: float) -> None:
        """Schedule the time-based rank change of a prompt that is about to wait."""
        if job.lapsed or job.tokens:
            return
        lapses_s = self._intra.lapses_s(job.view(0))
        if lapses_s is None:
            return
        if lapses_s > now:
            self._events.schedule(lapses_s, partial(self._lapse, job))
        else:
            job.lapsed = True
            job.rank_until = 0

    def _lapse(self, job: Job, now: float) -> None:
        """Apply the rank change of a prompt that still waits."""
        if job.lapsed or not self.waits(job):
            return
        self._before_change()
        self.waiting.remove((job.rank, job))
        job.lapsed = True
        job.rank_until = 0
        insort(self.waiting, (job.rank_at(job.tokens, self._intra), job), key=rank_of)
        self.wake(now)

    # ---- the prefix cache

    def _findable_units(self, job: Job) -> int:
        """Return the number of named units that a new prefill of the job could find in a cache."""
        unit = job.request.unit_tokens
        return min(len(job.request.unit_names), (job.prefill_total - 1) // unit) if unit else 0

    def _available_units(self, job: Job) -> int:
        """Return the units available: on the device, or on the host if loading takes less time than
        computing."""
        cache, names, limit = self.cache, job.request.unit_names, self._findable_units(job)
        assert cache is not None
        cached = cache.count_leading(names, limit)
        if not self.host.caches or cached == limit or names[cached] not in self.host:
            return cached
        total, unit = self.count_leading(names[:limit]), job.request.unit_tokens
        load_s = self._swap_s(len(cache.missing(names[cached:total])) * cache.unit_blocks)
        return total if load_s < self._time.chunk_s(cached * unit, total * unit) else cached

    def _credit_cached(self, job: Job) -> None:
        """Count what is cached now as computed, since the job will probably find it when admitted."""
        if self.cache is not None:
            cached = self._available_units(job) * job.request.unit_tokens
            self._prompts.subtract(job, cached - job.prefill_done)
            job.prefill_done = cached

    def _acquire_prefix(self, job: Job) -> float:
        """Take references to the cached prefix of an admitted job. Return the seconds to load its part in
        host memory."""
        cache = self.cache
        if cache is None:
            return 0.0
        self._credit_cached(job)
        names = job.request.unit_names[: self._whole_units(job.prefill_done, job)]
        loaded = cache.missing(names)
        self.host.touch(loaded)
        cache.insert(loaded)
        shared = cache.shared
        cache.acquire(names)
        job.held_names = list(names)
        # Blocks shared by several jobs occupy memory once.
        self._other_blocks -= cache.shared - shared
        if job.cached is None:
            job.cached = job.prefill_done
            job.loaded = len(loaded) * job.request.unit_tokens
        self._evict()
        return self._swap_s(len(loaded) * cache.unit_blocks) if loaded else 0.0

    def _whole_units(self, tokens: int, job: Job) -> int:
        """Return the number of named units that lie entirely within the first `tokens`."""
        unit = job.request.unit_tokens
        return min(len(job.request.unit_names), tokens // unit) if unit else 0

    def _name_units(self, job: Job, tokens: int) -> None:
        """Make the units within the first `tokens` findable, now that their KV is computed."""
        if self.cache is None:
            return
        names, held = job.request.unit_names, job.held_names
        for number in range(len(held), self._whole_units(tokens, job)):
            if not self.cache.add(names[number]):
                # Another copy has this name already; the following units stay unnamed too.
                break
            held.append(names[number])

    def _release_kv(self, job: Job) -> None:
        """Release the job's blocks; named units stay findable until they are evicted."""
        cache = self.cache
        if cache is None:
            return
        decoded = job.prompt + job.tokens_at(self.boundary) - 1
        tokens = job.prefill_done if job.state is JobState.PREFILLING else decoded
        named = len(job.held_names) * job.request.unit_tokens // self.block_tokens
        shared = cache.shared
        cache.release(job.held_names, tokens // self.block_tokens - named)
        self._other_blocks += shared - cache.shared
        job.held_names = []

    def _evict(self) -> None:
        """Evict cached units that requests in flight leave no room for, to host memory if it caches them."""
        if self.cache is not None:
            room = self.total_blocks - self._batch.blocks.used - self._other_blocks
            self._copied_blocks += self.host.store(self.cache.shrink(room))

    def _unpause(self, job: Job) -> None:
        del self.paused[job]
        self._other_blocks -= job.blocks
        self.idle_context -= job.prompt + job.tokens

    def _reschedule_milestones(self, now: float) -> None:
        for job in self._batch.jobs:
            self._batch.schedule_milestone(job)

    def _set_stage(self, job: Job) -> None:
        job.boundary_tokens = NEVER if self.stage_end == NEVER else max(1, self.stage_end - job.prompt)

    # ---- effects of completed steps

    def _reach_milestone(self, job: Job, now: float) -> None:
        tokens = self._batch.tokens_of(job)
        self._record_token(job, tokens, now)
        if tokens < job.total:
            self._batch.schedule_milestone(job)
        else:
            self._batch.leave(job, self.log)
            self._finish(job, now)

    def _add_computed(self, job: Job, tokens: int, now: float) -> None:
        """Account for computed prompt tokens; the last of them yields an output token."""
        self._prompts.subtract(job, tokens)
        job.prefill_done += tokens
        self._name_units(job, job.prefill_done)
        if job.prefill_done < job.prefill_total:
            return
        self._prompts.remove(job)
        self._other_blocks -= job.blocks
        self.idle_context -= job.prompt + job.tokens
        job.record_decoding(self.log, self.boundary - 1, self.boundary)
        job.tokens += 1
        self._record_token(job, job.tokens, now)
        if job.tokens < job.total:
            self._batch.join(job)
        else:
            self._finish(job, now)

    def _record_token(self, job: Job, tokens: int, now: float) -> None:
        """Record what the job's latest token begins or ends, and notify the listener."""
        if tokens == 1:
            job.first_token_s = now
            job.rank_until = 0
        if tokens == job.reasoning + 1:
            job.first_answer_s = now
            if job.reasoning_end_s is not None:
                job.blocking_s = max(0.0, now - self.step_s - job.reasoning_end_s)
        if tokens == job.reasoning:
            job.reasoning_end_s = now
            job.rank_until = 0
        if tokens >= job.total:
            return
        if tokens == 1:
            self._listener.prefill_done(self, job, now)
        if tokens == job.reasoning:
            self._listener.reasoning_ended(self, job, now)
        if tokens >= job.boundary_tokens:
            job.boundary_tokens = NEVER
            self._listener.stage_outgrown(self, job, now)

    def _finish(self, job: Job, now: float) -> None:
        job.state = JobState.DONE
        job.version += 1
        job.finish_s = now
        self._name_units(job, job.prompt + job.total - 1)
        self._release_kv(job)
        self._listener.finished(self, job, now)
