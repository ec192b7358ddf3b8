"""The invariants that hold whenever nothing is under way: nothing held, nothing leaked, memory bounded."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import http.client
import os
import re
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.chaos.cluster import Cluster, Member
from benchmarks.chaos.schedule import Tier
from tailrace.local.certificates import OPERATOR
from tailrace.local.plan import certificate_folder
from tailrace.security.credentials import AUTHORITIES, CERTIFICATE, KEY

_CALL_S: Final = 5.0
_SETTLE_S: Final = 40.0
# gRPC keeps what a certificate has replaced for a minute after its last call (tailrace/service/channels.py).
_REPLACED_S: Final = 75.0
_POLL_S: Final = 0.2
# A front end that was started is known to the other one by then, and has copies of what that has.
_COPIED_S: Final = 20.0
_PEERS: Final = "tailrace_frontend_answer_peers"
_UNCOPIED: Final = "tailrace_frontend_answers_uncopied"

# What must be nothing again, by tier.
_NOTHING: Final[Mapping[Tier, tuple[str, ...]]] = {
    Tier.WORKER: ("tailrace_worker_requests", "tailrace_worker_kv_blocks_used"),
    Tier.FRONTEND: ("tailrace_frontend_streams",),
    Tier.SCHEDULER: ("tailrace_scheduler_pending_placements",),
    Tier.MIGRATION: ("tailrace_migration_open_migrations", "tailrace_migration_waiting_migrations"),
    Tier.MONITOR: (),
}
TASKS: Final = "tailrace_process_tasks"
FILES: Final = "process_open_fds"
MEMORY: Final = "process_resident_memory_bytes"
CORRUPT: Final = "tailrace_worker_kv_checksum_failures_total"
COUNTED: Final = (CORRUPT,)
# Above what a tier had before the first fault: connections that come and go, and of a worker's files the
# segments of KV that it keeps for the next transfer (worker_agent/kv/segments.py), up to a dozen.
_SLACK: Final = {TASKS: 15.0, FILES: 30.0}
# Caches and histories fill up to their bounds; what has none would be beyond this soon.
_MEMORY_TIMES: Final = 1.5
_MEMORY_MORE: Final = 64e6

Scraped = Mapping[Member, Mapping[str, float]]


@dataclass(slots=True)
class Seen:
    """Of one tier: the most that a process of it had."""

    first: dict[str, float] = field(default_factory=dict)
    worst: dict[str, float] = field(default_factory=dict)


class Watch:
    """Looks at every process that is well."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._context = _operator_context(cluster.authority.folder)
        self.seen: dict[Tier, Seen] = {tier: Seen() for tier in _NOTHING}
        self._limits: dict[Tier, dict[str, float]] = {tier: {} for tier in _NOTHING}
        # Until when a process may have more files open than it should.
        self._replacing_until_s: dict[Member, float] = {}
        # Resident bytes at each look, by process and its run.
        self.memory: dict[str, list[float]] = {}
        # The counters of COUNTED at the last look, by process and its run: a restart sets them to zero.
        self._counts: dict[tuple[str, int], Mapping[str, float]] = {}

    async def learn(self) -> None:
        """Take what there is now for what there may be. Raises TimeoutError."""
        async with asyncio.timeout(_SETTLE_S):
            while _held(scraped := await self._scraped()):  # noqa: ASYNC110 - nobody tells of metrics
                await asyncio.sleep(_POLL_S)
        self._take(scraped)
        for tier, limit in self._limits.items():
            self.seen[tier].first.update(limit)

    def _take(self, scraped: Scraped) -> None:
        for member, values in scraped.items():
            limit = self._limits[member.tier]
            for name in self._bounded(member):
                limit[name] = max(limit.get(name, 0.0), values[name])

    def rotated(self) -> None:
        """All certificates were made anew: for a while connections with the old ones are open as well."""
        until_s = time.monotonic() + _REPLACED_S
        self._replacing_until_s = dict.fromkeys(self._cluster.members.values(), until_s)

    async def replaced(self) -> None:
        """Until files are bounded again, of everybody."""
        last_s = max(self._replacing_until_s.values(), default=0.0)
        await asyncio.sleep(last_s - time.monotonic())

    def _replacing(self, member: Member) -> bool:
        return time.monotonic() < self._replacing_until_s.get(member, 0.0)

    def _put_off(self) -> None:
        """What is not well replaces its connections when it is well again."""
        until_s = time.monotonic() + _REPLACED_S
        for member in self._cluster.members.values():
            if self._replacing(member) and not member.well:
                self._replacing_until_s[member] = until_s

    def _bounded(self, member: Member) -> list[str]:
        return [TASKS, MEMORY] if self._replacing(member) else [TASKS, FILES, MEMORY]

    async def settled(self) -> list[str]:
        """Until all is as it should be; what is not, after a while."""
        wrong: list[str] = []
        scraped: Scraped = {}
        try:
            async with asyncio.timeout(_SETTLE_S):
                while True:
                    scraped = await self._scraped()
                    wrong = [*_held(scraped), *self._leaked(scraped)]
                    if not wrong:
                        self._note(scraped)
                        return []
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            # Told once; from now on what there is may be.
            self._take(scraped)
            return [*wrong, *_files(scraped)]

    def _leaked(self, scraped: Scraped) -> list[str]:
        leaked = []
        for member, values in scraped.items():
            first = self._limits[member.tier]
            limits = {name: first[name] + slack for name, slack in _SLACK.items()}
            limits[MEMORY] = first[MEMORY] * _MEMORY_TIMES + _MEMORY_MORE
            leaked += [
                f"{member.name}: {name} is {values[name]:g}, not {limits[name]:g}"
                for name in self._bounded(member)
                if values[name] > limits[name]
            ]
        return leaked

    def _note(self, scraped: Scraped) -> None:
        for member, values in scraped.items():
            worst = self.seen[member.tier].worst
            for name in self._bounded(member):
                worst[name] = max(worst.get(name, 0.0), values[name])
            self.memory.setdefault(f"{member.name}.{member.starts}", []).append(values[MEMORY])
            self._counts[member.name, member.starts] = {name: values.get(name, 0.0) for name in COUNTED}

    async def copied(self) -> bool:
        """Until no kept answer would be lost with either of two front ends; False: it takes too long, though
        both are well."""
        fronts = self._cluster.of(Tier.FRONTEND)
        until_s = time.monotonic() + _COPIED_S
        while time.monotonic() < until_s:
            if not all(front.well for front in fronts):
                until_s = time.monotonic() + _COPIED_S
            elif all([_is_copied(await self._scrape(front)) for front in fronts]):
                return True
            await asyncio.sleep(_POLL_S)
        return False

    def counted(self, name: str) -> float:
        """Return one of COUNTED summed over every run of every process, as of each one's last look."""
        return sum(counts[name] for counts in self._counts.values())

    async def _scraped(self) -> Scraped:
        """Of everybody who is well and answers."""
        self._put_off()
        well = [member for member in self._cluster.members.values() if member.well]
        values = await asyncio.gather(*map(self._scrape, well))
        return {member: each for member, each in zip(well, values, strict=True) if each}

    async def _scrape(self, member: Member) -> dict[str, float]:
        """Sums by metric; nothing where nobody answers."""
        try:
            return await asyncio.to_thread(self._read, member.metrics)
        except (OSError, http.client.HTTPException):
            return {}

    def _read(self, address: str) -> dict[str, float]:
        connection = http.client.HTTPSConnection(address, timeout=_CALL_S, context=self._context)
        try:
            connection.request("GET", "/metrics")
            body = connection.getresponse().read().decode()
        finally:
            connection.close()
        sums: dict[str, float] = {}
        for family in text_string_to_metric_families(body):
            for sample in family.samples:
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
        return sums


def _is_copied(front: Mapping[str, float]) -> bool:
    return bool(front.get(_PEERS)) and not front.get(_UNCOPIED)


def _held(scraped: Scraped) -> list[str]:
    """What is still held for requests that have ended."""
    return [
        f"{member.name}: {name} is {values[name]:g}"
        for member, values in scraped.items()
        for name in _NOTHING[member.tier]
        if values.get(name, 0.0)
    ]


def _files(scraped: Scraped) -> list[str]:
    """What everybody has open, by kind: for whoever looks for a leak."""
    told = []
    for member in scraped:
        kinds: collections.Counter[str] = collections.Counter()
        for pid in member.pids[:1]:
            for path in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    kinds[re.sub(r"[0-9]+", "N", os.readlink(path))] += 1
        told.append(f"{member.name} has open: {dict(kinds.most_common(8))}")
    return told


def _operator_context(certificates: Path) -> ssl.SSLContext:
    folder = Path(certificate_folder(str(certificates), OPERATOR.role.value, OPERATOR.name))
    context = ssl.create_default_context(cafile=str(folder / AUTHORITIES))
    context.load_cert_chain(folder / CERTIFICATE, folder / KEY)
    # Processes are known by their roles; which one answers here is not the point.
    context.check_hostname = False
    return context
