"""Live migration in rounds (design, section 6), with room and admission as the live services have them.

Room on the target first (blocks and a seat, or host memory), then a place (at most three transfers an
instance and direction), or the other way round; then rounds of pre-copy while the source decodes on, then the
last round with the request held back, then the commit. Until the commit, whatever goes wrong leaves the
request at its source.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Protocol

from simulator.blocks import blocks_for
from simulator.cluster import MigrationSpec
from simulator.events import EventQueue
from simulator.instance import Instance
from simulator.job import Job, JobState
from simulator.network import Network
from simulator.records import MigrationOutcome, MigrationRecord, PlacementRecord
from tailrace.actions import Migrate, WhenFull
from tailrace.intra.base import ImportView, IntraPolicy, Rank

# Called at the end of a migration: whether it was committed, and when.
Ended = Callable[[bool, float], None]


class Migration:
    """One migration that is not over."""

    __slots__ = (
        "action",
        "asked_s",
        "asked_tokens",
        "blocks",
        "copied",
        "ended",
        "has_place",
        "in_line",
        "job",
        "on_host",
        "over",
        "paused_s",
        "reserved_s",
        "rounds",
        "sent",
        "source",
        "started_s",
        "target",
    )

    def __init__(
        self, action: Migrate, job: Job, source: Instance, target: Instance, now: float, ended: Ended | None
    ) -> None:
        self.action = action
        # Who fetched it, if its target did by bid-ask; the scheduler then learns of it by reports alone.
        self.ended = ended
        self.job = job
        self.source = source
        self.target = target
        self.asked_s = now
        self.asked_tokens = 0
        # Blocks reserved on the target (on its host if `on_host`), copied, and sent in all.
        self.blocks = 0
        self.on_host = False
        self.copied = 0
        self.sent = 0
        self.rounds = 0
        self.has_place = False
        # When its room on the target was set aside.
        self.reserved_s: float | None = None
        # Its entry in the target's `imports`, while it waits for room.
        self.in_line: tuple[Rank, Callable[[float], bool]] | None = None
        self.started_s: float | None = None
        self.paused_s: float | None = None
        self.over = False


class MigrationListener(Protocol):
    """Who hears of migrations that open and end."""

    def migration_opened(self, migration: Migration) -> None:
        """It was asked for and is under way."""

    def migration_closed(self, migration: Migration, outcome: MigrationOutcome) -> None:
        """It is over. If committed, the job's instance is the target."""


class Migrations:
    """All migrations."""

    def __init__(
        self,
        spec: MigrationSpec,
        instances: Mapping[str, Instance],
        intra: IntraPolicy,
        events: EventQueue,
        network: Network,
        listener: MigrationListener,
    ) -> None:
        self.records: list[MigrationRecord] = []
        self._spec = spec
        self._instances = instances
        self._intra = intra
        self._events = events
        self._network = network
        self._listener = listener
        self._sending: Counter[str] = Counter()
        self._receiving: Counter[str] = Counter()
        self._open: dict[Job, Migration] = {}
        # Wait for a place.
        self._queue: list[Migration] = []
        self._asked = 0

    def of(self, job: Job) -> Migration | None:
        """The open migration of a request, if there is one."""
        return self._open.get(job)

    def ask(
        self, action: Migrate, job: Job, target: Instance, now: float, ended: Ended | None = None
    ) -> None:
        """A policy wants this, or the target, which is then told how it `ended`."""
        source = self._instances.get(action.source_id)
        refusal = self._refusal(action, job, source, target)
        if source is None or refusal:
            self._record_refusal(action, job, refusal, now)
            if ended is not None:
                ended(False, now)
            return
        migration = Migration(action, job, source, target, now, ended)
        self._asked += 1
        migration.asked_tokens = self._context(migration, now)
        job.migrating = True
        self._open[job] = migration
        source.migrations_out += 1
        target.migrations_in += 1
        self._listener.migration_opened(migration)
        if self._spec.room_last or self._find_room(migration, now, self._enqueue):
            self._enqueue(migration, now)

    def preempted(self, job: Job, now: float) -> None:
        """A request lost its place on the device; KV that was swapped out goes on from the host."""
        migration = self.of(job)
        if migration is not None and job.state is not JobState.SWAPPED:
            self._close(migration, MigrationOutcome.OVERTAKEN, "preempted", now)

    def finished(self, job: Job, now: float) -> None:
        """A request is done."""
        migration = self.of(job)
        if migration is not None:
            self._close(migration, MigrationOutcome.OVERTAKEN, "finished", now)

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

    def _find_room(self, migration: Migration, now: float, then: Callable[[Migration, float], None]) -> bool:
        """Whether the target has room now. If not, the migration waits in the target's line for it, and goes
        on with `then`; or it is over."""
        if self._spec.when_full is not WhenFull.WAIT:
            return self._ask_for_room(migration, now)
        target = migration.target
        if not target.imports and self._take_room(migration, now):
            return True
        source = migration.source
        used = source.used_blocks_at(source.boundary) * source.block_tokens
        view = ImportView(self._asked, migration.asked_tokens, used)
        rank = self._intra.import_rank(view)
        migration.in_line = (rank, self._taker(migration, then))
        insort(target.imports, migration.in_line, key=_rank_of)
        self._expect(migration, lambda: not migration.blocks, MigrationOutcome.NO_ROOM, now)
        return False

    def _ask_for_room(self, migration: Migration, now: float) -> bool:
        """Whether the target has room; else the migration is over."""
        if self._take_room(migration, now):
            return True
        blocks = self._needed(migration, now)
        if self._spec.when_full is WhenFull.HOST and migration.target.reserve_host(blocks):
            migration.on_host = True
            migration.blocks, migration.reserved_s = blocks, now
            return True
        self._close(migration, MigrationOutcome.NO_ROOM, "no room", now)
        return False

    def _taker(
        self, migration: Migration, then: Callable[[Migration, float], None]
    ) -> Callable[[float], bool]:
        def take(now: float) -> bool:
            taken = self._take_room(migration, now)
            if taken:
                migration.in_line = None
                # Not at once: the target is deciding on its next run.
                self._events.at(now, self._step(migration, then))
            return taken

        return take

    def _take_room(self, migration: Migration, now: float) -> bool:
        blocks = self._needed(migration, now)
        if not migration.target.reserve(blocks, now):
            return False
        migration.blocks, migration.reserved_s = blocks, now
        return True

    def _enqueue(self, migration: Migration, now: float) -> None:
        self._queue.append(migration)
        self._admit(now)
        if not migration.has_place:
            self._expect(migration, lambda: not migration.has_place, MigrationOutcome.REFUSED, now)

    def _expect(
        self, migration: Migration, stuck: Callable[[], bool], outcome: MigrationOutcome, now: float
    ) -> None:
        """Give up if it is still stuck when patience ends."""

        def end(then: float) -> None:
            if not migration.over and stuck():
                self._close(migration, outcome, f"waited {self._spec.patience_s:g} s", then)

        self._events.at(now + self._spec.patience_s, end)

    def _admit(self, now: float) -> None:
        limit = self._spec.limit
        waiting = []
        for migration in self._queue:
            source, target = migration.source.instance_id, migration.target.instance_id
            if self._sending[source] < limit and self._receiving[target] < limit:
                self._sending[source] += 1
                self._receiving[target] += 1
                migration.has_place = True
                self._events.at(now + self._spec.open_s, self._step(migration, self._precopy))
            else:
                waiting.append(migration)
        self._queue = waiting

    # ---- rounds

    def _step(
        self, migration: Migration, then: Callable[[Migration, float], None]
    ) -> Callable[[float], None]:
        def step(now: float) -> None:
            if not migration.over:
                then(migration, now)

        return step

    def _precopy(self, migration: Migration, now: float) -> None:
        """Copy the full blocks that are not copied yet, or hold the request back for what is left."""
        source = migration.source
        if not migration.blocks and not self._find_room(migration, now, self._precopy):
            return
        if migration.started_s is None:
            migration.started_s = now
            migration.copied = self._held(migration, now)
        if migration.job.state is JobState.SWAPPED:
            self._from_host(migration, now)
            return
        if not self._make_room(migration, self._needed(migration, now), now):
            return
        # The KV of the latest token is computed by the coming step.
        full = (self._context(migration, now) - 1) // source.block_tokens
        left = full - migration.copied
        if migration.rounds >= self._spec.max_rounds or (
            left <= self._spec.pause_blocks and migration.rounds
        ):
            source.at_boundary(self._step(migration, self._pause), now)
            return
        migration.rounds += 1
        self._send(migration, left, now, self._precopy)

    def _held(self, migration: Migration, now: float) -> int:
        """Full blocks that the target's prefix cache has by name: they need not be copied."""
        cache, request = migration.target.cache, migration.job.request
        if cache is None or migration.on_host or not request.unit_names:
            return 0
        units = (self._context(migration, now) - 1) // request.unit_tokens
        found = cache.leading(request.unit_names, units)
        return found * request.unit_tokens // migration.source.block_tokens

    def _from_host(self, migration: Migration, now: float) -> None:
        """What is in host memory does not change: one round copies all of it."""
        migration.source.hold(migration.job)
        self._last_round(migration, now)

    def _pause(self, migration: Migration, now: float) -> None:
        if migration.job.state is JobState.SWAPPED:
            self._from_host(migration, now)
            return
        migration.source.pause(migration.job)
        self._last_round(migration, now)

    def _last_round(self, migration: Migration, now: float) -> None:
        job, source = migration.job, migration.source
        migration.paused_s = now
        needed = blocks_for(job.prompt + job.tokens, source.block_tokens)
        if not self._make_room(migration, needed, now):
            return
        migration.rounds += 1
        self._send(migration, job.blocks - migration.copied, now, self._sent)

    def _send(
        self, migration: Migration, blocks: int, now: float, then: Callable[[Migration, float], None]
    ) -> None:
        def arrived(at: float) -> None:
            migration.copied += blocks
            target.incoming.add(size, at - now)
            then(migration, at)

        migration.sent += blocks
        source, target = migration.source, migration.target
        size = blocks * source.spec.block_bytes
        step = self._step(migration, lambda _, at: arrived(at))
        self._network.send(source.instance_id, target.instance_id, size, now, step)

    def _make_room(self, migration: Migration, blocks: int, now: float) -> bool:
        """Let the reservation be at least so large; else the migration is over."""
        more = blocks - migration.blocks
        if more <= 0:
            return True
        target = migration.target
        if target.reserve_host(more) if migration.on_host else target.extend(more, now):
            migration.blocks = blocks
            return True
        self._close(migration, MigrationOutcome.NO_ROOM, "outgrew its room", now)
        return False

    def _sent(self, migration: Migration, now: float) -> None:
        self._events.at(now + self._spec.commit_s, self._step(migration, self._commit))

    def _commit(self, migration: Migration, now: float) -> None:
        job, source, target = migration.job, migration.source, migration.target
        source.release(job, now)
        job.instance_id = target.instance_id
        job.migrations += 1
        job.placements.append(PlacementRecord(now, target.instance_id))
        paused_s, blocks = migration.paused_s, migration.blocks
        assert paused_s is not None
        needed = blocks_for(job.prompt + job.tokens, target.block_tokens)

        def arrive(then: float) -> None:
            job.pause_s += then - paused_s
            if migration.on_host:
                target.unreserve_host(blocks - needed)
                target.receive_on_host(job, needed)
            else:
                target.receive(job, blocks)

        target.at_boundary(arrive, now)
        self._end(migration, MigrationOutcome.COMMITTED, "", now)

    # ---- the end

    def _close(self, migration: Migration, outcome: MigrationOutcome, detail: str, now: float) -> None:
        """It did not work out: the request stays where it is."""
        job, source, target = migration.job, migration.source, migration.target
        if migration.blocks and migration.on_host:
            target.unreserve_host(migration.blocks)
        elif migration.blocks:
            target.unreserve(migration.blocks, now)
        if migration in self._queue:
            self._queue.remove(migration)
        if migration.in_line is not None:
            target.imports.remove(migration.in_line)
            # The next in line may need less.
            target.wake(now)
        if job.state is JobState.PAUSED:
            assert migration.paused_s is not None
            job.pause_s += now - migration.paused_s
            source.at_boundary(lambda _: source.resume(job), now)
        self._end(migration, outcome, detail, now)

    def _end(self, migration: Migration, outcome: MigrationOutcome, detail: str, now: float) -> None:
        migration.over = True
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
                asked_s=migration.asked_s,
                end_s=now,
                outcome=outcome,
                detail=detail,
                context_tokens=migration.asked_tokens,
                bytes_sent=migration.sent * source.spec.block_bytes,
                rounds=migration.rounds,
                queued_s=(now if started_s is None else started_s) - migration.asked_s,
                transfer_s=0.0 if started_s is None else now - started_s,
                pause_s=0.0 if paused_s is None else now - paused_s,
            )
        )
        self._listener.migration_closed(migration, outcome)
        if migration.has_place:
            self._sending[source.instance_id] -= 1
            self._receiving[target.instance_id] -= 1
            self._admit(now)
        if migration.ended is not None:
            migration.ended(outcome is MigrationOutcome.COMMITTED, now)

    def _record_refusal(self, action: Migrate, job: Job, detail: str, now: float) -> None:
        self.records.append(
            MigrationRecord(
                request_id=action.request_id,
                source_id=action.source_id,
                target_id=action.target_id,
                reason=action.reason,
                asked_s=now,
                end_s=now,
                outcome=MigrationOutcome.REFUSED,
                detail=detail,
                context_tokens=job.prompt + job.tokens,
                bytes_sent=0,
                rounds=0,
                queued_s=0.0,
                transfer_s=0.0,
                pause_s=0.0,
            )
        )

    def _context(self, migration: Migration, now: float) -> int:
        job = migration.job
        return job.prompt + job.tokens_at(migration.source.begun_boundary(now))

    def _needed(self, migration: Migration, now: float) -> int:
        """Blocks to reserve: the context, and one to grow into while it is copied."""
        return blocks_for(self._context(migration, now), migration.target.block_tokens) + 1


def _rank_of(entry: tuple[Rank, Callable[[float], bool]]) -> Rank:
    return entry[0]
