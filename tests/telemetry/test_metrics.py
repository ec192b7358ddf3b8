"""The metrics endpoint over HTTP."""

import asyncio
import socket
import urllib.error
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, Counter

from tailrace.telemetry.metrics import new_registry, serve_metrics


def _get(url: str, method: str = "GET") -> tuple[int, str, str]:
    request = urllib.request.Request(url, method=method)
    with urllib.request.urlopen(request, timeout=5) as reply:
        return reply.status, reply.headers["Content-Type"], reply.read().decode()


async def test_the_endpoint_serves_the_registry() -> None:
    registry = new_registry("frontend", "f-1")
    Counter("tailrace_test_things", "Things.", registry=registry).inc(3)
    async with serve_metrics("127.0.0.1:0", registry) as server:
        status, kind, body = await asyncio.to_thread(_get, f"http://{server.address}/metrics")
    assert status == 200
    assert kind.startswith("text/plain")
    assert "tailrace_test_things_total 3.0" in body
    assert 'tailrace_build_info{id="f-1",service="frontend"' in body
    assert "process_cpu_seconds_total" in body
    # At least the task that replies.
    assert float(body.split("\ntailrace_process_tasks ")[1].split()[0]) >= 1


async def test_head_has_no_body_and_post_is_refused() -> None:
    async with serve_metrics("127.0.0.1:0", CollectorRegistry()) as server:
        url = f"http://{server.address}/metrics"
        assert (await asyncio.to_thread(_get, url, "HEAD"))[2] == ""
        with pytest.raises(urllib.error.HTTPError, match="405"):
            await asyncio.to_thread(_get, url, "POST")


async def test_a_closed_server_frees_its_port() -> None:
    server = serve_metrics("127.0.0.1:0", CollectorRegistry())
    address = server.address
    await asyncio.to_thread(_get, f"http://{address}/metrics")
    await server.close()
    again = serve_metrics(address, CollectorRegistry())
    assert again.address == address
    await again.close()


async def test_malformed_requests_are_disconnected() -> None:
    async with serve_metrics("127.0.0.1:0", CollectorRegistry()) as server:
        host, port = server.address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"nonsense\r\n\r\n")
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()
        await asyncio.to_thread(_get, f"http://{server.address}/metrics")


async def test_invalid_addresses() -> None:
    with pytest.raises(ValueError, match="HOST:PORT"):
        serve_metrics("localhost", CollectorRegistry())
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError):
        serve_metrics(f"127.0.0.1:{taken.getsockname()[1]}", CollectorRegistry())
