"""A whole cluster with certificates: outsiders are refused, and certificate rotation disturbs no one."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
import pytest

from tailrace.security.access import METHODS
from tailrace.security.authority import Authority
from tailrace.security.credentials import read_credentials
from tailrace.security.roles import Identity, Role, server_name
from tests.harness.loadgen import completion_request, run_streams
from tests.harness.processes import wait_until
from tests.harness.working_folder import WorkingFolder
from tests.strangers.calls import call_all, http_get
from tests.strangers.cluster import listening_ports
from tests.strangers.sniffer import Sniffer
from tests.waiting import WAIT_S

pytestmark = pytest.mark.fleet

_STREAMS = 50


class Cluster(WorkingFolder):
    """A cluster started by `tailrace up --tls`."""

    @property
    def authority(self) -> Authority:
        return Authority.load(Path(self.state().certificates))

    def listening_ports(self) -> dict[int, str]:
        """Return every TCP port of the cluster, and the part that listens there."""
        return listening_ports(self.state())

    def active(self) -> bool:
        """Return whether both workers are active: on a busy machine a report can be late."""
        listed = self.tailrace("get", "instances", "-o", "json").stdout
        return bool(listed) and [each["state"] for each in json.loads(listed)["instances"]] == ["active"] * 2

    async def streams(self, prompts: Sequence[str], tokens: int) -> list[str]:
        """Run streams concurrently and return their errors."""
        url = f"http://127.0.0.1:{self.port}"
        requests = [completion_request(url, "tiny", prompt, tokens) for prompt in prompts]
        results = await run_streams(url, requests)
        short = [f"{r.tokens} of {tokens} tokens" for r in results if not r.error and r.tokens != tokens]
        return [r.error for r in results if r.error] + short


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    place = Cluster(tmp_path_factory.mktemp("cluster"))
    try:
        result = place.up("--tls", "--workers", "2")
        assert result.returncode == 0, result.stderr
        yield place
    finally:
        place.tailrace("down")


def test_user_who_started_the_cluster_is_its_operator(cluster: Cluster) -> None:
    wait_until(cluster.active, "both workers to be active")
    assert cluster.tailrace("set", "slo", "ttft=3").returncode == 0
    log = (cluster.folder.logs / "scheduler.log").read_text()
    assert '"who":"admin/local"' in log and '"what":"SetSlo"' in log


def test_viewer_can_read_but_not_change(cluster: Cluster) -> None:
    own = str(cluster.authority.issue(Identity(Role.VIEWER, "v")).folder)
    assert "ttft" in cluster.tailrace("get", "slo", "--tls", own).stdout
    refused = cluster.tailrace("set", "slo", "ttft=9", "--tls", own)
    assert refused.returncode == 1
    assert "the certificate of v has role viewer; /tailrace.v1.Admin/SetSlo requires admin" in refused.stderr


def test_wrong_certificate_is_explained(cluster: Cluster, tmp_path: Path) -> None:
    admin = ("get", "slo", "--admin", cluster.state().admin)
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
    assert cluster.tailrace("certs", "rotate", "--dir", cluster.state().certificates).returncode == 0


async def test_etcd_can_be_restarted(cluster: Cluster) -> None:
    restarted = await asyncio.to_thread(cluster.tailrace, "restart", "etcd")
    assert restarted.returncode == 0, restarted.stderr
    assert await cluster.streams(["after etcd"], 20) == []


@pytest.mark.slow
async def test_rotation_of_certificates_and_authority_breaks_no_stream(cluster: Cluster) -> None:
    """Fifty streams are running all the time; others begin after each step."""
    stopped = asyncio.Event()

    async def keep_streaming() -> list[str]:
        errors: list[str] = []
        while not stopped.is_set():
            errors += await cluster.streams([f"long {n}" for n in range(_STREAMS)], 1000)
        return errors

    long = asyncio.create_task(keep_streaming())
    steps = ("rotate", "new-authority", "rotate", "retire-authority", "rotate")
    for step in steps:
        result = await asyncio.to_thread(
            cluster.tailrace, "certs", step, "--dir", cluster.state().certificates
        )
        assert result.returncode == 0, result.stderr
        if step == "new-authority":
            # etcd reads its trusted authorities only at startup.
            restarted = await asyncio.to_thread(cluster.tailrace, "restart", "etcd")
            assert restarted.returncode == 0, restarted.stderr
        assert await cluster.streams([f"{step} {n}" for n in range(5)], 20) == []
    stopped.set()
    assert await long == []
    await asyncio.to_thread(wait_until, cluster.active, "both workers to be active")
    # Restarted parts use the new certificates.
    restarted = cluster.tailrace("restart", "worker-1", "migration")
    assert restarted.returncode == 0, restarted.stderr
    assert await cluster.streams([f"after {n}" for n in range(5)], 20) == []


async def test_prompts_are_encrypted_on_all_links(cluster: Cluster) -> None:
    secret = "sesame opens this very door"
    try:
        sniffer = Sniffer(frozenset({cluster.port}))
    except PermissionError:
        pytest.skip("no permission to capture packets")
    with sniffer:
        assert await cluster.streams([secret] * 5, 50) == []
        # Prove that the sniffer sees plain text. The tiny model's tokens are bytes and would look the same.
        with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as client:
            client.connect(server.getsockname())
            client.sendall(b"over: " + secret[::-1].encode())
            await asyncio.to_thread(sniffer.wait_for, secret[::-1].encode())
    assert len(sniffer.captured_bytes) > 10_000
    assert secret.encode() not in sniffer.captured_bytes


def test_every_port_and_method_refuses_callers_without_a_certificate(cluster: Cluster) -> None:
    ports = cluster.listening_ports()
    assert len(ports) >= 2 * 6 + 2
    exempt = _plain_text_ports(cluster)
    authorities = (Path(cluster.state().certificates) / "ca.crt").read_bytes()
    for port, part in ports.items():
        if port in exempt:
            continue
        for credentials in (None, grpc.ssl_channel_credentials(authorities)):
            ends = call_all("127.0.0.1", port, credentials)
            assert set(ends.values()) <= {"UNAVAILABLE", "DEADLINE_EXCEEDED"}, (part, port, ends)
        assert "200" not in http_get("127.0.0.1", port, "/metrics"), (part, port)


@pytest.mark.parametrize("role", [Role.WORKER, Role.TELEMETRY, Role.VIEWER])
def test_member_with_another_role_is_refused(cluster: Cluster, role: Role) -> None:
    own = read_credentials(cluster.authority.issue(Identity(role, "intruder")).folder)
    exempt = _plain_text_ports(cluster)
    counts: dict[str, int] = {}
    for port, part in cluster.listening_ports().items():
        kind = part.partition("-")[0]
        if port in exempt or kind == "etcd":
            continue
        for method, code in call_all("127.0.0.1", port, own.for_channels(), server_name(Role(kind))).items():
            if role in METHODS[method]:
                continue
            # Unimplemented or denied; on a port without gRPC, no response at all.
            allowed = {"PERMISSION_DENIED", "UNIMPLEMENTED", "UNAVAILABLE", "DEADLINE_EXCEEDED"}
            assert code in allowed, (part, port, method, code)
            counts[code] = counts.get(code, 0) + 1
    assert counts["PERMISSION_DENIED"] > 20


def test_the_console_shows_nothing_without_its_token(cluster: Cluster) -> None:
    port = _port_of(cluster, "console")
    _wait_for_listener(port)
    for path in ("/api/events", "/api/policies"):
        assert "401" in http_get("127.0.0.1", port, path, WAIT_S)


def _port_of(cluster: Cluster, name: str) -> int:
    """Return the port of a part's address."""
    part = next(part for part in cluster.state().parts if part.name == name)
    return int(part.spec.address.rpartition(":")[2])


def _wait_for_listener(port: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 2).close()
            return
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.1)


def _plain_text_ports(cluster: Cluster) -> set[int]:
    """Return the intentionally unencrypted ports: HTTP for users, the console and etcd's health on loopback,
    UCX transfer."""
    exempt_ports = {cluster.port, _port_of(cluster, "etcd"), _port_of(cluster, "console")}
    for port, part in cluster.listening_ports().items():
        if part.startswith("worker") and not _speaks_tls(port):
            exempt_ports.add(port)
    return exempt_ports


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
