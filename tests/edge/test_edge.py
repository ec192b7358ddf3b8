"""Two models behind one address: real etcd, control plane, API servers and proxy; simulated engines."""

from __future__ import annotations

import asyncio
import http.client
import json
import shutil
import socket
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
import openai
import psutil
import pytest
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client import CollectorRegistry

from edge_svc.configuration import MODEL_CHOICE, Bounds
from edge_svc.directory import Directory
from edge_svc.main import _resolved
from edge_svc.web import Answers
from tailrace.security.authority import Authority
from tailrace.security.roles import Identity, Role
from tailrace.tenancy.keys import Tenant, TenantKeys
from tailrace.tiny import MODEL_PATH
from tailrace.v1 import admin_pb2
from tests.e2e.conftest import RUST_FRONT
from tests.harness.chats import client
from tests.harness.fleet import Fleet
from tests.harness.processes import wait_until
from tests.waiting import WAIT_S

pytestmark = [
    pytest.mark.fleet,
    pytest.mark.skipif(not RUST_FRONT.exists(), reason="no vllm-rs"),
]

MODELS = ("first", "second")
PREFLIGHT = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two models of other weights, a worker and a front end each, and an edge."""
    root = tmp_path_factory.mktemp("edge")
    fleet = Fleet(root, "simulated")
    other = Path(shutil.copytree(MODEL_PATH, root / "other"))
    (other / "model.safetensors").unlink()
    try:
        fleet.start_control()
        for name, path in zip(MODELS, (MODEL_PATH, other), strict=True):
            seeded = ["--sim", "weights_seed=1"] if path is other else []
            fleet.start_worker(f"w-{name}", seeded, wait=False, model=str(path))
            start_front_end(fleet, name, str(path))
        fleet.wait_instances([f"w-{name}" for name in MODELS])
        fleet.start_edge(options=["--max-body-bytes", "65536"])
        yield fleet
    finally:
        fleet.close()


def start_front_end(fleet: Fleet, name: str, path: str) -> None:
    """Start the front end of the model that users know as `name`."""
    options = ["--served-model-name", name, "--place-wait", "5"]
    options += ["--allowed-origins", json.dumps([PREFLIGHT["Origin"]])]
    fleet.start_frontend("rust", f"frontend-{name}", model=path, options=options)


def edge_url(fleet: Fleet) -> str:
    """Return the URL of the edge."""
    return fleet.urls["edge"]


def stream(api: openai.OpenAI, model: str, tokens: int = 32) -> openai.Stream[Any]:
    """Begin a stream."""
    return api.completions.create(
        model=model, prompt="hello", max_tokens=tokens, temperature=0, stream=True,
        extra_body={"min_tokens": tokens},
    )  # fmt: skip


def text(chunks: Any) -> str:
    """Return the text of a stream."""
    return "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)


def call(
    url: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None, method: str = ""
) -> tuple[int, Any]:
    """Return status and JSON of a request."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=WAIT_S)
    try:
        sent = {"content-type": "application/json", **(headers or {})}
        connection.request(method or ("POST" if body else "GET"), path, body or None, sent)
        reply = connection.getresponse()
        content = reply.read()
        return reply.status, json.loads(content) if content else None
    finally:
        connection.close()


def test_each_model_answers_at_one_address(fleet: Fleet) -> None:
    api = client(edge_url(fleet))
    through = {model: text(stream(api, model)) for model in MODELS}
    direct = {model: text(stream(client(fleet.urls[f"frontend-{model}"]), model)) for model in MODELS}
    assert through == direct
    assert through["first"] != through["second"]
    assert [each.id for each in api.models.list()] == [*MODELS]


def test_the_state_of_a_models_api_server(fleet: Fleet) -> None:
    reply = httpx.get(f"{edge_url(fleet)}/metrics", params={"model": "first"}, timeout=WAIT_S)
    assert reply.status_code == 200
    assert 'model_name="first"' in reply.text
    assert call(edge_url(fleet), "/version?model=first")[0] == 200


def test_the_context_of_each_model_is_told(fleet: Fleet) -> None:
    def contexts() -> list[int]:
        data = call(edge_url(fleet), "/v1/models")[1]["data"]
        return [each.get("max_model_len", 0) for each in data]

    direct = httpx.get(f"{fleet.urls['frontend-first']}/v1/models", timeout=WAIT_S).json()["data"][0]
    wait_until(lambda: contexts() == [direct["max_model_len"]] * 2, "front ends to tell their contexts")


async def test_an_edge_listens_on_the_address_of_a_name() -> None:
    assert await _resolved("localhost:8000") == "127.0.0.1:8000"
    assert await _resolved("[::1]:8000") == "[::1]:8000"


def test_a_model_that_is_not_there(fleet: Fleet) -> None:
    status, reply = call(edge_url(fleet), "/v1/completions", b'{"model": "third", "prompt": "x"}')
    assert status == 404
    assert reply["error"] == {
        "message": "The model `third` does not exist.",
        "type": "NotFoundError",
        "param": "model",
        "code": 404,
    }
    status, reply = call(edge_url(fleet), "/v1/completions", b'{"prompt": "x"}')
    assert status == 400
    assert "name one in the field model" in reply["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "status", "problem"),
    [
        ("/v1/completions", b'{"model": "first"', 400, "The body"),
        ("/v1/completions", b'{"model": 7}', 400, "model"),
        (
            "/v1/completions",
            b'{"model": "first", "a": ' + b"[" * 20_000 + b"]" * 20_000 + b"}",
            400,
            "The body",
        ),
        ("/v1/completions", b'{"model": "\xff"}', 400, "The body"),
        ("/v1/completions?model=" + "a" * 20_000, b'{"prompt": "x"}', 404, "does not exist"),
        ("/v1/models", b"{}", 405, "Method Not Allowed"),
        ("/v1/completions", b'{"model": "' + b"a" * 70_000 + b'"}', 413, "larger than 65536 bytes"),
        ("/server_info", b"", 404, "not served here"),
        ("/metrics", b"", 400, "name one in the field model"),
        ("/reset_prefix_cache", b'{"model": "first"}', 404, "not served here"),
        ("/edge/model/v1/models", b"", 404, "not served here"),
    ],
)
def test_what_is_refused(fleet: Fleet, path: str, body: bytes, status: int, problem: str) -> None:
    got, reply = call(edge_url(fleet), path, body)
    assert got == status
    assert problem in reply["error"]["message"]
    assert reply["error"]["code"] == status


def test_a_page_in_a_browser_may_ask(fleet: Fleet) -> None:
    # A request of its origin may come next, if the front end's --allowed-origins has it.
    reply = httpx.options(f"{edge_url(fleet)}/v1/completions", headers=PREFLIGHT, timeout=WAIT_S)
    assert reply.status_code == 200
    assert reply.headers["access-control-allow-origin"] == PREFLIGHT["Origin"]


def test_a_long_name_is_not_sent_back(fleet: Fleet) -> None:
    body = b'{"model": "' + b"a" * 60_000 + b'"}'
    status, reply = call(edge_url(fleet), "/v1/completions", body)
    assert status == 404
    assert len(reply["error"]["message"]) < 300


def test_bodies_that_are_read_together_have_a_bound() -> None:
    directory = Directory({}, ())
    bounds = Bounds(max_bodies_bytes=1 << 20)
    answers = Answers(lambda: directory, None, bounds, CollectorRegistry())

    async def run() -> list[int]:
        server: TestServer = TestServer(answers.app())
        async with server, TestClient(server) as api:
            path = f"{MODEL_CHOICE}/v1/completions"
            statuses = []
            for size in (2 << 20, 1 << 10):
                async with api.post(path, data=b"x" * size) as reply:
                    statuses.append(reply.status)
            return statuses

    assert asyncio.run(run()) == [429, 400]


def test_large_headers(fleet: Fleet) -> None:
    headers = {"x-much": "a" * 100_000}
    status, reply = call(edge_url(fleet), "/v1/completions", b'{"model": "first"}', headers)
    assert status == 431
    assert reply["error"]["code"] == 431


def test_a_client_cannot_choose_the_cluster(fleet: Fleet) -> None:
    headers = {"x-tailrace-cluster": "edge"}
    body = b'{"model": "first", "prompt": "x", "max_tokens": 1}'
    status, reply = call(edge_url(fleet), "/v1/completions", body, headers)
    assert status == 200
    assert reply["model"] == "first"


def test_a_stream_goes_on_while_front_ends_come_and_go(fleet: Fleet) -> None:
    api = client(edge_url(fleet))
    expected = text(stream(api, "first", 400))
    begun, received = threading.Event(), []

    def read() -> None:
        for chunk in stream(api, "first", 400):
            received.append(chunk)
            begun.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(WAIT_S)
    # Its own front end finishes the stream, and is away for new ones at once.
    stopping = threading.Thread(target=fleet.processes["frontend-first"].stop)
    stopping.start()
    away = b'{"model": "first"}'
    wait_until(lambda: call(edge_url(fleet), "/v1/completions", away)[0] == 503, "it to be away")
    assert text(stream(api, "second", 8))
    reader.join(WAIT_S)
    stopping.join(WAIT_S)
    assert text(received) == expected
    fleet.restart("frontend-first")
    body = b'{"model": "first", "prompt": "x", "max_tokens": 1}'
    wait_until(lambda: call(edge_url(fleet), "/v1/completions", body)[0] == 200, "it to be back")


def test_strangers_are_refused_before_their_body(fleet: Fleet, tmp_path: Path) -> None:
    keys = TenantKeys(tenants=(Tenant(name="a", models=("second",)),))
    keys, key = keys.with_key("a", "now")
    file = tmp_path / "keys.json"
    file.write_bytes(msgspec.json.encode(keys))
    fleet.start_edge("edge-keys", options=["--api-keys", str(file)])
    url = fleet.urls["edge-keys"]
    mine = {"authorization": f"Bearer {key}"}
    try:
        for path, body in (("/v1/completions", b"not json"), ("/v1/models", b"")):
            for headers in (
                {},
                {"authorization": "Bearer sk-tailrace-0-0"},
                {"authorization": f"Basic {key}"},
            ):
                status, reply = call(url, path, body, headers)
                assert status == 401
                assert "valid key" in reply["error"]["message"]
        assert [each["id"] for each in call(url, "/v1/models", b"", mine)[1]["data"]] == ["second"]
        body = b'{"model": "second", "prompt": "x", "max_tokens": 1}'
        assert call(url, "/v1/completions", body, mine)[0] == 200
        # A browser has none when it asks whether a page may send it.
        reply = httpx.options(f"{url}/v1/completions", headers=PREFLIGHT, timeout=WAIT_S)
        assert reply.status_code == 200
        # Its body is not waited for, of which the edge would read all.
        with socket.create_connection((urlsplit(url).hostname, urlsplit(url).port), WAIT_S) as asking:
            fields = "".join(f"{name}: {value}\r\n" for name, value in PREFLIGHT.items())
            head = f"OPTIONS /v1/completions HTTP/1.1\r\nHost: x\r\n{fields}Content-Length: 9\r\n\r\n"
            asking.sendall(head.encode())
            assert asking.recv(64).startswith(b"HTTP/1.1 200")
        # Nor have probes.
        assert call(url, "/ready")[0] == 200
    finally:
        fleet.processes["edge-keys"].stop()
        fleet.forget("edge-keys")


def test_unready_while_no_model_takes_requests(fleet: Fleet) -> None:
    """One model that takes requests is enough: a load balancer does not know which one a request names."""
    edge = edge_url(fleet)

    def drain(*models: str, undo: bool = False) -> None:
        for model in models:
            request = admin_pb2.DrainRequest(instance_id=f"w-{model}", undrain=undo)
            list(fleet.admin().Drain(request, timeout=WAIT_S))

    def wait_for(status: int) -> None:
        wait_until(lambda: call(edge, "/ready")[0] == status, f"/ready to answer {status}", WAIT_S)

    first, second = MODELS
    try:
        drain(first)
        front_end = f"http://127.0.0.1:{fleet.metrics_ports[f'frontend-{first}']}"
        wait_until(lambda: call(front_end, "/ready")[0] == 503, "the front end to be unready", WAIT_S)
        wait_for(200)
        drain(second)
        wait_for(503)
        assert "No instance" in call(edge, "/ready")[1]["error"]["message"]
        assert call(edge, "/health")[0] == 200
    finally:
        drain(*MODELS, undo=True)
    wait_for(200)


def test_an_edge_that_stops_finishes_its_streams(fleet: Fleet) -> None:
    fleet.start_edge("edge-stops")
    url = fleet.urls["edge-stops"]
    begun, received = threading.Event(), []

    def read() -> None:
        for chunk in stream(client(url), "first", 300):
            received.append(chunk)
            begun.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(WAIT_S)
    assert fleet.processes["edge-stops"].stop() == 0
    reader.join(WAIT_S)
    assert text(received) == text(stream(client(edge_url(fleet)), "first", 300))
    fleet.forget("edge-stops")


def test_a_body_that_does_not_come(fleet: Fleet) -> None:
    fleet.start_edge("edge-bodies", options=["--body-timeout", "1"])
    try:
        url = urlsplit(fleet.urls["edge-bodies"])
        with socket.create_connection((url.hostname, url.port), timeout=WAIT_S) as stalled:
            stalled.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                b"Content-Length: 100\r\nConnection: close\r\n\r\n{"
            )
            reply = b"".join(iter(lambda: stalled.recv(65_536), b""))
        assert reply.startswith(b"HTTP/1.1 408 ")
        assert b"did not arrive within 1 seconds" in reply
    finally:
        fleet.processes["edge-bodies"].stop()
        fleet.forget("edge-bodies")


def test_http_2_and_many_streams_at_once(fleet: Fleet) -> None:
    """HTTP/2 without TLS, as load balancers speak it."""
    with httpx.Client(http1=False, http2=True, timeout=WAIT_S) as api:
        body = {"model": "second", "prompt": "x", "max_tokens": 4}
        replies = [api.post(f"{edge_url(fleet)}/v1/completions", json=body) for _ in range(8)]
    assert [(reply.status_code, reply.http_version) for reply in replies] == [(200, "HTTP/2")] * 8


def shown_certificate(url: str) -> bytes:
    """Return what a new connection is shown, as DER."""
    address = urlsplit(url)
    assert address.hostname is not None and address.port is not None
    return ssl.PEM_cert_to_DER_cert(
        ssl.get_server_certificate((address.hostname, address.port), timeout=WAIT_S)
    )


def test_https(fleet: Fleet, tmp_path: Path) -> None:
    authority = Authority.create(tmp_path / "certs")
    authority.issue(Identity(Role.EDGE, "edge"), hosts=["127.0.0.1"])
    folder = tmp_path / "certs" / "issued" / "edge" / "edge"
    certificate, key = folder / "tls.crt", folder / "tls.key"
    fleet.start_edge("edge-https", options=["--ssl-certfile", str(certificate), "--ssl-keyfile", str(key)])
    try:
        url = fleet.urls["edge-https"].replace("http:", "https:")
        address = urlsplit(url)
        silent = socket.create_connection((address.hostname, address.port), timeout=WAIT_S)
        trusted = ssl.create_default_context(cafile=str(folder / "ca.crt"))
        with httpx.Client(verify=trusted, timeout=WAIT_S) as api:
            body = {"model": "first", "prompt": "x", "max_tokens": 4}
            assert api.post(f"{url}/v1/completions", json=body).status_code == 200
            shown = shown_certificate(url)
            authority.rotate()
            wait_until(lambda: shown_certificate(url) != shown, "the new certificate to be shown")
            assert ssl.PEM_cert_to_DER_cert(certificate.read_text()) == shown_certificate(url)
            # A connection of before stays.
            assert api.post(f"{url}/v1/completions", json=body).status_code == 200
        with silent:
            assert silent.recv(1) == b"", "a client without a handshake must not stay"
    finally:
        fleet.processes["edge-https"].stop()
        fleet.forget("edge-https")


def test_when_the_proxy_ends_the_edge_ends(fleet: Fleet) -> None:
    """Whoever supervises it starts both again."""
    edge = fleet.start_edge("edge-dies")
    (child,) = [each for each in psutil.Process(edge.pid).children() if "envoy" in each.name()]
    child.kill()
    wait_until(lambda: not edge.alive, "the edge to end")
    assert "Envoy ended with status -9" in edge.text()
    fleet.forget("edge-dies")


def test_as_many_requests_at_once_as_come(fleet: Fleet) -> None:
    """They wait for their turn at the edge; more than its socket's backlog are not refused."""
    body = b'{"model": "first", "prompt": "x", "max_tokens": 1}'

    def one(_: int) -> int:
        return call(edge_url(fleet), "/v1/completions", body)[0]

    with ThreadPoolExecutor(400) as pool:
        assert set(pool.map(one, range(400))) == {200}
