"""Check the invariants of an idle cluster: nothing left over, nothing leaked, memory bounded."""

from __future__ import annotations

import asyncio
import http.client
import socket
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

from tailrace.local.certificates import OPERATOR, certificate_folder
from tailrace.security.credentials import AUTHORITIES, CERTIFICATE, KEY
from tests.chaos.cluster import Cluster, Member
from tests.chaos.open_files import open_files
from tests.chaos.schedule import Tier

_CALL_S: Final = 5.0
_SETTLE_S: Final = 120.0
# gRPC keeps connections with a replaced certificate for a minute after their last call (service/channels.py).
_CONNECTIONS_CLOSED_S: Final = 75.0
_POLL_S: Final = 0.2
# A started front end is known to the other one by then, and has copies of its answers.
_ANSWERS_COPIED_S: Final = 60.0
_PEERS: Final = "tailrace_frontend_answer_peers"
_UNCOPIED: Final = "tailrace_frontend_answers_uncopied"
# Of Envoy's own, beside the edge's.
_PROXY_REQUESTS: Final = "downstream_rq_active"
_PROXY_CALL: Final = "/stats?filter=^http.users.downstream_rq_active$"

# Metrics that must be zero when idle, by tier.
_ZERO_WHEN_IDLE: Final[Mapping[Tier, tuple[str, ...]]] = {
    Tier.WORKER: ("tailrace_worker_requests", "tailrace_worker_kv_blocks_used"),
    Tier.FRONTEND: ("tailrace_frontend_streams",),
    Tier.SCHEDULER: ("tailrace_scheduler_pending_placements",),
    Tier.MIGRATION: ("tailrace_migration_open_migrations", "tailrace_migration_waiting_migrations"),
    Tier.MONITOR: (),
    Tier.EDGE: (_PROXY_REQUESTS,),
}
TASKS: Final = "tailrace_process_tasks"
FILES: Final = "process_open_fds"
MEMORY: Final = "process_resident_memory_bytes"
CORRUPT: Final = "tailrace_worker_kv_checksum_failures_total"
COUNTERS: Final = (CORRUPT,)
# Allowed above the tier's baseline: connections come and go, and a worker keeps up to a dozen KV segments
# for the next transfer, a file each (worker_agent/kv/memory.py).
_SLACK: Final = {TASKS: 15.0, FILES: 30.0}
# And at an edge: Envoy keeps the connections of as many questions as it had at a time.
_QUESTIONS: Final = 64
# Caches and histories fill up to their bounds; anything unbounded soon exceeds this.
_MEMORY_TIMES: Final = 1.5
_MEMORY_MORE: Final = 64e6

Scraped = Mapping[Member, Mapping[str, float]]


@dataclass(slots=True)
class TierUsage:
    """Maximum of each metric over the processes of one tier."""

    baseline: dict[str, float] = field(default_factory=dict)
    worst: dict[str, float] = field(default_factory=dict)


class InvariantChecker:
    """Scrapes the metrics of every healthy process."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._context = _operator_context(cluster.authority.folder)
        self.usage: dict[Tier, TierUsage] = {tier: TierUsage() for tier in _ZERO_WHEN_IDLE}
        self._limits: dict[Tier, dict[str, float]] = {tier: {} for tier in _ZERO_WHEN_IDLE}
        # Until when a process may exceed its limit of open files.
        self._replacing_until_s: dict[Member, float] = {}
        # Resident bytes at each check, by process and its run.
        self.memory: dict[str, list[float]] = {}
        # The values of COUNTERS at the last check, by process and its run: a restart sets them to zero.
        self._counts: dict[tuple[str, int], Mapping[str, float]] = {}

    async def record_baseline(self) -> None:
        """Take the current values as baseline. Raise TimeoutError if the cluster does not become idle."""
        async with asyncio.timeout(_SETTLE_S):
            while _leftovers(scraped := await self._scrape_all()):  # noqa: ASYNC110 - metrics are polled
                await asyncio.sleep(_POLL_S)
        self._raise_limits(scraped)
        for tier, limit in self._limits.items():
            self.usage[tier].baseline.update(limit)

    def _raise_limits(self, scraped: Scraped) -> None:
        for member, values in scraped.items():
            limit = self._limits[member.tier]
            for name in self._limited_metrics(member):
                limit[name] = max(limit.get(name, 0.0), values[name])

    def certificates_rotated(self) -> None:
        """Allow for connections with old certificates, which stay open for a while."""
        until_s = time.monotonic() + _CONNECTIONS_CLOSED_S
        self._replacing_until_s = dict.fromkeys(self._cluster.members.values(), until_s)

    async def wait_connections_closed(self) -> None:
        """Wait until no process has connections with old certificates."""
        last_s = max(self._replacing_until_s.values(), default=0.0)
        await asyncio.sleep(last_s - time.monotonic())

    def _is_replacing(self, member: Member) -> bool:
        return time.monotonic() < self._replacing_until_s.get(member, 0.0)

    def _extend_replacing(self) -> None:
        """Extend the time of unhealthy processes: they replace connections only once they are healthy."""
        until_s = time.monotonic() + _CONNECTIONS_CLOSED_S
        for member in self._cluster.members.values():
            if self._is_replacing(member) and not member.healthy:
                self._replacing_until_s[member] = until_s

    def _limited_metrics(self, member: Member) -> list[str]:
        return [TASKS, MEMORY] if self._is_replacing(member) else [TASKS, FILES, MEMORY]

    async def wait_for_invariants(self) -> list[str]:
        """Wait until all invariants hold; return the violations that remain after `_SETTLE_S`."""
        violations: list[str] = []
        scraped: Scraped = {}
        try:
            async with asyncio.timeout(_SETTLE_S):
                while True:
                    scraped = await self._scrape_all()
                    violations = [*_leftovers(scraped), *self._exceeded_limits(scraped)]
                    if not violations:
                        self._record(scraped)
                        return []
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            # Report each leak once: raise the limits to the current values.
            self._raise_limits(scraped)
            return [*violations, *_open_files(scraped)]

    def _exceeded_limits(self, scraped: Scraped) -> list[str]:
        exceeded = []
        for member, values in scraped.items():
            baseline = self._limits[member.tier]
            more = _QUESTIONS if member.tier is Tier.EDGE else 0
            limits = {name: baseline[name] + slack + more for name, slack in _SLACK.items()}
            limits[MEMORY] = baseline[MEMORY] * _MEMORY_TIMES + _MEMORY_MORE
            exceeded += [
                f"{member.name}: {name} is {values[name]:g}, the limit is {limits[name]:g}"
                for name in self._limited_metrics(member)
                if values[name] > limits[name]
            ]
        return exceeded

    def _record(self, scraped: Scraped) -> None:
        for member, values in scraped.items():
            worst = self.usage[member.tier].worst
            for name in self._limited_metrics(member):
                worst[name] = max(worst.get(name, 0.0), values[name])
            self.memory.setdefault(f"{member.name}.{member.starts}", []).append(values[MEMORY])
            self._counts[member.name, member.starts] = {name: values.get(name, 0.0) for name in COUNTERS}

    async def wait_answers_copied(self) -> bool:
        """Wait until no kept answer would be lost with either of two front ends; return False if that takes
        too long although both are healthy."""
        fronts = self._cluster.in_tier(Tier.FRONTEND)
        until_s = time.monotonic() + _ANSWERS_COPIED_S
        while time.monotonic() < until_s:
            if not all(front.healthy for front in fronts):
                until_s = time.monotonic() + _ANSWERS_COPIED_S
            elif all([_is_copied(await self._scrape(front)) for front in fronts]):
                return True
            await asyncio.sleep(_POLL_S)
        return False

    def counter_total(self, name: str) -> float:
        """Return one of COUNTED summed over every run of every process, as of each one's last check."""
        return sum(counts[name] for counts in self._counts.values())

    async def _scrape_all(self) -> Scraped:
        """Return the metrics of all healthy processes that reply."""
        self._extend_replacing()
        healthy = [member for member in self._cluster.members.values() if member.healthy]
        values = await asyncio.gather(*map(self._scrape, healthy))
        return {member: each for member, each in zip(healthy, values, strict=True) if each}

    async def _scrape(self, member: Member) -> dict[str, float]:
        """Return sums by metric; empty if the process does not reply."""
        try:
            values = await asyncio.to_thread(self._read, member.metrics)
            if member.tier is Tier.EDGE:
                values[_PROXY_REQUESTS] = await asyncio.to_thread(_requests_of_proxy, member.disk)
            return values
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


def _requests_of_proxy(disk: Path) -> float:
    """Return how many requests Envoy has. Raise OSError or HTTPException."""
    # One that was killed leaves its folder behind.
    newest = max(disk.glob("tailrace-edge.*"), key=lambda folder: folder.stat().st_mtime)
    connection = http.client.HTTPConnection("envoy", timeout=_CALL_S)
    with socket.socket(socket.AF_UNIX) as connection.sock:
        connection.sock.settimeout(_CALL_S)
        connection.sock.connect(str(newest / "admin.sock"))
        connection.request("GET", _PROXY_CALL)
        return float(connection.getresponse().read().rpartition(b" ")[2] or 0)


def _is_copied(front: Mapping[str, float]) -> bool:
    return bool(front.get(_PEERS)) and not front.get(_UNCOPIED)


def _leftovers(scraped: Scraped) -> list[str]:
    """Return what is still allocated for requests that have ended."""
    return [
        f"{member.name}: {name} is {values[name]:g}"
        for member, values in scraped.items()
        for name in _ZERO_WHEN_IDLE[member.tier]
        if values.get(name, 0.0)
    ]


def _open_files(scraped: Scraped) -> list[str]:
    """Describe what every process has open."""
    return [f"{member.name} has open: {open_files(pid)}" for member in scraped for pid in member.pids[:1]]


def _operator_context(certificates: Path) -> ssl.SSLContext:
    folder = Path(certificate_folder(str(certificates), OPERATOR.role.value, OPERATOR.name))
    context = ssl.create_default_context(cafile=str(folder / AUTHORITIES))
    context.load_cert_chain(folder / CERTIFICATE, folder / KEY)
    # Certificates name roles, not hosts.
    context.check_hostname = False
    return context
