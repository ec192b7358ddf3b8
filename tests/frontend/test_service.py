"""`tailrace serve frontend` as a process, against a real etcd."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import msgspec
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from frontend_svc.admission import STOPPING, Refusal
from frontend_svc.api_server.sockets import EngineSockets, PortTaken, bind_http, is_listening
from tailrace.records import ServiceRecord
from tailrace.store.registration import register
from tailrace.store.store import Store
from tests.frontend.conftest import eventually
from tests.frontend.fake_api_server import FakeApiServer
from tests.frontend.fleet import record
from tests.frontend.scripted_worker import FINISHED, ScriptedWorker, outputs, serving
from tests.harness.local_etcd import LocalEtcd, local_etcd
from tests.waiting import WAIT_S

COMMAND = [sys.executable, "-m", "frontend_svc.main"]


@asynccontextmanager
async def front_end(etcd: LocalEtcd, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run the service as a process; kill it at the end if it still runs."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND, "--etcd", etcd.endpoint, *arguments, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def wait_registered(store: Store, frontend_id: str) -> ServiceRecord:
    """Wait until the front end is registered and return its record."""
    async with asyncio.timeout(WAIT_S):
        async for services in store.watch_prefix("services/frontend/"):
            for key, value in services.items():
                if key.endswith(frontend_id):
                    return msgspec.json.decode(value, type=ServiceRecord)
    raise AssertionError("the watch has ended")


async def test_carries_a_stream_registers_and_withdraws(tmp_path: Path) -> None:
    worker = ScriptedWorker("w0")
    async with local_etcd(tmp_path / "etcd") as etcd, FakeApiServer(tmp_path) as front, serving(worker):
        store = await Store.connect([etcd.endpoint], "default")
        await register(store, "instances/w0", msgspec.json.encode(record("w0", worker.address)))
        arguments = ("--front", "none", "--ipc", str(tmp_path), "--http", "127.0.0.1:0", "--id", "f0")
        async with front_end(etcd, *arguments) as process:
            service = await wait_registered(store, "f0")
            await front.ready()
            await front.add("r")
            worker.send(outputs(await worker.submitted(), [1, 2], 0, FINISHED))
            assert (await front.end_of("r")).new_token_ids == [1, 2]
            async with grpc.aio.insecure_channel(service.address) as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
            reader, writer = await asyncio.open_connection(*service.metrics_address.split(":"))
            writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
            text = (await reader.read()).decode()
            writer.close()
            assert re.search(r'^tailrace_frontend_tokens_total{model="[^"]*"} 2.0$', text, re.M)
            assert re.search(
                r'^tailrace_frontend_placements_total{by="fallback",model="[^"]*"} 1.0$', text, re.M
            )
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), WAIT_S) == 0
            assert await store.get("services/frontend/f0") is None
        await store.close()


@pytest.mark.parametrize("again", [False, True], ids=["the drain is over", "a second signal"])
async def test_unfinished_streams_end_with_an_error(tmp_path: Path, again: bool) -> None:
    worker = ScriptedWorker("w0")
    async with local_etcd(tmp_path / "etcd") as etcd, FakeApiServer(tmp_path) as front, serving(worker):
        store = await Store.connect([etcd.endpoint], "default")
        await register(store, "instances/w0", msgspec.json.encode(record("w0", worker.address)))
        arguments = ("--front", "none", "--ipc", str(tmp_path), "--http", "127.0.0.1:0", "--id", "f0")
        async with front_end(etcd, *arguments, "--drain-timeout", "60" if again else "0.1") as process:
            await wait_registered(store, "f0")
            await front.ready()
            await front.add("r")
            submitted = await worker.submitted()
            worker.send(outputs(submitted, [1, 2], 0))
            process.send_signal(signal.SIGTERM)
            if again:
                assert process.stderr is not None
                while b"waiting for 1 streams" not in await process.stderr.readline():
                    pass
                process.send_signal(signal.SIGTERM)
            end = await front.end_of("r")
            assert Refusal.decode(end.stop_reason) == STOPPING
            assert await asyncio.wait_for(process.wait(), WAIT_S) == 0
        await store.close()


async def test_service_exits_with_one_line_when_the_api_server_dies(tmp_path: Path) -> None:
    async with local_etcd(tmp_path / "etcd") as etcd:
        false = tmp_path / "vllm-rs"
        false.write_text("#!/bin/sh\nexit 3\n")
        false.chmod(0o755)
        arguments = ("--front", "rust", "--vllm-rs", str(false), "--http", "127.0.0.1:0")
        async with front_end(etcd, *arguments) as process:
            assert process.stderr is not None
            log = (await asyncio.wait_for(process.stderr.read(), WAIT_S)).decode()
            assert await process.wait() == 1
            assert log.splitlines()[-1].endswith("the API server exited with status 3")


async def test_api_server_dies_with_a_killed_service(tmp_path: Path) -> None:
    async with local_etcd(tmp_path / "etcd") as etcd:
        sleeper = tmp_path / "vllm-rs"
        # First it is only asked about its flags.
        asked = 'case "$*" in *"--engine-count none"*) exit 0;; esac'
        sleeper.write_text(f"#!/bin/sh\n{asked}\necho $$ > {tmp_path}/pid\nexec sleep 600\n")
        sleeper.chmod(0o755)
        arguments = ("--front", "rust", "--vllm-rs", str(sleeper), "--http", "127.0.0.1:0")
        async with front_end(etcd, *arguments) as process:
            await eventually(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "")
            pid = int((tmp_path / "pid").read_text())
            process.kill()
            await process.wait()
            await eventually(lambda: not _is_running(pid))


async def test_taken_port_is_reported_in_one_line(tmp_path: Path) -> None:
    async with local_etcd(tmp_path / "etcd") as etcd:
        with socket.socket() as other:
            # The port is taken even by a socket that would share it.
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            other.bind(("127.0.0.1", 0))
            other.listen()
            address = f"127.0.0.1:{other.getsockname()[1]}"
            async with front_end(etcd, "--front", "none", "--http", address) as process:
                assert process.stderr is not None
                log = (await asyncio.wait_for(process.stderr.read(), WAIT_S)).decode()
                assert await process.wait() == 1
        assert log.splitlines()[-1].endswith(f"--http: cannot listen on {address}: the port is taken")
        assert "Traceback" not in log


def test_front_ends_of_one_cluster_share_the_port() -> None:
    with bind_http("127.0.0.1:0", lambda: False) as first:
        address = f"127.0.0.1:{first.getsockname()[1]}"
        # The first socket does not listen yet, so the port is free.
        with bind_http(address, lambda: False):
            pass
        first.listen()
        assert is_listening(first)
        with pytest.raises(PortTaken, match="is taken"):
            bind_http(address, lambda: False)
        with bind_http(address, lambda: True) as second:
            second.listen()
            assert second.getsockname() == first.getsockname()


def test_engine_sockets_are_private_to_their_folder(tmp_path: Path) -> None:
    with EngineSockets.bind(tmp_path) as sockets:
        assert sockets.input_address == f"ipc://{tmp_path}/in"
        assert is_listening(sockets.output)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A zombie has ended; it only waits for its new parent.
    return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
