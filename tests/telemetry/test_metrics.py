"""The metrics endpoint over HTTP."""

import asyncio
import itertools
import socket
import urllib.error
import urllib.request
from http import HTTPStatus
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge

from tailrace.telemetry.metrics import new_registry, serve_metrics
from tests.counting import failures_of
from tests.waiting import WAIT_S


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no request end because this machine is busy."""
    monkeypatch.setattr("tailrace.telemetry.metrics._REQUEST_TIMEOUT_S", WAIT_S)


def _get(url: str, method: str = "GET") -> tuple[int, str, str]:
    request = urllib.request.Request(url, method=method)
    with urllib.request.urlopen(request, timeout=WAIT_S) as reply:
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


async def test_a_metric_that_cannot_be_collected_does_not_break_the_scrape() -> None:
    registry = new_registry("frontend", "f-1")
    Gauge("tailrace_test_broken", "Raises.", registry=registry).set_function(lambda: 1 / 0)
    Counter("tailrace_test_things", "Things.", registry=registry).inc(3)
    before = failures_of("metrics")
    async with serve_metrics("127.0.0.1:0", registry) as server:
        for _ in range(2):
            status, _, body = await asyncio.to_thread(_get, f"http://{server.address}/metrics")
            assert status == 200
            assert "tailrace_test_things_total 3.0" in body
            assert "tailrace_test_broken" not in body
    assert 'tailrace_loop_failures_total{loop="metrics"}' in body
    assert failures_of("metrics") == before + 2


async def test_pages_beside_the_metrics() -> None:
    pages = {"/ready": lambda: (HTTPStatus.SERVICE_UNAVAILABLE, "application/json", b"{}")}
    async with serve_metrics("127.0.0.1:0", CollectorRegistry(), pages=pages) as server:
        for path in ("/ready", "/ready?verbose"):
            with pytest.raises(urllib.error.HTTPError, match="503") as unready:
                await asyncio.to_thread(_get, f"http://{server.address}{path}")
            assert unready.value.read() == b"{}"
            unready.value.close()
        assert (await asyncio.to_thread(_get, f"http://{server.address}/metrics"))[0] == 200


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
        assert await asyncio.wait_for(reader.read(), WAIT_S) == b""
        writer.close()
        await asyncio.to_thread(_get, f"http://{server.address}/metrics")


async def test_invalid_addresses() -> None:
    with pytest.raises(ValueError, match="HOST:PORT"):
        serve_metrics("localhost", CollectorRegistry())
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError):
        serve_metrics(f"127.0.0.1:{taken.getsockname()[1]}", CollectorRegistry())


async def test_a_server_that_fails_is_counted_and_serves_again(monkeypatch: pytest.MonkeyPatch) -> None:
    start, attempts = asyncio.start_server, itertools.count()

    async def fail_first(*args: Any, **options: Any) -> asyncio.Server:
        if next(attempts) == 0:
            raise RuntimeError("nobody foresaw this")
        return await start(*args, **options)

    monkeypatch.setattr(asyncio, "start_server", fail_first)
    before = failures_of("metrics server")
    async with serve_metrics("127.0.0.1:0", new_registry("frontend", "f-1")) as server:
        status, _, body = await asyncio.to_thread(_get, f"http://{server.address}/metrics")
    assert status == 200
    assert failures_of("metrics server") == before + 1
    assert 'tailrace_loop_failures_total{loop="metrics server"}' in body


async def test_a_server_that_never_started_closes_without_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*args: Any, **options: Any) -> asyncio.Server:
        raise RuntimeError("nobody foresaw this")

    monkeypatch.setattr(asyncio, "start_server", fail)
    before = failures_of("metrics server")
    async with serve_metrics("127.0.0.1:0", CollectorRegistry()) as server, asyncio.timeout(WAIT_S):
        while failures_of("metrics server") == before:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    monkeypatch.undo()
    async with serve_metrics(server.address, CollectorRegistry()):
        assert (await asyncio.to_thread(_get, f"http://{server.address}/metrics"))[0] == 200
