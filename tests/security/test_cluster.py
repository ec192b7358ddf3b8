"""A whole cluster with certificates: who is not in it gets nowhere, and new certificates disturb nobody."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from benchmarks.loadgen import completion_request, run_streams
from benchmarks.strangers.calls import call_all, http_get
from benchmarks.strangers.cluster import listening_ports
from benchmarks.strangers.sniffer import Sniffer
from tailrace.local.state import RunFolder, RunState
from tailrace.security.access import METHODS
from tailrace.security.authority import Authority
from tailrace.security.credentials import read_credentials
from tailrace.security.roles import Identity, Role, server_name
from tests.ports import free_port

pytestmark = pytest.mark.fleet

_FRONT = "rust" if (Path(sys.executable).parent / "vllm-rs").exists() else "python"
_UP_S = 120.0
_STREAMS = 50


@dataclass
class Cluster:
    """`tailrace up --tls`."""

    folder: Path
    http_port: int

    @property
    def state(self) -> RunState:
        """As it is now: parts are restarted."""
        state = RunFolder(self.folder / ".run").read()
        assert state is not None
        return state

    @property
    def authority(self) -> Authority:
        return Authority.load(Path(self.state.certificates))

    def tailrace(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return _tailrace(self.folder, *arguments)

    def listening_ports(self) -> dict[int, str]:
        """Return every TCP port of the cluster, and the part that listens there."""
        return listening_ports(self.state)

    async def streams(self, prompts: Sequence[str], tokens: int) -> list[str]:
        """Errors of so many streams at once."""
        url = f"http://127.0.0.1:{self.http_port}"
        requests = [completion_request(url, "tiny", prompt, tokens) for prompt in prompts]
        results = await run_streams(url, requests)
        short = [f"{r.tokens} of {tokens} tokens" for r in results if not r.error and r.tokens != tokens]
        return [r.error for r in results if r.error] + short


def _tailrace(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {n: v for n, v in os.environ.items() if not n.startswith(("TAILRACE_", "OTEL_"))}
    return subprocess.run(
        [sys.executable, "-m", "tailrace", *arguments],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_UP_S,
    )


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    port = free_port()
    options = ("--tls", "--engine", "simulated", "--workers", "2", "--front", _FRONT, "--port", str(port))
    try:
        done = _tailrace(folder, "up", *options)
        assert done.returncode == 0, done.stderr
        yield Cluster(folder, port)
    finally:
        _tailrace(folder, "down")


def test_whoever_started_it_is_its_operator(cluster: Cluster) -> None:
    listed = json.loads(cluster.tailrace("get", "instances", "-o", "json").stdout)["instances"]
    assert [each["state"] for each in listed] == ["active", "active"]
    assert cluster.tailrace("set", "slo", "ttft=3").returncode == 0
    told = (cluster.folder / ".run" / "logs" / "scheduler.log").read_text()
    assert '"who":"admin/local"' in told and '"what":"SetSlo"' in told


def test_a_viewer_looks_and_does_not_change(cluster: Cluster) -> None:
    own = str(cluster.authority.issue(Identity(Role.VIEWER, "v")).folder)
    assert "ttft" in cluster.tailrace("get", "slo", "--tls", own).stdout
    refused = cluster.tailrace("set", "slo", "ttft=9", "--tls", own)
    assert refused.returncode == 1
    assert "the certificate of v has role viewer; /tailrace.v1.Admin/SetSlo requires admin" in refused.stderr


def test_the_wrong_certificate_is_told(cluster: Cluster, tmp_path: Path) -> None:
    admin = ("get", "slo", "--admin", cluster.state.admin)
    without = cluster.tailrace(*admin)
    assert without.returncode == 3 and "does it require a certificate? (--tls)" in without.stderr
    foreign = Authority.create(tmp_path / "foreign").issue(Identity(Role.ADMIN, "x")).folder
    other = cluster.tailrace(*admin, "--tls", str(foreign))
    assert other.returncode == 3 and "not signed by an authority trusted here" in other.stderr
    member = cluster.authority.issue(Identity(Role.WORKER, "x")).folder
    refused = cluster.tailrace(*admin, "--tls", str(member))
    assert (
        refused.returncode == 1 and "its role is worker; admin or viewer is required here" in refused.stderr
    )
    assert cluster.tailrace("certs", "rotate", "--dir", cluster.state.certificates).returncode == 0


@pytest.mark.slow
async def test_new_certificates_and_a_new_authority_break_nothing(cluster: Cluster) -> None:
    """Fifty streams are under way all the time; others begin after each step."""
    over = asyncio.Event()

    async def keep_streaming() -> list[str]:
        errors: list[str] = []
        while not over.is_set():
            errors += await cluster.streams([f"long {n}" for n in range(_STREAMS)], 1000)
        return errors

    long = asyncio.create_task(keep_streaming())
    steps = ("rotate", "new-authority", "rotate", "retire-authority", "rotate")
    for step in steps:
        done = await asyncio.to_thread(cluster.tailrace, "certs", step, "--dir", cluster.state.certificates)
        assert done.returncode == 0, done.stderr
        if step == "new-authority":
            # It reads the authorities that it trusts at its start alone.
            restarted = await asyncio.to_thread(cluster.tailrace, "restart", "etcd")
            assert restarted.returncode == 0, restarted.stderr
        assert await cluster.streams([f"{step} {n}" for n in range(5)], 20) == []
    over.set()
    assert await long == []
    listed = json.loads(cluster.tailrace("get", "instances", "-o", "json").stdout)["instances"]
    assert [each["state"] for each in listed] == ["active", "active"]
    # A part that comes back meets the new ones.
    restarted = cluster.tailrace("restart", "worker-1", "migration")
    assert restarted.returncode == 0, restarted.stderr
    assert await cluster.streams([f"after {n}" for n in range(5)], 20) == []


async def test_nothing_of_a_prompt_can_be_read_on_the_links(cluster: Cluster) -> None:
    secret = "sesame opens this very door"
    try:
        sniffer = Sniffer(frozenset({cluster.http_port}))
    except PermissionError:
        pytest.skip("may not capture packets here")
    with sniffer:
        assert await cluster.streams([secret] * 5, 50) == []
        # That it does see what is in the clear. Tokens of the tiny model are bytes: it would be the same.
        with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as client:
            client.connect(server.getsockname())
            client.sendall(b"over: " + secret[::-1].encode())
            await asyncio.to_thread(sniffer.wait_for, secret[::-1].encode())
    assert len(sniffer.captured_bytes) > 10_000
    assert secret.encode() not in sniffer.captured_bytes


def test_every_port_and_every_method_refuses_whoever_has_no_certificate(cluster: Cluster) -> None:
    ports = cluster.listening_ports()
    assert len(ports) >= 2 * 6 + 2
    exempt = _in_the_clear(cluster)
    authorities = (Path(cluster.state.certificates) / "ca.crt").read_bytes()
    for port, part in ports.items():
        if port in exempt:
            continue
        for credentials in (None, grpc.ssl_channel_credentials(authorities)):
            ends = call_all("127.0.0.1", port, credentials)
            assert set(ends.values()) <= {"UNAVAILABLE", "DEADLINE_EXCEEDED"}, (part, port, ends)
        assert "200" not in http_get("127.0.0.1", port, "/metrics"), (part, port)


@pytest.mark.parametrize("role", [Role.WORKER, Role.TELEMETRY, Role.VIEWER])
def test_a_member_of_another_role_gets_no_further(cluster: Cluster, role: Role) -> None:
    own = read_credentials(cluster.authority.issue(Identity(role, "intruder")).folder)
    exempt = _in_the_clear(cluster)
    answered: dict[str, int] = {}
    for port, part in cluster.listening_ports().items():
        kind = part.partition("-")[0]
        if port in exempt or kind == "etcd":
            continue
        for method, code in call_all("127.0.0.1", port, own.for_channels(), server_name(Role(kind))).items():
            if role in METHODS[method]:
                continue
            # Not served there, or refused; on a port that is not gRPC's, nothing at all.
            allowed = {"PERMISSION_DENIED", "UNIMPLEMENTED", "UNAVAILABLE", "DEADLINE_EXCEEDED"}
            assert code in allowed, (part, port, method, code)
            answered[code] = answered.get(code, 0) + 1
    assert answered["PERMISSION_DENIED"] > 20


def _in_the_clear(cluster: Cluster) -> set[int]:
    """Ports that are meant to be: for users, etcd's health on loopback; and KV transfer, which UCX does."""
    etcd = next(part for part in cluster.state.parts if part.name == "etcd")
    assert etcd.spec is not None
    health = int(etcd.spec.address.rpartition(":")[2])
    named = {cluster.http_port, health}
    for port, part in cluster.listening_ports().items():
        if part.startswith("worker") and not _speaks_tls(port):
            named.add(port)
    return named


def _speaks_tls(port: int) -> bool:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with socket.create_connection(("127.0.0.1", port), 2) as connection:
            context.wrap_socket(connection).close()
    except OSError:
        return False
    return True
