"""Prefixes that are fetched from another instance's cache before their requests are submitted.

As workers do (worker_agent/prefixes/pulls.py): requests that lack the same unit wait for one transfer, which
takes what the link takes, from the holder's device or its host memory; what the holder has evicted meanwhile
is computed. Copies ahead of need come in the same way, and give way to what users wait for.
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
    """One transfer under way, and jobs that wait for it. `ended`: who is told, of a copy ahead of need."""

    source: Instance
    target: Instance
    names: Sequence[int]
    unit_tokens: int
    asked_s: float
    jobs: list[Job] = field(default_factory=list)
    ended: Callable[[float], None] | None = None


class PrefixPulls:
    """All of a simulation."""

    def __init__(self, network: Network, events: EventQueue, spec: MigrationSpec) -> None:
        """`spec`: asking for a prefix takes two of its messages."""
        self._network = network
        self._events = events
        self._ask_s = 2 * spec.message_s
        # By target and first unit.
        self._coming: dict[tuple[str, int], _Pull] = {}
        self.records: list[PullRecord] = []

    def submit(self, job: Job, target: Instance, holder: Instance | None, now: float) -> None:
        """Submit the job once its prefix has come from the holder, or from whoever it comes from already."""
        cache, request = target.cache, job.request
        if cache is None or not request.unit_names:
            target.submit(job, now)
            return
        names = request.unit_names[: (job.prompt - 1) // request.unit_tokens]
        have = target.leading(names)
        if have == len(names):
            target.submit(job, now)
            return
        place = target.instance_id, names[have]
        coming = self._coming.get(place)
        if coming is not None:
            coming.jobs.append(job)
        elif holder is None:
            target.submit(job, now)
        else:
            self._coming[place] = pull = _Pull(holder, target, names[have:], request.unit_tokens, now, [job])
            self._events.at(now + self._ask_s, lambda then: self._send(pull, then))

    def copy(
        self,
        request: SimRequest,
        holder: Instance,
        target: Instance,
        tokens: int,
        now: float,
        ended: Callable[[float], None],
    ) -> None:
        """Bring what the target lacks of the first `tokens`; `ended` is called when it is over.

        Nothing comes while users wait for KV there, or where the room for it is not free.
        """
        cache = target.cache
        units = request.unit_names[: tokens // request.unit_tokens] if request.unit_names else ()
        have = target.leading(units)
        lacking = units[have:]
        blocks = len(lacking) * request.unit_tokens // target.block_tokens
        busy = target.migrations_in or any(place[0] == target.instance_id for place in self._coming)
        free = target.total_blocks - target.used_blocks_at(target.boundary)
        if cache is None or not lacking or busy or blocks > free:
            ended(now)
            return
        pull = _Pull(holder, target, lacking, request.unit_tokens, now, ended=ended)
        self._coming[target.instance_id, lacking[0]] = pull
        self._events.at(now + self._ask_s, lambda then: self._send(pull, then))

    def _send(self, pull: _Pull, now: float) -> None:
        count = pull.source.leading(pull.names)
        unit_blocks = pull.unit_tokens // pull.source.block_tokens
        size = count * unit_blocks * pull.source.spec.block_bytes
        if not count:
            self._end(pull, 0, 0, now)
            return
        source, target = pull.source.instance_id, pull.target.instance_id
        self._network.send(source, target, size, now, lambda then: self._end(pull, count, size, then))

    def _end(self, pull: _Pull, count: int, size: int, now: float) -> None:
        target = pull.target
        del self._coming[target.instance_id, pull.names[0]]
        if count:
            target.incoming.add(size, now - pull.asked_s)
            target.bring(pull.names[:count], now)
        self.records.append(
            PullRecord(
                source_id=pull.source.instance_id,
                target_id=target.instance_id,
                asked_s=pull.asked_s,
                end_s=now,
                tokens=count * pull.unit_tokens,
                bytes_sent=size,
                requests=len(pull.jobs),
                ahead=pull.ended is not None,
            )
        )
        if pull.ended is not None:
            pull.ended(now)
        for job in pull.jobs:
            target.submit(job, now)
