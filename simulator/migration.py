"""Live migration in rounds (design, section 6), with reservation and admission as in the live services.

First the target reserves room (blocks and a batch slot, or host memory), then the migration is admitted (a
limited number per instance and direction), or the other way round. Pre-copy rounds follow while the source
keeps decoding, then the last round with the request paused, then the commit. Until the commit, any failure
leaves the request on its source.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final, Protocol

from simulator.blocks import blocks_for
from simulator.cluster import MigrationSpec
from simulator.events import EventQueue
from simulator.instance import Instance
from simulator.job import Job, JobState
from simulator.network import Network
from simulator.records import MigrationOutcome, MigrationRecord, PlacementRecord
from tailrace.actions import Migrate, WhenFull, could_only_wait

# A request pauses when at most this many full blocks are left to copy.
_PAUSE_BLOCKS: Final = 2

# Called when a migration has closed: whether it was committed, and when.
OnClosed = Callable[[bool, float], None]


class Migration:
    """One open migration."""

    __slots__ = (
        "action",
        "admitted",
        "blocks",
        "closed",
        "copied",
        "job",
        "on_closed",
        "on_host",
        "paused_s",
        "requested_s",
        "requested_tokens",
        "reserved_s",
        "rounds",
        "sent",
        "source",
        "started_s",
        "target",
        "waiting_for_room",
    )

    def __init__(
        self,
        action: Migrate,
        job: Job,
        source: Instance,
        target: Instance,
        now: float,
        on_closed: OnClosed | None,
    ) -> None:
        self.action = action
        # Set if the target fetched the request by bid-ask; the scheduler then sees the migration in reports
        # only.
        self.on_closed = on_closed
        self.job = job
        self.source = source
        self.target = target
        self.requested_s = now
        self.requested_tokens = 0
        # Blocks reserved on the target (in host memory if `on_host`), copied so far, and sent in total.
        self.blocks = 0
        self.on_host = False
        self.copied = 0
        self.sent = 0
        self.rounds = 0
        self.admitted = False
        # When the room on the target was reserved.
        self.reserved_s: float | None = None
        # Its entry in the target's `imports` while it waits for room.
        self.waiting_for_room: Callable[[float], bool] | None = None
        self.started_s: float | None = None
        self.paused_s: float | None = None
        self.closed = False


class MigrationListener(Protocol):
    """Receive the start and the end of each migration."""

    def migration_opened(self, migration: Migration) -> None:
        """Handle a migration that was accepted and is in progress."""

    def migration_closed(self, migration: Migration, outcome: MigrationOutcome) -> None:
        """Handle the end of a migration. If it was committed, the job is on the target already."""


class Migrations:
    """Run all migrations of a simulation."""

    def __init__(
        self,
        spec: MigrationSpec,
        instances: Mapping[str, Instance],
        events: EventQueue,
        network: Network,
        listener: MigrationListener,
    ) -> None:
        self.records: list[MigrationRecord] = []
        self._spec = spec
        self._instances = instances
        self._events = events
        self._network = network
        self._listener = listener
        self._sending: Counter[str] = Counter()
        self._receiving: Counter[str] = Counter()
        self._open: dict[Job, Migration] = {}
        # Migrations waiting for admission.
        self._queue: list[Migration] = []

    def find(self, job: Job) -> Migration | None:
        """Return the open migration of a request, or None."""
        return self._open.get(job)

    def request(
        self, action: Migrate, job: Job, target: Instance, now: float, on_closed: OnClosed | None = None
    ) -> None:
        """Start a migration requested by a policy, or by the target itself, whose `on_closed` is then called
        at the end."""
        source = self._instances.get(action.source_id)
        refusal = self._refusal(action, job, source, target)
        # A target that fetches a request has its own limit.
        if on_closed is None and could_only_wait(
            self._spec.when_full, target.migrations_in, self._spec.limit
        ):
            refusal = refusal or f"{target.migrations_in} migrations to {target.instance_id} are open"
        if source is None or refusal:
            self._record_refusal(action, job, refusal, now)
            if on_closed is not None:
                on_closed(False, now)
            return
        migration = Migration(action, job, source, target, now, on_closed)
        migration.requested_tokens = self._context(migration, now)
        job.migrating = True
        self._open[job] = migration
        source.migrations_out += 1
        target.migrations_in += 1
        self._listener.migration_opened(migration)
        if self._spec.paused:
            source.at_boundary(self._unless_closed(migration, self._pause_and_queue), now)
        else:
            self._reserve_and_queue(migration, now)

    def preempted(self, job: Job, now: float) -> None:
        """Abort the migration of a preempted request, unless its KV was swapped out: then it continues from
        the host."""
        migration = self.find(job)
        if migration is not None and job.state is not JobState.SWAPPED:
            self._abort(migration, MigrationOutcome.OVERTAKEN, "preempted", now)

    def finished(self, job: Job, now: float) -> None:
        """Abort the migration of a request that has finished."""
        migration = self.find(job)
        if migration is not None:
            self._abort(migration, MigrationOutcome.OVERTAKEN, "finished", now)

    # ---- before the first byte

    def _refusal(self, action: Migrate, job: Job, source: Instance | None, target: Instance) -> str:
        if source is None or job.instance_id != action.source_id:
            return f"not on {action.source_id}"
        if job.state is not JobState.DECODING and job.state is not JobState.SWAPPED:
            return f"is {job.state.value}"
        if job.migrating:
            return "is being migrated already"
        if source is target:
            return "is there already"
        if source.block_tokens != target.block_tokens:
            return "block sizes differ"
        if blocks_for(job.prompt + job.total, target.block_tokens) > target.total_blocks:
            return f"too long for {target.instance_id}"
        if len(self._queue) >= self._spec.queue_limit:
            return f"{len(self._queue)} migrations are already waiting"
        return ""

    def _pause_and_queue(self, migration: Migration, now: float) -> None:
        job, source = migration.job, migration.source
        if job.state is JobState.SWAPPED:
            source.hold_swapped(job)
        else:
            source.pause(job)
        migration.paused_s = now
        self._reserve_and_queue(migration, now)

    def _reserve_and_queue(self, migration: Migration, now: float) -> None:
        if self._spec.room_last or self._reserve_or_wait(migration, now, self._enqueue):
            self._enqueue(migration, now)

    def _reserve_or_wait(
        self, migration: Migration, now: float, continuation: Callable[[Migration, float], None]
    ) -> bool:
        """Return whether room on the target is reserved now. If not, the migration either waits for room, to
        continue with `continuation`, or is closed."""
        if self._spec.when_full is not WhenFull.WAIT:
            return self._reserve_or_abort(migration, now)
        target = migration.target
        if not target.imports and self._try_reserve(migration, now):
            return True
        migration.waiting_for_room = self._reservation_attempt(migration, continuation)
        target.imports.append(migration.waiting_for_room)
        self._abort_if_stuck(migration, lambda: not migration.blocks, MigrationOutcome.NO_ROOM, now)
        return False

    def _reserve_or_abort(self, migration: Migration, now: float) -> bool:
        """Return whether room on the target is reserved; if not, close the migration."""
        if self._try_reserve(migration, now):
            return True
        blocks = self._needed(migration, now)
        if self._spec.when_full is WhenFull.HOST and migration.target.reserve_host(blocks):
            migration.on_host = True
            migration.blocks, migration.reserved_s = blocks, now
            return True
        self._abort(migration, MigrationOutcome.NO_ROOM, "no room", now)
        return False

    def _reservation_attempt(
        self, migration: Migration, continuation: Callable[[Migration, float], None]
    ) -> Callable[[float], bool]:
        def take(now: float) -> bool:
            reserved = self._try_reserve(migration, now)
            if reserved:
                migration.waiting_for_room = None
                # Scheduled, because the target is planning its next run now.
                self._events.schedule(now, self._unless_closed(migration, continuation))
            return reserved

        return take

    def _try_reserve(self, migration: Migration, now: float) -> bool:
        blocks = self._needed(migration, now)
        if not migration.target.reserve(blocks, now):
            return False
        migration.blocks, migration.reserved_s = blocks, now
        return True

    def _enqueue(self, migration: Migration, now: float) -> None:
        self._queue.append(migration)
        self._admit(now)
        if not migration.admitted:
            self._abort_if_stuck(migration, lambda: not migration.admitted, MigrationOutcome.REFUSED, now)

    def _abort_if_stuck(
        self, migration: Migration, stuck: Callable[[], bool], outcome: MigrationOutcome, now: float
    ) -> None:
        """Close the migration if it is still stuck when its patience ends."""

        def end(later: float) -> None:
            if not migration.closed and stuck():
                self._abort(migration, outcome, f"waited {self._spec.patience_s:g} s", later)

        self._events.schedule(now + self._spec.patience_s, end)

    def _admit(self, now: float) -> None:
        limit = self._spec.limit
        waiting = []
        for migration in self._queue:
            source, target = migration.source.instance_id, migration.target.instance_id
            if self._sending[source] < limit and self._receiving[target] < limit:
                self._sending[source] += 1
                self._receiving[target] += 1
                migration.admitted = True
                self._events.schedule(now + self._spec.open_s, self._unless_closed(migration, self._precopy))
            else:
                waiting.append(migration)
        self._queue = waiting

    # ---- rounds

    def _unless_closed(
        self, migration: Migration, continuation: Callable[[Migration, float], None]
    ) -> Callable[[float], None]:
        def step(now: float) -> None:
            if not migration.closed:
                continuation(migration, now)

        return step

    def _precopy(self, migration: Migration, now: float) -> None:
        """Copy the full blocks that are not copied yet, or pause the request to copy the rest."""
        source = migration.source
        if not migration.blocks and not self._reserve_or_wait(migration, now, self._precopy):
            return
        if migration.started_s is None:
            migration.started_s = now
            migration.copied = self._cached_blocks(migration, now)
        if migration.paused_s is not None:
            self._last_round(migration, now)
            return
        if migration.job.state is JobState.SWAPPED:
            self._copy_from_host(migration, now)
            return
        if not self._grow_reservation(migration, self._needed(migration, now), now):
            return
        # The KV of the latest token is computed by the next step.
        full = (self._context(migration, now) - 1) // source.block_tokens
        remaining = full - migration.copied
        if migration.rounds >= self._spec.max_rounds or (remaining <= _PAUSE_BLOCKS and migration.rounds):
            source.at_boundary(self._unless_closed(migration, self._pause), now)
            return
        migration.rounds += 1
        self._send(migration, remaining, now, self._precopy)

    def _cached_blocks(self, migration: Migration, now: float) -> int:
        """Return the full blocks that the target's prefix cache holds already, which need not be copied."""
        cache, request = migration.target.cache, migration.job.request
        if cache is None or migration.on_host or not request.unit_names:
            return 0
        units = (self._context(migration, now) - 1) // request.unit_tokens
        cached = cache.count_leading(request.unit_names, units)
        return cached * request.unit_tokens // migration.source.block_tokens

    def _copy_from_host(self, migration: Migration, now: float) -> None:
        """Copy everything in one round: KV in host memory does not change."""
        migration.source.hold_swapped(migration.job)
        self._last_round(migration, now)

    def _pause(self, migration: Migration, now: float) -> None:
        if migration.job.state is JobState.SWAPPED:
            self._copy_from_host(migration, now)
            return
        migration.source.pause(migration.job)
        self._last_round(migration, now)

    def _last_round(self, migration: Migration, now: float) -> None:
        job, source = migration.job, migration.source
        if migration.paused_s is None:
            migration.paused_s = now
        needed = blocks_for(job.prompt + job.tokens, source.block_tokens)
        if not self._grow_reservation(migration, needed, now):
            return
        migration.rounds += 1
        self._send(migration, job.blocks - migration.copied, now, self._schedule_commit)

    def _send(
        self, migration: Migration, blocks: int, now: float, continuation: Callable[[Migration, float], None]
    ) -> None:
        def arrived(at: float) -> None:
            migration.copied += blocks
            target.incoming.add(size, at - now)
            continuation(migration, at)

        migration.sent += blocks
        source, target = migration.source, migration.target
        size = blocks * source.spec.block_bytes
        step = self._unless_closed(migration, lambda _, at: arrived(at))
        self._network.send(source.instance_id, target.instance_id, size, now, step)

    def _grow_reservation(self, migration: Migration, blocks: int, now: float) -> bool:
        """Grow the reservation to this many blocks. Return whether that succeeded; if not, close the
        migration."""
        more = blocks - migration.blocks
        if more <= 0:
            return True
        target = migration.target
        if target.reserve_host(more) if migration.on_host else target.extend(more, now):
            migration.blocks = blocks
            return True
        self._abort(migration, MigrationOutcome.NO_ROOM, "outgrew its room", now)
        return False

    def _schedule_commit(self, migration: Migration, now: float) -> None:
        self._events.schedule(now + self._spec.commit_s, self._unless_closed(migration, self._commit))

    def _commit(self, migration: Migration, now: float) -> None:
        job, source, target = migration.job, migration.source, migration.target
        source.release(job, now)
        job.instance_id = target.instance_id
        job.migrations += 1
        job.placements.append(PlacementRecord(now, target.instance_id))
        paused_s, blocks = migration.paused_s, migration.blocks
        assert paused_s is not None
        needed = blocks_for(job.prompt + job.tokens, target.block_tokens)

        def arrive(later: float) -> None:
            job.pause_s += later - paused_s
            if migration.on_host:
                target.unreserve_host(blocks - needed)
                target.receive_on_host(job, needed)
            else:
                target.receive(job, blocks)

        target.at_boundary(arrive, now)
        self._conclude(migration, MigrationOutcome.COMMITTED, "", now)

    # ---- the end

    def _abort(self, migration: Migration, outcome: MigrationOutcome, detail: str, now: float) -> None:
        """Close a migration that failed: the request stays on its source."""
        job, source, target = migration.job, migration.source, migration.target
        if migration.blocks and migration.on_host:
            target.unreserve_host(migration.blocks)
        elif migration.blocks:
            target.unreserve(migration.blocks, now)
        if migration in self._queue:
            self._queue.remove(migration)
        if migration.waiting_for_room is not None:
            target.imports.remove(migration.waiting_for_room)
            # The next import in the queue may need less.
            target.wake(now)
        if job.state is JobState.PAUSED:
            assert migration.paused_s is not None
            job.pause_s += now - migration.paused_s
            source.at_boundary(lambda _: source.resume(job), now)
        self._conclude(migration, outcome, detail, now)

    def _conclude(self, migration: Migration, outcome: MigrationOutcome, detail: str, now: float) -> None:
        migration.closed = True
        job, source, target = migration.job, migration.source, migration.target
        job.migrating = False
        del self._open[job]
        source.migrations_out -= 1
        target.migrations_in -= 1
        started_s, paused_s = migration.started_s, migration.paused_s
        self.records.append(
            MigrationRecord(
                request_id=job.request.request_id,
                source_id=source.instance_id,
                target_id=target.instance_id,
                reason=migration.action.reason,
                requested_s=migration.requested_s,
                end_s=now,
                outcome=outcome,
                detail=detail,
                context_tokens=migration.requested_tokens,
                bytes_sent=migration.sent * source.spec.block_bytes,
                rounds=migration.rounds,
                transfer_s=0.0 if started_s is None else now - started_s,
                pause_s=0.0 if paused_s is None else now - paused_s,
            )
        )
        self._listener.migration_closed(migration, outcome)
        if migration.admitted:
            self._sending[source.instance_id] -= 1
            self._receiving[target.instance_id] -= 1
            self._admit(now)
        if migration.on_closed is not None:
            migration.on_closed(outcome is MigrationOutcome.COMMITTED, now)

    def _record_refusal(self, action: Migrate, job: Job, detail: str, now: float) -> None:
        self.records.append(
            MigrationRecord(
                request_id=action.request_id,
                source_id=action.source_id,
                target_id=action.target_id,
                reason=action.reason,
                requested_s=now,
                end_s=now,
                outcome=MigrationOutcome.REFUSED,
                detail=detail,
                context_tokens=job.prompt + job.tokens,
                bytes_sent=0,
                rounds=0,
                transfer_s=0.0,
                pause_s=0.0,
            )
        )

    def _context(self, migration: Migration, now: float) -> int:
        job = migration.job
        return job.prompt + job.tokens_at(migration.source.boundary_at(now))

    def _needed(self, migration: Migration, now: float) -> int:
        """Return the blocks to reserve: for the context, and one to grow into during the copy."""
        return blocks_for(self._context(migration, now), migration.target.block_tokens) + 1
