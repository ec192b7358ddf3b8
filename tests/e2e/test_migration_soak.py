"""Slow: thousands of migrations, half of them aborted at each step and by each end, leave nothing behind.

`make soak`. Descriptors, mappings, tasks and resident memory of every process of the fleet are compared with
those after a warm-up of the same kind, and printed; of real engines also live objects and what C code has
allocated, which show what is too small for resident memory. All are compared after each quarter of the
migrations, too: what each migration leaves is there in all quarters, while an arena of an allocator or a
pool of UCX's, which grow by some MiB when more is in flight than ever before, are there in some.
TAILRACE_SOAK sets the number of migrations, at least 16.

The warm-up fills every cache that is meant to grow: KV of ended requests on the device and in host memory,
the workers' record of imports that have ended, and those of Python and glibc.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import httpx
import psutil
import pytest

from tailrace.v1 import admin_pb2, admin_pb2_grpc, types_pb2, worker_pb2, worker_pb2_grpc
from tests.e2e.conftest import VLLM_OPTIONS, VLLM_WORKERS
from tests.e2e.held_memory import Held, held, write_plugin
from tests.harness.fleet import MODEL, Fleet
from tests.harness.processes import wait_until
from tests.service.silent_proxy import SilentProxy, silent_proxy
from tests.waiting import WAIT_S
from worker_agent.migration.target import _ENDED_MAX

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(7200)]

MIGRATIONS = int(os.environ.get("TAILRACE_SOAK", "2000"))
PARTS = 4
# Python's and glibc's own caches are full after so many of them.
WARM_UP = 300
# How many imports are refused at a time, to fill the record of those that have ended.
REFUSED_AT_ONCE = 8
STREAMS = 9
# For workers that import vLLM themselves, on a machine that does much else.
START_S = 600
# How many more live objects a worker may have after each part, and how many of one type: the content of its
# caches changes, and channels to other links are opened. One object kept by one end of 500 migrations would
# be 165 more.
OBJECTS_MORE = 125
KIND_MORE = 3
# MiB that C code may have allocated more: some of it grows by 1.2 at a time, also without migrations.
ALLOCATED_MORE_MB = 2.0
# More than 2% that is allowed: a few descriptors and mappings are a cache's.
COUNTED = {"descriptors": 2.0, "mappings": 4.0, "kv_mappings": 2.0, "tasks": 1.0}
NOTHING_HELD = Held()
# Room for all streams on one worker, and little more: evicted blocks fill host memory during the warm-up.
KV_BLOCKS = "640"
HOST_KV_BYTES = str(16 << 20)
STEPS = (
    types_pb2.MIGRATION_STATE_QUEUED,
    types_pb2.MIGRATION_STATE_OPEN,
    types_pb2.MIGRATION_STATE_PRE_COPY,
    types_pb2.MIGRATION_STATE_STOP_AND_COPY,
)
ENDS = ("service", "source", "target", "link")
# Long enough for the abort to arrive in the step.
HOLDS = [
    {"hold": f"{end}:{point}", "seconds": 0.03}
    for end, points in (("import", ("open", "pre_copy", "paused", "adopt")), ("export", ("open", "paused")))
    for point in points
]
_ENDED = (types_pb2.MIGRATION_STATE_COMMITTED, types_pb2.MIGRATION_STATE_ABORTED)


@dataclass
class Use:
    """What a process holds."""

    descriptors: int
    mappings: int
    kv_mappings: int
    tasks: int
    resident_mb: float
    # Of vLLM workers.
    held: Held = NOTHING_HELD

    def over(self, before: Use, spare_mb: float) -> list[str]:
        """Return what is more than 2% over the use before."""
        spares = COUNTED | {"resident_mb": spare_mb}
        found = [
            name
            for name, spare in spares.items()
            if getattr(self, name) > 1.02 * getattr(before, name) + spare
        ]
        if self.held.objects > before.held.objects + OBJECTS_MORE:
            found.append("objects")
        for kind, number in self.held.kinds.items():
            if number - before.held.kinds.get(kind, 0) > KIND_MORE:
                found.append(f"more {kind}")
        if self.held.allocated_mb > before.held.allocated_mb + ALLOCATED_MORE_MB:
            found.append("allocated_mb")
        return found


@dataclass
class Soak:
    """Migrations of a few streams at a time, and their ends."""

    fleet: Fleet
    workers: tuple[str, ...]
    draw: random.Random
    outcomes: Counter[str] = field(default_factory=Counter)
    # Links that are cut, by stream and source: a worker keeps a channel to each address for ten minutes.
    links: dict[tuple[int, str], SilentProxy] = field(default_factory=dict)
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    async def run(self, count: int) -> None:
        """Run until so many were committed and aborted."""
        self.outcomes.clear()
        async with (
            grpc.aio.insecure_channel(self.fleet.addresses[self.fleet.leader()]) as channel,
            httpx.AsyncClient(base_url=self.fleet.http, timeout=WAIT_S) as http,
        ):
            self.admin, self.http = admin_pb2_grpc.AdminStub(channel), http
            async with asyncio.TaskGroup() as group:
                for number in range(STREAMS):
                    group.create_task(self.drive(number, count))

    async def fill_caches(self, count: int) -> None:
        """Fill what a worker keeps of ended imports, and of ended requests' KV; migrate at least so often."""
        async with asyncio.TaskGroup() as group:
            for target, source in itertools.pairwise([*self.workers, self.workers[0]]):
                for _ in range(REFUSED_AT_ONCE):
                    group.create_task(self.refused_imports(target, source, _ENDED_MAX // REFUSED_AT_ONCE))
        await self.run(count)
        while self.fleet.engine == "vllm" and not await asyncio.to_thread(self.host_memory_full):
            await self.run(count)

    async def refused_imports(self, target: str, source: str, count: int) -> None:
        """Import requests that the source does not have."""
        async with grpc.aio.insecure_channel(self.fleet.addresses[target]) as channel:
            for number in itertools.islice(self.numbers, count):
                call = worker_pb2_grpc.WorkerStub(channel).Import(
                    worker_pb2.ImportRequest(
                        migration_id=f"soak-{number}",
                        request_id=f"nowhere-{number}",
                        source_instance_id=source,
                        source_address=self.fleet.addresses[source],
                        target_instance_id=target,
                        epoch=1,
                    ),
                    timeout=WAIT_S,
                )
                assert [event.state async for event in call] == [types_pb2.MIGRATION_STATE_GONE]

    def host_memory_full(self) -> bool:
        """Return whether each worker's host memory has given up blocks of ended requests for others."""
        dropped = "tailrace_worker_host_blocks_dropped_total"
        return all(self.fleet.metric(name, dropped) for name in self.workers)

    async def drive(self, number: int, count: int) -> None:
        while min(self.outcomes["committed"], self.outcomes["aborted"]) < count // 2:
            chunks = asyncio.Queue[str]()
            stream = asyncio.create_task(self.stream(chunks))
            try:
                name = await asyncio.wait_for(chunks.get(), WAIT_S)
                while not stream.done():
                    abort = self.outcomes["aborted"] < self.outcomes["committed"]
                    end = self.draw.choice(ENDS) if abort else "nobody"
                    if not await self.move(number, name, end, stream) or end == "source":
                        break
            finally:
                stream.cancel()
                await asyncio.wait([stream])

    async def stream(self, chunks: asyncio.Queue[str]) -> None:
        body = {
            "model": MODEL,
            "stream": True,
            "max_tokens": 1500,
            "min_tokens": 1500,
            "messages": [{"role": "user", "content": f"Soak {next(self.numbers)} " + "of many blocks " * 30}],
        }
        async with self.http.stream("POST", "/v1/chat/completions", json=body) as reply:
            async for line in reply.aiter_lines():
                if line.startswith("data: {") and not chunks.qsize():
                    chunks.put_nowait(line.partition('"id":"')[2].partition('"')[0])

    async def move(self, number: int, name: str, end: str, stream: asyncio.Task[None]) -> bool:
        """Move the stream's request; return whether it is still there."""
        requests = (await self.admin.ListRequests(admin_pb2.ListRequestsRequest(), timeout=WAIT_S)).requests
        found = next((each for each in requests if name in each.request_id), None)
        if found is None:
            await asyncio.sleep(0.05)
            return not stream.done()
        step = self.draw.choice(STEPS)
        target = self.draw.choice([each for each in self.workers if each != found.instance_id])
        try:
            if end in ("target", "link"):
                state = await self.import_directly(number, found, target, step, end)
            else:
                state = await self.migrate(found, target, step, end, stream)
        except grpc.aio.AioRpcError as refused:
            self.outcomes[f"refused: {refused.code().name}"] += 1
            await asyncio.sleep(0.02)
            return True
        outcome = "committed" if state == types_pb2.MIGRATION_STATE_COMMITTED else "aborted"
        self.outcomes[outcome] += 1
        if end != "nobody":
            label = types_pb2.MigrationState.Name(step).removeprefix("MIGRATION_STATE_").lower()
            self.outcomes[f"{outcome}, to be ended by the {end} at {label}"] += 1
        return True

    async def migrate(
        self,
        found: admin_pb2.RequestInfo,
        target: str,
        step: types_pb2.MigrationState.ValueType,
        end: str,
        stream: asyncio.Task[None],
    ) -> types_pb2.MigrationState.ValueType:
        """Migrate by way of scheduler and migration service; `end` aborts it at this step."""
        state: types_pb2.MigrationState.ValueType = types_pb2.MIGRATION_STATE_UNSPECIFIED
        request = admin_pb2.AdminMigrateRequest(request_id=found.request_id, target_instance_id=target)
        async for record in self.admin.Migrate(request, timeout=WAIT_S):
            state = record.state
            if state != step or state in _ENDED:
                continue
            if end == "source":
                stream.cancel()
            elif end == "service":
                async with grpc.aio.insecure_channel(self.fleet.addresses[target]) as channel:
                    cancel = worker_pb2.CancelImportRequest(migration_id=record.migration_id)
                    await worker_pb2_grpc.WorkerStub(channel).CancelImport(cancel, timeout=WAIT_S)
        return state

    async def import_directly(
        self,
        number: int,
        found: admin_pb2.RequestInfo,
        target: str,
        step: types_pb2.MigrationState.ValueType,
        end: str,
    ) -> types_pb2.MigrationState.ValueType:
        """Import over a link that is cut at this step, or by a call that ends there."""
        state: types_pb2.MigrationState.ValueType = types_pb2.MIGRATION_STATE_QUEUED
        proxy = await self.link(number, found.instance_id)
        async with grpc.aio.insecure_channel(self.fleet.addresses[target]) as channel:
            call = worker_pb2_grpc.WorkerStub(channel).Import(
                worker_pb2.ImportRequest(
                    migration_id=f"soak-{next(self.numbers)}",
                    request_id=found.request_id,
                    source_instance_id=found.instance_id,
                    source_address=proxy.address,
                    target_instance_id=target,
                    from_epoch=found.epoch,
                    epoch=found.epoch + 1,
                    timeout_s=10.0,
                ),
                timeout=WAIT_S,
            )
            if step == types_pb2.MIGRATION_STATE_QUEUED:
                await asyncio.sleep(self.draw.uniform(0.0, 0.01))
                self.cut(call, proxy.end, end)
            try:
                async for event in call:
                    state = event.state
                    if state == step:
                        self.cut(call, proxy.end, end)
            except asyncio.CancelledError:
                if not call.cancelled():
                    raise
        return state

    async def link(self, number: int, source: str) -> SilentProxy:
        """Return the link of a stream to its source, which stays until `stack` is closed."""
        if (number, source) not in self.links:
            opened = silent_proxy(self.fleet.addresses[source])
            self.links[number, source] = await self.stack.enter_async_context(opened)
        return self.links[number, source]

    @staticmethod
    def cut(call: grpc.aio.UnaryStreamCall, cut: object, end: str) -> None:  # type: ignore[type-arg]
        if end == "link":
            assert callable(cut)
            cut()
        else:
            call.cancel()


def uses(fleet: Fleet) -> dict[str, Use]:
    """Return what each process of the fleet holds, by name."""
    found = {}
    for name, process in fleet.processes.items():
        if name == "etcd":
            # It keeps the history of its keys.
            continue
        root = psutil.Process(process.pid)
        for number, each in enumerate([root, *root.children(recursive=True)]):
            maps = Path(f"/proc/{each.pid}/maps").read_text().splitlines()
            if number:
                # An API server is vLLM's. Its allocator maps areas for threads; its resident memory has them.
                maps = [line for line in maps if "/" in line]
            found[name if not number else f"{name}/{number}"] = Use(
                each.num_fds(),
                len(maps),
                sum("tailrace-kv" in line for line in maps),
                int(fleet.metric(name, "tailrace_process_tasks"))
                if not number and name in fleet.metrics_ports
                else 0,
                each.memory_info().rss / (1 << 20),
                held(each.pid) if fleet.plugins and name in VLLM_WORKERS and not number else NOTHING_HELD,
            )
    return found


def table(before: dict[str, Use], after: dict[str, Use]) -> Iterable[str]:
    widths = {"descriptors": 16, "mappings": 16, "of KV": 10, "tasks": 12, "resident MiB": 20}
    widths |= {"objects": 20, "allocated MiB": 20}
    yield f"{'process':14}" + "".join(f"{name:>{width}}" for name, width in widths.items())
    for name, now in after.items():
        was = before[name]
        yield (
            f"{name:14}{was.descriptors:>8} {now.descriptors:>7}{was.mappings:>8} {now.mappings:>7}"
            f"{was.kv_mappings:>5} {now.kv_mappings:>4}{was.tasks:>6} {now.tasks:>5}"
            f"{was.resident_mb:>10.1f} {now.resident_mb:>9.1f}"
            f"{was.held.objects:>10} {now.held.objects:>9}"
            f"{was.held.allocated_mb:>10.1f} {now.held.allocated_mb:>9.1f}"
        )


def soak(fleet: Fleet, workers: tuple[str, ...], count: int) -> None:
    """Migrate `count` times and check that every process is back where it was."""
    soaking = Soak(fleet, workers, random.Random(1))
    fleet.faults.write_text(json.dumps(HOLDS))

    async def migrate() -> list[dict[str, Use]]:
        async with soaking.stack:
            for number, source in itertools.product(range(STREAMS), workers):
                await soaking.link(number, source)
            await soaking.fill_caches(WARM_UP)
            await asyncio.to_thread(fleet.wait_idle)
            seen = [uses(fleet)]
            for _ in range(PARTS):
                await soaking.run(count // PARTS)
                print(*(f"{number:6} {what}" for what, number in sorted(soaking.outcomes.items())), sep="\n")
                await asyncio.to_thread(fleet.wait_idle)
                seen.append(await asyncio.to_thread(settled, fleet, seen[-1]))
        return seen

    seen = asyncio.run(migrate())
    fleet.disarm()
    for before, after in itertools.pairwise(seen):
        print(*table(before, after), sep="\n", end="\n\n")
    grown = [over(before, after) for before, after in itertools.pairwise(seen)]
    left = {name: set.intersection(*(set(each.get(name, ())) for each in grown)) for name in grown[0]}
    assert {name: what for name, what in left.items() if what} == {}


def settled(fleet: Fleet, before: dict[str, Use]) -> dict[str, Use]:
    """Return what is used once all of it is free again, or after a minute."""
    with contextlib.suppress(TimeoutError):
        # Connections of clients that left end a little later.
        wait_until(lambda: not over(before, uses(fleet)), "everything to be freed", 60)
    return uses(fleet)


def over(before: dict[str, Use], after: dict[str, Use]) -> dict[str, list[str]]:
    """Return what each process uses more of than before."""
    # vllm-rs, an API server, has 55 to 58 MiB resident from one minute to the next.
    found = {name: now.over(before[name], 3.0 if "/" in name else 1.0) for name, now in after.items()}
    return {name: what for name, what in found.items() if what}


def test_simulated_engines(simulated_fleet: Fleet) -> None:
    soak(simulated_fleet, ("w0", "w1", "w2"), MIGRATIONS)


@pytest.fixture
def small_vllm_fleet(tmp_path: Path) -> Iterator[Fleet]:
    """Three vLLM workers whose caches the warm-up fills, and which tell what they hold."""
    fleet = Fleet(tmp_path, "vllm")
    fleet.plugins = write_plugin(tmp_path / "plugin")
    try:
        fleet.start_control()
        for name in VLLM_WORKERS:
            options = [*VLLM_OPTIONS[name], "--kv-blocks", KV_BLOCKS, "--host-kv-bytes", HOST_KV_BYTES]
            fleet.start_worker(name, options, wait=False)
        for name in VLLM_WORKERS:
            fleet.wait_healthy(name, START_S)
        fleet.start_frontend()
        fleet.wait_instances(VLLM_WORKERS)
        yield fleet
    finally:
        fleet.close()


def test_vllm_engines(small_vllm_fleet: Fleet) -> None:
    soak(small_vllm_fleet, VLLM_WORKERS, MIGRATIONS)
