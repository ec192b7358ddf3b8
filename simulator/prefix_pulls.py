"""Fetch prefixes from another instance's cache before their requests are submitted.

This models worker_agent/prefixes/pulls.py: requests that miss the same unit wait for one transfer, at the
link's speed, from the holder's device or its host memory. Units that the holder has evicted by then are
computed. Copies ahead of need use the same path, and yield to transfers that requests wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from simulator.cluster import MigrationSpec
from simulator.events import EventQueue
from simulator.instance import Instance
from simulator.job import Job
from simulator.network import Network
from simulator.records import PullRecord
from simulator.request import SimRequest


@dataclass(slots=True)
class _Pull:
    """A transfer in progress and the jobs waiting for it. `on_done` is called at the end of a copy ahead of
    need."""

    source: Instance
    target: Instance
    names: Sequence[int]
    unit_tokens: int
    requested_s: float
    jobs: list[Job] = field(default_factory=list)
    on_done: Callable[[float], None] | None = None


class PrefixPulls:
    """Manage all prefix transfers of a simulation."""

    def __init__(self, network: Network, events: EventQueue, spec: MigrationSpec) -> None:
        """Create it without transfers. A transfer request costs two messages of `spec`."""
        self._network = network
        self._events = events
        self._ask_s = 2 * spec.message_s
        # By target and first missing unit.
        self._coming: dict[tuple[str, int], _Pull] = {}
        self.records: list[PullRecord] = []

    def submit(self, job: Job, target: Instance, holder: Instance | None, now: float) -> None:
        """Submit the job after its prefix has arrived from the holder, or with a transfer already in
        progress."""
        cache, request = target.cache, job.request
        if cache is None or not request.unit_names:
            target.submit(job, now)
            return
        names = request.unit_names[: (job.prompt - 1) // request.unit_tokens]
        held = target.count_leading(names)
        if held == len(names):
            target.submit(job, now)
            return
        position = target.instance_id, names[held]
        coming = self._coming.get(position)
        if coming is not None:
            coming.jobs.append(job)
        elif holder is None:
            target.submit(job, now)
        else:
            self._coming[position] = pull = _Pull(
                holder, target, names[held:], request.unit_tokens, now, [job]
            )
            self._events.schedule(now + self._ask_s, lambda later: self._send(pull, later))

    def copy(
        self,
        request: SimRequest,
        holder: Instance,
        target: Instance,
        tokens: int,
        now: float,
        on_done: Callable[[float], None],
    ) -> None:
        """Copy what the target misses of the first `tokens`, then call `on_done`.

        Nothing is copied while requests wait for KV on that target, or if it lacks free blocks.
        """
        cache = target.cache
        units = request.unit_names[: tokens // request.unit_tokens] if request.unit_names else ()
        held = target.count_leading(units)
        missing = units[held:]
        blocks = len(missing) * request.unit_tokens // target.block_tokens
        busy = target.migrations_in or any(position[0] == target.instance_id for position in self._coming)
        free = target.total_blocks - target.used_blocks_at(target.boundary)
        if cache is None or not missing or busy or blocks > free:
            on_done(now)
            return
        pull = _Pull(holder, target, missing, request.unit_tokens, now, on_done=on_done)
        self._coming[target.instance_id, missing[0]] = pull
        self._events.schedule(now + self._ask_s, lambda later: self._send(pull, later))

    def _send(self, pull: _Pull, now: float) -> None:
        count = pull.source.count_leading(pull.names)
        unit_blocks = pull.unit_tokens // pull.source.block_tokens
        size = count * unit_blocks * pull.source.spec.block_bytes
        if not count:
            self._end(pull, 0, 0, now)
            return
        source, target = pull.source.instance_id, pull.target.instance_id
        self._network.send(source, target, size, now, lambda later: self._end(pull, count, size, later))

    def _end(self, pull: _Pull, count: int, size: int, now: float) -> None:
        target = pull.target
        del self._coming[target.instance_id, pull.names[0]]
        if count:
            target.incoming.add(size, now - pull.requested_s)
            target.insert_prefix(pull.names[:count], now)
        self.records.append(
            PullRecord(
                source_id=pull.source.instance_id,
                target_id=target.instance_id,
                requested_s=pull.requested_s,
                end_s=now,
                tokens=count * pull.unit_tokens,
                bytes_sent=size,
                requests=len(pull.jobs),
                ahead=pull.on_done is not None,
            )
        )
        if pull.on_done is not None:
            pull.on_done(now)
        for job in pull.jobs:
            target.submit(job, now)
