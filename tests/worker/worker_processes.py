"""Simulated workers in separate processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import grpc
import msgspec

from tailrace.records import InstanceRecord
from tailrace.store.store import Store, StoreUnavailable
from tailrace.v1 import types_pb2, worker_pb2, worker_pb2_grpc
from tests.harness.forked import ForkedCommand
from tests.waiting import WAIT_S

# A start takes two seconds, or half a minute on a stalling machine.
# Slow enough to act in mid-stream, with enough KV to make copying worthwhile.
ENGINE = {
    "speed": 1.0,
    "max_model_len": 4096,
    "kv_blocks": 2048,
    "block_tokens": 16,
    "kv_bytes_per_token": 4096,
    "reasoning_mean_tokens": 200,
    "answer_mean_tokens": 200,
}
# For requests that go on for minutes, which is until a test ends them, as long as nothing hangs.
ENDLESS_ENGINE = ENGINE | {"max_model_len": 32_768}
ENDLESS = {"max_tokens": 30_000, "ignore_eos": True, "min_tokens": 30_000}

# Deadlines of a worker that another process may miss which does not run for some seconds.
PATIENT = {
    "worker_agent.dispatch._HELLO_S": WAIT_S,
    "worker_agent.kv.client._CONNECT_S": WAIT_S,
    "worker_agent.migration.copying._WHY_S": WAIT_S,
    "worker_agent.migration.source._OPEN_S": WAIT_S,
}


@dataclass
class WorkerProcess:
    """A running worker process."""

    process: ForkedCommand
    log: Path
    records: list[InstanceRecord]

    @property
    def address(self) -> str:
        return self.records[0].address

    @property
    def stream_address(self) -> str:
        return self.records[0].stream_address

    @property
    def instance_id(self) -> str:
        return self.records[0].instance_id

    def kill(self) -> None:
        self.process.kill()

    async def wait(self) -> int:
        """Wait for the end and return the exit code."""
        async with asyncio.timeout(WAIT_S):
            while (code := self.process.poll()) is None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return code

    async def metric(self, name: str, label: str = "") -> float:
        """Return a metric, summed over its labels, or over those that include this one."""
        url = f"http://{self.records[0].metrics_address}/metrics"
        text = (await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=WAIT_S).read())).decode()
        lines = [line for line in text.splitlines() if line.startswith(f"tailrace_worker_{name}")]
        lines = [line for line in lines if label in line]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    async def until_metric(self, name: str, value: float, label: str = "") -> None:
        """Wait until `metric` has this value."""
        async with asyncio.timeout(WAIT_S):
            while await self.metric(name, label) != value:  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async def logged(self, text: str, times: int = 1) -> None:
        """Wait until the log contains the text this many times."""
        async with asyncio.timeout(WAIT_S):
            while self.log.read_text().count(text) < times:
                assert self.process.returncode is None, self.log.read_text()
                await asyncio.sleep(0.02)


@asynccontextmanager
async def worker_process(
    store: Store,
    etcd: str,
    cluster: str,
    folder: Path,
    name: str,
    *,
    count: int = 1,
    faults: Mapping[str, object] | Path | None = None,
    engine: Mapping[str, object] | None = None,
    more: Sequence[str] = (),
    deadlines: Mapping[str, float] = MappingProxyType({}),
) -> AsyncIterator[WorkerProcess]:
    """Start a process of simulated workers and wait until they are registered.

    `faults`: those of worker_agent/faults.py, or a file that holds them. `more`: further options of `serve
    worker`. `deadlines`: constants that the process sets, by their names in full.
    """
    arguments = ENGINE | dict(engine or {})
    command = ["serve", "worker", "--engine", "simulated", "--etcd", etcd, "--cluster", cluster, "--id", name]
    command += ["--count", str(count), *more]
    for key, value in arguments.items():
        command += ["--sim", f"{key}={json.dumps(value)}"]
    environment = {}
    if faults is not None:
        environment["TAILRACE_FAULTS"] = f"@{faults}" if isinstance(faults, Path) else json.dumps(faults)
    log = folder / f"{name}.log"
    log.write_bytes(b"")
    prelude = "".join(
        f"import {each.rpartition('.')[0]}\nassert {each}\n{each} = {value}\n"
        for each, value in deadlines.items()
    )
    process = ForkedCommand(command, log, environment, vllm=False, prelude=prelude)
    worker = WorkerProcess(process, log, [])
    stem, _, first = name.rpartition("-")
    names = [name] if count == 1 else [f"{stem}-{int(first) + n}" for n in range(count)]
    try:
        worker.records = [await _registered(store, each, worker) for each in names]
        yield worker
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                await worker.wait()
            except TimeoutError:
                process.kill()
                await worker.wait()
                raise AssertionError(f"{name} did not stop:\n{log.read_text()}") from None


async def _registered(store: Store, name: str, worker: WorkerProcess) -> InstanceRecord:
    async with asyncio.timeout(WAIT_S):
        value = None
        while value is None:
            assert worker.process.returncode is None, worker.log.read_text()
            # On a busy machine etcd can exceed the store's deadline.
            with contextlib.suppress(StoreUnavailable):
                value = await store.get(f"instances/{name}")
            await asyncio.sleep(0.05)
    return msgspec.json.decode(value, type=InstanceRecord)


async def migrate(
    channel: grpc.aio.Channel,
    request_id: str,
    source_address: str,
    from_epoch: int,
    *,
    migration_id: str = "",
    mode: worker_pb2.CopyMode.ValueType = worker_pb2.COPY_MODE_PRE_COPY,
    timeout_s: float = WAIT_S,
    source_instance_id: str = "",
    target_instance_id: str = "",
    target_incarnation: str = "",
) -> list[worker_pb2.ImportEvent]:
    """Import a request into the worker behind the channel and return all events."""
    request = worker_pb2.ImportRequest(
        migration_id=migration_id or f"{request_id}/{from_epoch + 1}",
        request_id=request_id,
        source_instance_id=source_instance_id,
        source_address=source_address,
        target_instance_id=target_instance_id,
        target_incarnation=target_incarnation,
        from_epoch=from_epoch,
        epoch=from_epoch + 1,
        mode=mode,
        timeout_s=timeout_s,
    )
    return [event async for event in worker_pb2_grpc.WorkerStub(channel).Import(request, timeout=WAIT_S)]


def committed(events: list[worker_pb2.ImportEvent]) -> worker_pb2.ImportEvent:
    """Return the last event and check that it is the commit."""
    assert events and events[-1].state == types_pb2.MIGRATION_STATE_COMMITTED, events
    return events[-1]
