"""The data path's streams over TLS: messages arrive unchanged, and unauthorized peers are refused."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import uvloop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tailrace.security.authority import Authority
from tailrace.security.credentials import read_credentials
from tailrace.security.roles import Identity, Role
from tailrace.security.session import TlsSession
from tailrace.security.transport import Transport
from tailrace.service.message_stream import (
    MessageStream,
    StreamAccess,
    StreamBroken,
    StreamRefused,
    connect_stream,
    serve_streams,
)
from tailrace.v1 import worker_pb2
from tests.security.conftest import EXPIRED_DAYS, transport
from tests.waiting import WAIT_S

Down = MessageStream[worker_pb2.AttachDown]
Up = MessageStream[worker_pb2.AttachUp]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no handshake end, nor a refusal be lost, because this machine is busy."""
    monkeypatch.setattr("tailrace.service.message_stream._HANDSHAKE_S", WAIT_S)
    monkeypatch.setattr("tailrace.service.message_stream._REFUSED_S", WAIT_S)


def message(content: bytes) -> worker_pb2.AttachUp:
    return worker_pb2.AttachUp(submit=worker_pb2.Submit(frames=[content]))


def refusal(reason: str) -> worker_pb2.AttachDown:
    return worker_pb2.AttachDown(refused=worker_pb2.AttachRefused(reason=reason))


@asynccontextmanager
async def echo_worker(worker: Transport) -> AsyncIterator[str]:
    """Serve a worker that sends each submission back."""

    async def serve(stream: Up) -> None:
        while (received := await stream.read()) is not None:
            await stream.write(
                worker_pb2.AttachDown(outputs=worker_pb2.StepOutputs(frames=received.submit.frames))
            )

    access = StreamAccess(worker, frozenset({Role.FRONTEND}), refusal)
    async with (
        asyncio.timeout(WAIT_S),
        serve_streams("127.0.0.1:0", worker_pb2.AttachUp, serve, access=access) as address,
    ):
        yield address


async def echo(worker: Transport, frontend: Transport, contents: list[bytes]) -> list[bytes]:
    async with echo_worker(worker) as address:
        stream = await connect_stream(address, worker_pb2.AttachDown, tls=frontend.dial(Role.WORKER))
        sending = asyncio.create_task(_send(stream, contents))
        received = [await stream.read() for _ in contents]
        await sending
        stream.close()
        return [each.outputs.frames[0] for each in received if each is not None]


async def _send(stream: Down, contents: list[bytes]) -> None:
    for content in contents:
        await stream.write(message(content))


@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.one_of(st.binary(max_size=40), st.just(b"long" * 50_000)), max_size=12))
def test_messages_arrive_whole_and_in_order(authority: Authority, contents: list[bytes]) -> None:
    worker, frontend = transport(authority, Role.WORKER), transport(authority, Role.FRONTEND)
    assert uvloop.run(echo(worker, frontend, contents)) == contents
    assert asyncio.run(echo(worker, frontend, contents)) == contents


async def test_concurrent_threads_send_whole_messages(authority: Authority) -> None:
    worker, frontend = transport(authority, Role.WORKER), transport(authority, Role.FRONTEND)
    async with echo_worker(worker) as address:
        stream = await connect_stream(address, worker_pb2.AttachDown, tls=frontend.dial(Role.WORKER))
        contents = [bytes([number]) * (1 + 900 * number) for number in range(64)]
        await asyncio.gather(*(asyncio.to_thread(stream.send, message(each)) for each in contents))
        received = [await stream.read() for _ in contents]
        assert sorted(each.outputs.frames[0] for each in received if each is not None) == sorted(contents)
        stream.close()


async def refused(worker: Transport, tls: TlsSession | None) -> str:
    """Connect and send a message that must be refused; return the reason."""
    async with echo_worker(worker) as address:
        try:
            stream = await connect_stream(address, worker_pb2.AttachDown, tls=tls)
            await stream.write(message(b"prompt"))
            answer = await stream.read()
        except StreamRefused as error:
            return str(error)
        except StreamBroken as error:
            return f"broken: {error}"
        assert answer is None or answer.HasField("refused"), answer
        stream.close()
        return "closed" if answer is None else answer.refused.reason


async def test_client_without_a_certificate_is_disconnected(authority: Authority) -> None:
    worker = transport(authority, Role.WORKER)
    assert (await refused(worker, None)).startswith(("broken", "closed"))


async def test_worker_without_tls_is_refused(authority: Authority) -> None:
    async def serve(stream: Up) -> None:
        stream.send(worker_pb2.AttachDown(heartbeat=worker_pb2.Heartbeat()))
        await stream.read()

    frontend = transport(authority, Role.FRONTEND)
    async with asyncio.timeout(WAIT_S), serve_streams("127.0.0.1:0", worker_pb2.AttachUp, serve) as address:
        with pytest.raises(StreamRefused, match="the peer does not speak TLS"):
            await connect_stream(address, worker_pb2.AttachDown, tls=frontend.dial(Role.WORKER))


@pytest.mark.parametrize("role", [Role.MONITOR, Role.SCHEDULER, Role.WORKER, Role.ADMIN, Role.TELEMETRY])
async def test_client_with_the_wrong_role_is_refused(
    authority: Authority, role: Role, caplog: pytest.LogCaptureFixture
) -> None:
    worker = transport(authority, Role.WORKER)
    reason = await refused(worker, transport(authority, role).dial(Role.WORKER))
    assert reason == f"the certificate of x has role {role.value}; this stream requires frontend"
    assert reason in caplog.text


async def test_server_with_another_role_is_not_accepted_as_a_worker(authority: Authority) -> None:
    impostor = transport(authority, Role.FRONTEND)
    reason = await refused(impostor, transport(authority, Role.FRONTEND).dial(Role.WORKER))
    assert reason.startswith("the certificate has another role") and "worker.tailrace.internal" in reason


async def test_foreign_certificate_is_reported(
    authority: Authority, foreign: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    worker = transport(authority, Role.WORKER)
    frontend = read_credentials(foreign.issue(Identity(Role.FRONTEND, "x")).folder)
    # The client trusts the worker, but not vice versa.
    frontend.client_context.load_verify_locations(cafile=authority.folder / "ca.crt")
    tls = TlsSession.client(frontend.client_context, "worker.tailrace.internal")
    reason = await refused(worker, tls)
    assert reason == "the peer does not trust the authority that signed our certificate"
    assert "the certificate is not signed by an authority trusted here" in caplog.text


async def test_expired_certificate_is_reported(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    worker = transport(authority, Role.WORKER)
    frontend = read_credentials(authority.issue(Identity(Role.FRONTEND, "x")).folder)
    expired = authority.issue(Identity(Role.FRONTEND, "x"), days=EXPIRED_DAYS).folder
    frontend.client_context.load_cert_chain(expired / "tls.crt", expired / "tls.key")
    tls = TlsSession.client(frontend.client_context, "worker.tailrace.internal")
    reason = await refused(worker, tls)
    assert reason == "the peer reports that our certificate has expired"
    assert "the certificate has expired" in caplog.text


async def test_expired_worker_certificate_is_reported(authority: Authority) -> None:
    worker = transport(authority, Role.WORKER)
    expired = authority.issue(Identity(Role.WORKER, "x"), days=EXPIRED_DAYS).folder
    worker.folder.current().server_context.load_cert_chain(expired / "tls.crt", expired / "tls.key")
    reason = await refused(worker, transport(authority, Role.FRONTEND).dial(Role.WORKER))
    assert reason == "the certificate has expired"


async def test_silent_connection_is_closed(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tailrace.service.message_stream._HANDSHAKE_S", 0.05)
    async with echo_worker(transport(authority, Role.WORKER)) as address:
        host, _, port = address.rpartition(":")
        connection = await asyncio.to_thread(socket.create_connection, (host, int(port)))
        with connection:
            assert await asyncio.to_thread(connection.recv, 1) == b""
    assert "no TLS handshake within" in caplog.text


async def test_messages_are_encrypted_on_the_wire(authority: Authority) -> None:
    worker, frontend = transport(authority, Role.WORKER), transport(authority, Role.FRONTEND)
    seen = bytearray()
    async with echo_worker(worker) as address:
        host, _, port = address.rpartition(":")

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while data := await reader.read(65536):
                seen.extend(data)
                writer.write(data)
            writer.close()

        async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            onward = await asyncio.open_connection(host, int(port))
            await asyncio.gather(relay(reader, onward[1]), relay(onward[0], writer))

        server = await asyncio.start_server(proxy, "127.0.0.1", 0)
        port_of_proxy = server.sockets[0].getsockname()[1]
        secret = b"the quick brown prompt"
        tls = frontend.dial(Role.WORKER)
        stream = await connect_stream(f"127.0.0.1:{port_of_proxy}", worker_pb2.AttachDown, tls=tls)
        await stream.write(message(secret))
        answer = await stream.read()
        assert answer is not None and answer.outputs.frames[0] == secret
        stream.close()
        server.close()
    assert len(seen) > 1000 and secret not in seen


async def test_new_certificate_is_used_on_new_streams_and_interrupts_none(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    worker, frontend = transport(authority, Role.WORKER), transport(authority, Role.FRONTEND)
    async with echo_worker(worker) as address:
        older = await connect_stream(address, worker_pb2.AttachDown, tls=frontend.dial(Role.WORKER))
        before = (worker.version, frontend.version)
        authority.supersede()
        authority.rotate()
        authority.retire()
        newer = await connect_stream(address, worker_pb2.AttachDown, tls=frontend.dial(Role.WORKER))
        assert (worker.version, frontend.version) > before
        for stream in (older, newer):
            await stream.write(message(b"still here"))
            answer = await stream.read()
            assert answer is not None and answer.outputs.frames[0] == b"still here"
            stream.close()
