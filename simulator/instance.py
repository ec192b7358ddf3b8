"""One instance: continuous batching with chunked prefill, jumping over runs of equal steps.

Between two events a batch is constant: each decode adds one token a step, and one prompt that fills the
budget by itself takes equal chunks. Such a run has evenly growing step durations (steplog.py) and is one
event, at its end. Whatever happens to an instance in the middle of a run takes effect at the end of the
step in flight: the run is cut there (`wake`).
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
from simulator.intervals import RecentIntervals
from simulator.job import Job, JobState
from simulator.prefix_cache import PrefixCache
from simulator.prompts import Prompts, rank_of
from simulator.steplog import StepLog
from simulator.steprun import StepRun
from simulator.steptime import StepTime
from tailrace.cluster import Pool
from tailrace.intra.allocate import Claim, Room, allocate
from tailrace.intra.base import IntraPolicy, Rank
from tailrace.intra.due import nominal_s
from tailrace.perf.transfer_rate import TransferRate

# Steps for which the length-heterogeneity penalty of a batch is taken as constant.
_PENALTY_STEPS = 32


class Listener(Protocol):
    """Who hears of what happens on an instance. Called at step boundaries; must not call back at once."""

    def prefill_done(self, instance: Instance, job: Job, now: float) -> None:
        """A request made its first output token."""

    def reasoning_ended(self, instance: Instance, job: Job, now: float) -> None:
        """A request made its last reasoning token."""

    def outgrown(self, instance: Instance, job: Job, now: float) -> None:
        """A request's context has reached the end of the instance's stage."""

    def finished(self, instance: Instance, job: Job, now: float) -> None:
        """A request made its last token."""

    def preempted(self, instance: Instance, job: Job, now: float) -> None:
        """A request lost its place on the device."""


class Watcher(Protocol):
    """Who wants to have looked at an instance before it changes."""

    def look_at_all(self) -> None:
        """It is about to change."""


class Instance:
    """State between boundaries is that of the last boundary; `*_at` methods look into the run."""

    def __init__(
        self,
        spec: InstanceSpec,
        intra: IntraPolicy,
        events: EventQueue,
        listener: Listener,
        most_steps: int = NEVER,
        cache: PrefixCache | None = None,
    ) -> None:
        """`most_steps`: longest run; 1 steps through every iteration. `cache` None: no prefix is kept."""
        self.spec = spec
        self.instance_id = spec.instance_id
        self.pool: Pool | None = spec.pool
        self.total_blocks = spec.kv_blocks
        self.block_tokens = spec.block_tokens
        self.log = StepLog()
        # Where the instance's stage ends, in tokens of context.
        self.stage_end = NEVER
        # Sorted by rank.
        self.waiting: list[tuple[Rank, Job]] = []
        # Jobs that are held back, with blocks of their own.
        self.paused: dict[Job, None] = {}
        self.migrations_in = 0
        self.migrations_out = 0
        # How fast KV of migrations comes in.
        self.incoming = TransferRate()
        unit_blocks = cache.unit_blocks if cache is not None and spec.host_caching else 0
        self.host = HostMemory(spec.host_kv_bytes // spec.block_bytes, unit_blocks)
        self.step_s = 0.0
        self.busy_s = 0.0
        self.swap_s = 0.0
        self.cache = cache
        self._intra = intra
        self._events = events
        self._listener = listener
        self._time = StepTime(spec.profile, spec.penalty)
        self._most_steps = min(most_steps, _PENALTY_STEPS if spec.penalty is not None else NEVER)
        self._watermark = int(intra.watermark * self.total_blocks)
        self._batch = Batch(spec.block_tokens)
        self._prompts = Prompts(self._time)
        # Blocks and seats of all others on the device: prefilling, paused, reserved for imports.
        self._other_blocks = 0
        self._reserved_seats = 0
        # Context of all jobs here that are not decoding.
        self.idle_context = 0
        # Copied to host memory because the device evicted them; the next step waits for that.
        self._copied_blocks = 0
        # Called at the next boundary, in order.
        self._at_boundary: list[Callable[[float], None]] = []
        # Imports that wait for room: asked at each boundary, until one is refused.
        self.imports: list[tuple[Rank, Callable[[float], bool]]] = []
        self._run = StepRun()
        # Tells stale ends of runs.
        self._version = 0
        self._starting = False
        self._intervals = RecentIntervals()
        # Told before anything that they could see changes, once.
        self.watchers: list[Watcher] = []

    # ---- what others may ask, at any time

    @property
    def boundary(self) -> int:
        """Steps that have ended, but for those of the run under way."""
        return self._batch.boundary

    @property
    def decoding(self) -> Mapping[Job, int]:
        """The decoding batch."""
        return self._batch.jobs

    @property
    def prefilling(self) -> Sequence[tuple[Rank, Job]]:
        """Whose prompts have a place on the device, by rank."""
        return self._prompts.placed

    def begun_boundary(self, now: float) -> int:
        """The last boundary reached by now."""
        return self._batch.boundary + self._run.ended(now)

    def used_blocks_at(self, boundary: int) -> int:
        """Blocks in use or reserved on the device at a boundary of the current run."""
        batch = self._batch
        taken = batch.blocks.taken(batch.boundary, boundary - batch.boundary)
        return batch.blocks.used + taken + self._other_blocks

    def decode_tokens_at(self, boundary: int) -> int:
        """Context tokens of the decoding batch at a boundary of the current run."""
        batch = self._batch
        return batch.kv_tokens + (boundary - batch.boundary) * len(batch)

    def token_interval_s(self, now: float) -> float:
        """Mean time between tokens over the last one to two seconds, as a worker tells it; 0: none."""
        run = self._run
        return self._intervals.mean_s(now, run, run.ended(now), len(self._batch))

    def backlog_at(self, boundary: int) -> int:
        """Prompt tokens not computed yet at a boundary of the current run."""
        return self._prompts.left_after(boundary - self._batch.boundary)[0]

    def backlog_s_at(self, boundary: int) -> float:
        """Seconds to compute those prompt tokens, without what each step takes besides."""
        return self._prompts.seconds_after(boundary - self._batch.boundary)

    def prefill_s(self, tokens: int) -> float:
        """Seconds to compute one whole prompt, without what each step takes besides."""
        return self._time.chunk_s(0, tokens)

    def beside_prefill(self, decoding: int, kv_tokens: int) -> tuple[float, int]:
        """(seconds of a prefill step besides its chunks, prompt tokens that it can carry) with this batch."""
        budget = self._intra.prefill_budget(self.spec.chunk_budget_tokens, decoding)
        return self._time.beside_chunks_s(decoding, kv_tokens), max(1, budget)

    @property
    def host_capacity_blocks(self) -> int:
        """Blocks that fit in host memory."""
        return self.host.total_blocks

    @property
    def host_blocks(self) -> int:
        """Blocks of swapped requests in host memory; what else is there gives way to them."""
        return self.host.swapped_blocks

    @property
    def is_empty(self) -> bool:
        """It holds no request, and room for none."""
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
    def seats_taken(self) -> int:
        """Places in the batch that are taken, held back or reserved."""
        return len(self._batch) + len(self._prompts.placed) + len(self.paused) + self._reserved_seats

    # ---- what others may do, at any time

    def submit(self, job: Job, now: float) -> None:
        """A request arrives; it waits for its turn."""
        self._changing()
        job.instance_id = self.instance_id
        job.found_s = nominal_s(*self._prompts.left_after(self._run.ended(now)))
        job.state = JobState.QUEUED
        job.prefill_done = 0
        job.prefill_total = job.prompt + job.tokens
        job.blocks = 0
        self._prompts.add(job)
        self._expect(job)
        self.idle_context += job.prompt + job.tokens
        self._set_stage(job)
        self._note_lapse(job, now)
        first = self._wait(job)
        if first or self._intra.pass_over:
            self.wake(now)

    def leading(self, names: Sequence[int]) -> int:
        """How many of these units of KV are here in a row from the first on, in whichever memory."""
        cache, host = self.cache, self.host
        if cache is None:
            return 0
        count = 0
        for name in names:
            if name not in cache and name not in host:
                break
            count += 1
        return count

    def bring(self, names: Sequence[int], now: float) -> None:
        """Units of KV have come into its prefix cache, which is there."""
        assert self.cache is not None
        self._changing()
        self.cache.bring(names)
        self._evict()
        if self.host.keeps:
            # The next step waits for what was evicted.
            self.wake(now)

    def waits(self, job: Job) -> bool:
        """Whether a new prompt waits here of which nothing is computed."""
        return job.instance_id == self.instance_id and job.state is JobState.QUEUED and not job.tokens

    def withdraw(self, job: Job, now: float) -> None:
        """A prompt that waits here goes elsewhere."""
        self._changing()
        self.waiting.remove((job.rank, job))
        self.idle_context -= job.prompt
        self._prompts.subtract(job, job.prefill_total - job.prefill_done)
        self.wake(now)

    def wake(self, now: float) -> None:
        """Something has changed: decide anew at the next boundary."""
        if self._run.steps:
            if self._run.cut(now):
                self._schedule_end()
        elif not self._starting:
            self._starting = True
            self._events.at(now, self._start)

    def at_boundary(self, action: Callable[[float], None], now: float) -> None:
        """Call `action` at the next boundary, before the next run is decided."""
        self._at_boundary.append(action)
        self.wake(now)

    def reserve(self, blocks: int, now: float) -> bool:
        """Set blocks and a seat aside for an import, if there are: for `receive`, or to be given back."""
        watermark = min(self._watermark, max(0, self.total_blocks - blocks))
        if self.seats_taken >= self.spec.max_num_seqs or not self._set_aside(blocks, watermark, now):
            return False
        self._reserved_seats += 1
        return True

    def extend(self, blocks: int, now: float) -> bool:
        """Set more blocks aside for an import that has its seat."""
        return self._set_aside(blocks, 0, now)

    def unreserve(self, blocks: int, now: float) -> None:
        """Give an import's blocks and seat back."""
        self._changing()
        self._other_blocks -= blocks
        self._reserved_seats -= 1
        self.wake(now)

    def _set_aside(self, blocks: int, watermark: int, now: float) -> bool:
        run = self._run
        # The step in flight takes what it needs.
        inflight = self.boundary + min(run.ended(now) + 1, run.steps)
        if blocks + watermark > self.total_blocks - self.used_blocks_at(inflight):
            return False
        self._changing()
        self._other_blocks += blocks
        self.wake(now)
        return True

    def reserve_host(self, blocks: int) -> bool:
        """Set host memory aside, if there is."""
        self._changing()
        return self.host.reserve(blocks)

    def unreserve_host(self, blocks: int) -> None:
        """Give host memory back."""
        self._changing()
        self.host.give_back(blocks)

    def hold(self, job: Job) -> None:
        """Keep a swapped job from coming back: its KV goes elsewhere from the host. It stays in `waiting`."""
        self._changing()
        job.state = JobState.PAUSED

    # ---- at a boundary only

    def pause(self, job: Job) -> None:
        """Hold a decoding job back; it keeps the blocks of the KV that it has, all but its latest token's."""
        self._batch.leave(job, self.log)
        job.blocks = blocks_for(job.prompt + job.tokens - 1, self.block_tokens)
        job.state = JobState.PAUSED
        self.paused[job] = None
        self._other_blocks += job.blocks
        self.idle_context += job.prompt + job.tokens

    def resume(self, job: Job) -> None:
        """Let a paused job go on; one held on the host waits for its turn again."""
        if job not in self.paused:
            job.state = JobState.SWAPPED
            return
        self._unpause(job)
        self._batch.join(job)

    def release(self, job: Job, now: float) -> None:
        """A paused job has gone elsewhere: free what it held."""
        self._changing()
        if job in self.paused:
            self._let_go(job)
            self._unpause(job)
        else:
            self.waiting.remove((job.rank, job))
            self.idle_context -= job.prompt + job.tokens
            self.host.give_back(job.blocks)
        self.wake(now)

    def receive(self, job: Job, reserved_blocks: int) -> None:
        """An imported job goes on here, in the room reserved for it."""
        self._other_blocks -= reserved_blocks
        self._reserved_seats -= 1
        job.instance_id = self.instance_id
        job.rank_until = 0
        self._set_stage(job)
        self._name(job, job.prompt + job.tokens - 1)
        self._batch.join(job)

    def receive_on_host(self, job: Job, blocks: int) -> None:
        """An imported job waits here, its KV in the host memory reserved for it."""
        job.instance_id = self.instance_id
        job.state = JobState.SWAPPED
        job.blocks = blocks
        job.rank_until = 0
        self.idle_context += job.prompt + job.tokens
        self._set_stage(job)
        self._wait(job)

    def set_stage_end(self, end: int, now: float) -> None:
        """The instance's stage now ends there. Decoding jobs that are beyond are told of as they go on."""
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
        self.at_boundary(self._remark, now)

    # ---- the run

    def _start(self, now: float) -> None:
        self._starting = False
        if self._run.steps:
            # Somebody woke the instance while it was deciding.
            self.wake(now)
        else:
            self._begin(now)

    def _schedule_end(self) -> None:
        self._version += 1
        version = self._version

        def end(now: float) -> None:
            if self._version == version:
                self._end(now)

        self._events.at(self._run.end_s(), end)

    def _changing(self) -> None:
        """Whoever has put off looking must look now."""
        if self.watchers:
            for watcher in self.watchers:
                watcher.look_at_all()
            self.watchers.clear()

    def _end(self, now: float) -> None:
        self._changing()
        run, batch = self._run, self._batch
        steps = run.steps
        self.log.close(steps)
        self._intervals.add(run, steps, len(batch))
        self.step_s = run.last_step_s()
        self.busy_s += now - run.start_s
        run.steps = 0
        batch.advance(steps)
        for job in batch.due():
            self._milestone(job, now)
        for job, tokens in self._prompts.take_chunks():
            self._computed(job, tokens * steps, now)
        self._begin(now)

    def _begin(self, now: float) -> None:
        self._changing()
        while self._at_boundary:
            actions = self._at_boundary
            self._at_boundary = []
            for action in actions:
                action(now)
        self._evict()
        while self.imports and self.imports[0][1](now):
            self.imports.pop(0)
        batch, prompts = self._batch, self._prompts
        stall_s = 0.0
        most = self._most_steps
        preempted = False
        if self.waiting or batch.blocks.used + self._other_blocks > self.total_blocks:
            stall_s, preempted = self._allocate(now)
            short = preempted
            # What they shared with others is not free: more have to go.
            while short and batch.blocks.used + self._other_blocks > self.total_blocks:
                more_s, short = self._allocate(now)
                stall_s += more_s
            if preempted:
                most = 1
            elif self.waiting and self._intra.preemptive:
                most = min(most, batch.steps_to_rank_change(self._intra))
        decoding = len(batch)
        chunk_s = growth_s = 0.0
        if prompts.placed:
            budget = self._intra.prefill_budget(self.spec.chunk_budget_tokens, decoding)
            chunk_s, growth_s, whole = prompts.fill(budget)
            if prompts.chunks:
                most = min(most, whole)
        if self.host.keeps:
            self._evict()
            if self._copied_blocks and (decoding or prompts.chunks):
                stall_s += self._swap_s(self._copied_blocks)
                self._copied_blocks = 0
        if not decoding and not prompts.chunks:
            self.step_s = 0.0
            if preempted:
                # What was taken may do for somebody else.
                self.wake(now)
            return
        first_s, increment_s = self._time.run(chunk_s, decoding, batch.kv_tokens, batch.lengths)
        if decoding:
            most = min(most, batch.steps_to_milestone())
            free = self.total_blocks - batch.blocks.used - self._other_blocks
            if self.host.keeps and self.cache is not None:
                # A step that evicts waits for the copy.
                free = self.cache.slack(free)
            most = batch.blocks.steps_until(batch.boundary, free, most)
        self.swap_s += stall_s
        self._run = run = StepRun(now + stall_s, first_s, increment_s + growth_s, most)
        self.step_s = first_s
        self.log.open(batch.boundary, run.start_s, first_s, run.increment_s)
        for job, _ in prompts.chunks:
            if job.queue_s is None:
                job.queue_s = now - job.request.arrival_s
        self._schedule_end()

    # ---- memory

    def _allocate(self, now: float) -> tuple[float, bool]:
        """Admit and preempt. (Seconds of copies to and from host memory, whether anybody was preempted.)"""
        room = Room(
            self.total_blocks,
            self.total_blocks - self._batch.blocks.used - self._other_blocks,
            self.spec.max_num_seqs - self.seats_taken,
            self._intra.prefill_budget(self.spec.chunk_budget_tokens, len(self._batch)),
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
        return stall_s, bool(grants.preempt)

    def _running_claims(self) -> list[Claim[Job]]:
        prefilling = (Claim(rank, job, job.blocks) for rank, job in self._prompts.placed)
        return [*self._batch.claims(self._intra), *prefilling]

    def _waiting_claims(self) -> Iterator[Claim[Job]]:
        paused = JobState.PAUSED
        return (self._wanting(rank, job) for rank, job in self.waiting if job.state is not paused)

    def _wanting(self, rank: Rank, job: Job) -> Claim[Job]:
        if job.state is JobState.SWAPPED:
            return Claim(rank, job, job.blocks, 0, job.passed_blocks)
        blocks = blocks_for(job.prefill_total, self.block_tokens)
        if self.cache is not None:
            blocks -= self.cache.in_use(job.request.unit_names[: self._found(job)])
        return Claim(rank, job, blocks, job.prefill_total - job.prefill_done, job.passed_blocks)

    def _admit(self, job: Job) -> float:
        """Give a waiting job its place; seconds of copying its KV back, or that of its prefix."""
        self.waiting.remove((job.rank, job))
        if job.state is JobState.SWAPPED:
            self.idle_context -= job.prompt + job.tokens
            self.host.give_back(job.blocks)
            self._batch.join(job)
            return self._swap_s(job.blocks)
        job.state = JobState.PREFILLING
        job.blocks = blocks_for(job.prefill_total, self.block_tokens)
        self._other_blocks += job.blocks
        load_s = self._find(job)
        self._prompts.place(job)
        return load_s

    def _swap_s(self, blocks: int) -> float:
        """Seconds to copy KV to host memory or back: of one request, or all that one step evicts."""
        return self.spec.profile.swap.ms(blocks * self.spec.block_bytes) / 1e3

    def _preempt(self, job: Job, now: float) -> float:
        """Take a job's place; seconds of copying its KV out."""
        stall_s = 0.0
        self._let_go(job)
        if job.state is JobState.DECODING:
            blocks = self._batch.leave(job, self.log)
            self.idle_context += job.prompt + job.tokens
            if self.host.reserve(blocks):
                job.state = JobState.SWAPPED
                job.blocks = blocks
                job.swapped += 1
                stall_s = self._swap_s(blocks)
            else:
                self._forget_kv(job)
        else:
            self._prompts.remove(job)
            self._other_blocks -= job.blocks
            self._prompts.subtract(job, job.prefill_total - job.prefill_done)
            self._forget_kv(job)
        self._note_lapse(job, now)
        self._wait(job)
        self._listener.preempted(self, job, now)
        return stall_s

    def _forget_kv(self, job: Job) -> None:
        job.state = JobState.QUEUED
        job.recomputed += 1
        job.blocks = 0
        job.prefill_done = 0
        job.prefill_total = job.prompt + job.tokens
        self._prompts.add(job)
        self._expect(job)

    def _wait(self, job: Job) -> bool:
        """Queue a job by its rank; whether it is the first."""
        rank = job.rank_at(job.tokens, self._intra)
        job.passed_blocks = 0
        insort(self.waiting, (rank, job), key=rank_of)
        return self.waiting[0][1] is job

    def _note_lapse(self, job: Job, now: float) -> None:
        """A prompt is about to wait: its rank changes when its time has come."""
        if job.lapsed or job.tokens:
            return
        lapses_s = self._intra.lapses_s(job.view(0))
        if lapses_s is None:
            return
        if lapses_s > now:
            self._events.at(lapses_s, partial(self._lapse, job))
        else:
            job.lapsed = True
            job.rank_until = 0

    def _lapse(self, job: Job, now: float) -> None:
        """Its time has come."""
        if job.lapsed or not self.waits(job):
            return
        self._changing()
        self.waiting.remove((job.rank, job))
        job.lapsed = True
        job.rank_until = 0
        insort(self.waiting, (job.rank_at(job.tokens, self._intra), job), key=rank_of)
        self.wake(now)

    # ---- the prefix cache

    def _units(self, job: Job) -> int:
        """Named units that may be found when the job is computed anew."""
        unit = job.request.unit_tokens
        return min(len(job.request.unit_names), (job.prefill_total - 1) // unit) if unit else 0

    def _found(self, job: Job) -> int:
        """Units that are on the device, or are loaded from host memory since that takes less than computing
        them."""
        cache, names, most = self.cache, job.request.unit_names, self._units(job)
        assert cache is not None
        found = cache.leading(names, most)
        if not self.host.keeps or found == most or names[found] not in self.host:
            return found
        total, unit = self.leading(names[:most]), job.request.unit_tokens
        load_s = self._swap_s(len(cache.lacking(names[found:total])) * cache.unit_blocks)
        return total if load_s < self._time.chunk_s(found * unit, total * unit) else found

    def _expect(self, job: Job) -> None:
        """What is found now is likely to be found when the job has its turn: it counts as computed."""
        if self.cache is not None:
            found = self._found(job) * job.request.unit_tokens
            self._prompts.subtract(job, found - job.prefill_done)
            job.prefill_done = found

    def _find(self, job: Job) -> float:
        """Its turn has come: it holds what is found; seconds of loading what is in host memory."""
        cache = self.cache
        if cache is None:
            return 0.0
        self._expect(job)
        names = job.request.unit_names[: self._units_in(job.prefill_done, job)]
        loaded = cache.lacking(names)
        self.host.use(loaded)
        cache.bring(loaded)
        shared = cache.shared
        cache.hold(names)
        job.held_names = list(names)
        # Blocks that several hold are there once.
        self._other_blocks -= cache.shared - shared
        if job.cached is None:
            job.cached = job.prefill_done
            job.loaded = len(loaded) * job.request.unit_tokens
        self._evict()
        return self._swap_s(len(loaded) * cache.unit_blocks) if loaded else 0.0

    def _units_in(self, tokens: int, job: Job) -> int:
        """Units that are all within the first `tokens`."""
        unit = job.request.unit_tokens
        return min(len(job.request.unit_names), tokens // unit) if unit else 0

    def _name(self, job: Job, tokens: int) -> None:
        """KV of so many tokens is there: its units can be found from now on."""
        if self.cache is None:
            return
        names, held = job.request.unit_names, job.held_names
        for number in range(len(held), self._units_in(tokens, job)):
            if not self.cache.add(names[number]):
                # Somebody else's is found; what follows in this one stays without a name, too.
                break
            held.append(names[number])

    def _let_go(self, job: Job) -> None:
        """Its blocks are free, and what has a name can be found until it is evicted."""
        cache = self.cache
        if cache is None:
            return
        decoded = job.prompt + job.tokens_at(self.boundary) - 1
        tokens = job.prefill_done if job.state is JobState.PREFILLING else decoded
        named = len(job.held_names) * job.request.unit_tokens // self.block_tokens
        shared = cache.shared
        cache.let_go(job.held_names, tokens // self.block_tokens - named)
        self._other_blocks += shared - cache.shared
        job.held_names = []

    def _evict(self) -> None:
        """What is held goes before what is kept, which goes to host memory if that keeps any."""
        if self.cache is not None:
            room = self.total_blocks - self._batch.blocks.used - self._other_blocks
            self._copied_blocks += self.host.keep(self.cache.shrink(room))

    def _unpause(self, job: Job) -> None:
        del self.paused[job]
        self._other_blocks -= job.blocks
        self.idle_context -= job.prompt + job.tokens

    def _remark(self, now: float) -> None:
        for job in self._batch.jobs:
            self._batch.mark(job)

    def _set_stage(self, job: Job) -> None:
        job.boundary_tokens = NEVER if self.stage_end == NEVER else max(1, self.stage_end - job.prompt)

    # ---- what steps bring about

    def _milestone(self, job: Job, now: float) -> None:
        tokens = self._batch.tokens_of(job)
        self._emitted(job, tokens, now)
        if tokens < job.total:
            self._batch.mark(job)
        else:
            self._batch.leave(job, self.log)
            self._finish(job, now)

    def _computed(self, job: Job, tokens: int, now: float) -> None:
        """Prompt tokens were computed; with the last of them comes a token."""
        self._prompts.subtract(job, tokens)
        job.prefill_done += tokens
        self._name(job, job.prefill_done)
        if job.prefill_done < job.prefill_total:
            return
        self._prompts.remove(job)
        self._other_blocks -= job.blocks
        self.idle_context -= job.prompt + job.tokens
        job.decoded(self.log, self.boundary - 1, self.boundary)
        job.tokens += 1
        self._emitted(job, job.tokens, now)
        if job.tokens < job.total:
            self._batch.join(job)
        else:
            self._finish(job, now)

    def _emitted(self, job: Job, tokens: int, now: float) -> None:
        """What this token, the latest of the job, begins or ends."""
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
            self._listener.outgrown(self, job, now)

    def _finish(self, job: Job, now: float) -> None:
        job.state = JobState.DONE
        job.version += 1
        job.finish_s = now
        self._name(job, job.prompt + job.total - 1)
        self._let_go(job)
        self._listener.finished(self, job, now)
