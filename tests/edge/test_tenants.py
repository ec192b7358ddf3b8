"""Tenants of vLLM's Rust API server behind an edge: their keys, limits, salts and turns."""

from __future__ import annotations

import asyncio
import json
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tailrace.tenancy.file import locked_key_file, read_keys
from tailrace.tenancy.keys import Tenant, TenantKeys
from tests.e2e.conftest import RUST_FRONT
from tests.harness.fleet import MODEL, Fleet
from tests.harness.processes import wait_until
from tests.waiting import WAIT_S

pytestmark = [
    pytest.mark.fleet,
    pytest.mark.skipif(not RUST_FRONT.exists(), reason="no vllm-rs"),
]

# A letter is a token. Two such prompts fill the backlog, further ones wait.
PROMPT_TOKENS, BACKLOG = 1_000, 1_500
BURST = 12
TENANTS = (
    Tenant(name="a"),
    Tenant(name="b"),
    Tenant(name="shared 1", shared_cache="both"),
    Tenant(name="shared 2", shared_cache="both"),
    Tenant(name="minutes", requests_per_minute=3),
    # One, and no further one while the tests run.
    Tenant(name="hours", requests_per_minute=0.01),
    Tenant(name="tokens", tokens_per_minute=600),
    Tenant(name="tokenizes", tokens_per_minute=600),
    Tenant(name="narrow", concurrency=1),
    Tenant(name="gone"),
    Tenant(name="short", longest_prompt=100),
    Tenant(name="elsewhere", models=("other",)),
)


@dataclass
class Edge:
    """An edge with keys before a front end with vllm-rs, over one slow engine."""

    fleet: Fleet
    file: Path
    keys: dict[str, str]

    @property
    def url(self) -> str:
        """Return the edge's URL."""
        return self.fleet.urls["edge"]

    def headers(self, tenant: str) -> dict[str, str]:
        """Return the headers of a tenant's requests."""
        return {"authorization": f"Bearer {self.keys[tenant]}"}

    def client(self, tenant: str) -> httpx.AsyncClient:
        """Return a client with a tenant's key."""
        return httpx.AsyncClient(base_url=self.url, headers=self.headers(tenant), timeout=WAIT_S)

    def ask(self, tenant: str, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
        """Send a completion of one token, unless `fields` say otherwise."""
        body = {"model": MODEL, "prompt": "x", "max_tokens": 1, "ignore_eos": True, **fields}
        return httpx.post(f"{self.url}{path}", json=body, headers=self.headers(tenant), timeout=WAIT_S)

    def cached_tokens(self) -> float:
        """Return how many prompt tokens the engine has found in its prefix cache."""
        return self.fleet.metric("w0", "tailrace_worker_cached_prompt_tokens_total")


@pytest.fixture(scope="module")
def edge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Edge]:
    root = tmp_path_factory.mktemp("tenants")
    tenant_keys, keys = TenantKeys().with_edge_key("now"), {}
    for tenant in TENANTS:
        tenant_keys, keys[tenant.name] = tenant_keys.with_tenant(tenant).with_key(tenant.name, "now")
    file = root / "keys.json"
    with locked_key_file(file) as replace:
        replace(tenant_keys)
    fleet = Fleet(root, "simulated")
    try:
        fleet.start_control()
        slow = ["--sim", "speed=0.2", "--sim", "max_num_batched_tokens=1024", "--sim", "prefix_caching=true"]
        fleet.start_worker("w0", slow, wait=False)
        options = ["--api-keys", str(file), "--fair-backlog", str(BACKLOG), "--place-wait", str(WAIT_S)]
        fleet.start_frontend("rust", options=options, wait=False)
        fleet.wait_instances(["w0"])
        fleet.wait_healthy("frontend")
        limits = ["--max-messages", "20", "--max-text-bytes", "20000", "--max-bodies-bytes", "1048576"]
        fleet.start_edge(options=["--api-keys", str(file), *limits])
        edge = Edge(fleet, file, keys)
        wait_until(lambda: edge.ask("a").status_code == 200, "the edge to reach the front end")
        yield edge
    finally:
        fleet.close()


def refusal(reply: httpx.Response) -> tuple[int, str]:
    """Return status and message of an error in OpenAI's form."""
    error = reply.json()["error"]
    assert error["code"] == reply.status_code and error["type"]
    return reply.status_code, error["message"]


def test_only_edges_get_an_answer_of_the_api_server(edge: Edge) -> None:
    body = {"model": MODEL, "prompt": "x", "max_tokens": 1}
    url = f"{edge.fleet.urls['frontend']}/v1/completions"
    made_up = {"x-request-id": f"0123456789abcdef.{edge.keys['b'].split('-')[2]}"}
    for headers in ({}, edge.headers("a"), {**edge.headers("a"), **made_up}):
        assert httpx.post(url, json=body, headers=headers, timeout=WAIT_S).status_code == 401
    # Without an id of an edge, nobody's request is sent on: not even one with the key of edges.
    edges = {"authorization": f"Bearer {read_keys(edge.file).edge_key}"}
    assert httpx.post(url, json=body, headers=edges, timeout=WAIT_S).status_code == 500
    assert "came by no edge" in edge.fleet.processes["frontend"].text()


def test_a_client_chooses_neither_tenant_nor_id(edge: Edge) -> None:
    chosen = f"0123456789abcdef.{edge.keys['b'].split('-')[2]}"
    for headers, fields in (
        ({"x-request-id": chosen}, {}),
        ({}, {"request_id": chosen}),
        ({"x-tailrace-ticket": "1"}, {}),
    ):
        reply = httpx.post(
            f"{edge.url}/v1/completions",
            json={"model": MODEL, "prompt": "x", "max_tokens": 1, **fields},
            headers={**edge.headers("a"), **headers},
            timeout=WAIT_S,
        )
        assert reply.status_code == 200
        _, _, owner = reply.json()["id"].rpartition(".")
        assert owner == edge.keys["a"].split("-")[2]


def test_tenants_share_no_cached_prompts_unless_they_say_so(edge: Edge) -> None:
    def found(prompt: str, tenant: str, **fields: Any) -> float:
        before = edge.cached_tokens()
        assert edge.ask(tenant, prompt=prompt, **fields).status_code == 200
        return edge.cached_tokens() - before

    secret = "secret ".ljust(640, "s")
    assert found(secret, "a") == 0
    assert found(secret, "a") > 500
    salts = ("", "/tenant/1/a/", "/tenant/1/a")
    assert [found(secret, "b", **({"cache_salt": salt} if salt else {})) for salt in salts] == [0, 0, 0]
    assert found(secret, "a", cache_salt="own") == 0
    both = "both ".ljust(640, "b")
    assert found(both, "shared 1") == 0
    assert found(both, "shared 2") > 500


def test_requests_per_minute(edge: Edge) -> None:
    replies: list[httpx.Response] = []
    began_s = time.monotonic()
    while not replies or replies[-1].status_code == 200:
        replies.append(edge.ask("minutes"))
    # Those of a minute at once, and on a slow machine those that have become due meanwhile.
    assert 3 <= len(replies) - 1 <= 3 + (time.monotonic() - began_s) * 3 / 60
    assert refusal(replies[-1]) == (429, "Limit exceeded: more than 3 requests per minute.")
    assert int(replies[-1].headers["retry-after"]) >= 1
    # Before its body is read.
    assert edge.ask("hours").status_code == 200
    url = urlsplit(edge.url)
    with socket.create_connection((url.hostname, url.port), WAIT_S) as asking:
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\nAuthorization: "
        asking.sendall(f"{head}{edge.headers('hours')['authorization']}\r\n\r\n".encode())
        assert asking.recv(64).startswith(b"HTTP/1.1 429")


@pytest.mark.parametrize(
    ("tenant", "path"),
    [
        ("tokens", "/v1/completions"),
        ("tokenizes", "/tokenize"),
    ],
)
def test_tokens_per_minute(edge: Edge, tenant: str, path: str) -> None:
    replies: list[httpx.Response] = []

    def refused() -> bool:
        fields: dict[str, Any] = {"prompt": "x" * 400, "min_tokens": 50, "max_tokens": 50}
        replies.append(edge.ask(tenant, path, **(fields if path != "/tokenize" else {"prompt": "x" * 1_600})))
        return replies[-1].status_code != 200

    wait_until(refused, "the tokens to be used")
    assert refusal(replies[-1]) == (429, "Limit exceeded: more than 600 tokens per minute.")
    # A report of the front end takes a moment.
    assert 2 <= len(replies) <= 30


def test_concurrency(edge: Edge) -> None:
    # One after the other is one at a time.
    assert {edge.ask("narrow").status_code for _ in range(30)} == {200}
    begun, stop = threading.Event(), threading.Event()

    def stream() -> None:
        body = {"model": MODEL, "prompt": "x", "max_tokens": 4_000, "ignore_eos": True, "stream": True}
        with httpx.stream(
            "POST", f"{edge.url}/v1/completions", json=body, headers=edge.headers("narrow"), timeout=WAIT_S
        ) as reply:
            for _ in reply.iter_lines():
                begun.set()
                if stop.is_set():
                    return

    reader = threading.Thread(target=stream)
    reader.start()
    try:
        assert begun.wait(WAIT_S)
        assert refusal(edge.ask("narrow")) == (
            429,
            "Limit exceeded: 1 of 1 sequences at a time are in progress.",
        )
    finally:
        stop.set()
        reader.join(WAIT_S)
    # The client has left.
    wait_until(lambda: edge.ask("narrow").status_code == 200, "its stream to end")


def test_what_a_body_asks_for(edge: Edge) -> None:
    chats = {"prompt": None, "messages": [{"role": "user", "content": "x"}] * 21}
    image = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
    for path, fields, status, problem in (
        ("/v1/chat/completions", chats, 400, "at most 20 messages"),
        ("/v1/completions", {"prompt": "x" * 20_000}, 413, "at most 20000 bytes"),
        (
            "/v1/completions",
            {"prompt": "x" * (600 << 10)},
            429,
            "bytes of request bodies of one key's tenant",
        ),
        ("/v1/completions", {"request_id": "x" * 300}, 400, "request_id must have at most 256 bytes"),
        ("/v1/completions", {"session_id": "\n"}, 400, "session_id must consist of printable"),
        (
            "/v1/chat/completions",
            {"prompt": None, "messages": [{"role": "user", "content": image}]},
            400,
            "no images",
        ),
        ("/v1/embeddings", {"input": "x"}, 404, "not served here"),
        ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/x"}, 404, "not served here"),
    ):
        got, message = refusal(edge.ask("a", path, **fields))
        assert (got, problem in message) == (status, True), message
    for tenant, status, problem in (("short", 400, "longest prompt"), ("elsewhere", 403, "may use other")):
        got, message = refusal(edge.ask(tenant))
        assert got == status and problem in message
    long = {**edge.headers("a"), "x-request-id": "x" * 300}
    reply = httpx.post(f"{edge.url}/v1/completions", json={"model": MODEL}, headers=long, timeout=WAIT_S)
    assert refusal(reply)[1] == "X-Request-Id must have at most 256 bytes."


def test_what_a_body_asks_for_whatever_it_is_called(edge: Edge) -> None:
    called = {**edge.headers("a"), "content-type": "application/x-www-form-urlencoded+json"}
    for body, status, problem in (
        (json.dumps({"model": MODEL, "prompt": "x" * 20_000}).encode(), 413, "at most 20000 bytes"),
        (b'{"model": "%s", "prompt": "x", "request_id": "\xff"}' % MODEL.encode(), 400, "not valid"),
        (b'{"model": "%s", "prompt": ["a", "b"], "n": 1.7e308}' % MODEL.encode(), 400, "sequences"),
    ):
        reply = httpx.post(f"{edge.url}/v1/completions", content=body, headers=called, timeout=WAIT_S)
        got, message = refusal(reply)
        assert (got, problem in message) == (status, True), message


def test_bodies_of_unknown_length_count_as_large_ones(edge: Edge) -> None:
    parts = urlsplit(edge.url)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nTransfer-Encoding: chunked\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in edge.headers("a").items())
    with ExitStack() as stack:
        begun = []
        for _ in range(5):
            address = (str(parts.hostname), parts.port or 80)
            begun.append(stack.enter_context(socket.create_connection(address, timeout=WAIT_S)))
            begun[-1].sendall(f"{head}\r\n1\r\n{{\r\n".encode())
        # Four of them wait for the rest.
        answered, _, _ = select.select(begun, [], [], WAIT_S)
        assert b" 429 " in answered[0].recv(1_000)
    wait_until(lambda: edge.ask("a").status_code == 200, "the unfinished bodies to be forgotten")


def test_an_operator_finds_a_request_by_its_clients_id(edge: Edge) -> None:
    # It would take minutes.
    body = {"model": MODEL, "prompt": "x", "max_tokens": 4_000, "ignore_eos": True, "stream": True}
    headers = {**edge.headers("a"), "x-request-id": "my own-7"}
    with httpx.stream(
        "POST", f"{edge.url}/v1/completions", json=body, headers=headers, timeout=WAIT_S
    ) as reply:
        lines = reply.iter_lines()
        first = json.loads(next(lines).removeprefix("data: "))
        part = first["id"].removeprefix("cmpl-").partition(".")[0]
        found = edge.fleet.wait_request(part)
    assert "my own" not in found.request_id and edge.keys["a"].split("-")[2] not in found.request_id


async def test_a_burst_waits_for_its_turns(edge: Edge) -> None:
    """Another tenant's request comes after what is in the backlog, and not after the burst."""
    began: list[str] = []

    async def ask(tenant: str, number: int) -> None:
        body = {
            "model": MODEL,
            "prompt": f"{tenant} {number} ".ljust(PROMPT_TOKENS, "x"),
            "max_tokens": 1,
            "stream": True,
            "priority": -1_000,
        }
        async with (
            edge.client(tenant) as client,
            client.stream("POST", "/v1/completions", json=body) as answer,
        ):
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    assert '"error"' not in line, line
                    began.append(tenant)
                    return

    def waiting(tenant: str) -> float:
        return edge.fleet.metric("frontend", "tailrace_frontend_fair_waiting", f'tenant="{tenant}"')

    async def wait_for(condition: Any, what: str) -> None:
        await asyncio.to_thread(wait_until, condition, what)

    async with asyncio.TaskGroup() as group:
        for number in range(BURST):
            group.create_task(ask("a", number))
        await wait_for(lambda: waiting("a") >= BURST / 2, "the burst to wait")
        other = group.create_task(ask("b", 0))
        await wait_for(lambda: other.done() or waiting("b") == 1, "the other tenant's request to wait")
        before = len(began)
        await other
    # Two prompts were in the backlog, one more of tenant a gets its turn first, and one more allows for the
    # order in which the events of two streams reach their clients.
    assert began.index("b") - before <= 4


def test_an_edge_that_was_restarted_knows_the_tenants(edge: Edge) -> None:
    wait_until(lambda: edge.ask("minutes").status_code == 429, "the tenant to use its minute")
    assert edge.fleet.processes["edge"].stop() == 0
    edge.fleet.restart("edge")
    edge.fleet.wait_healthy("edge")
    wait_until(lambda: edge.ask("a").status_code == 200, "the edge to reach the front end")
    # Its counts begin anew.
    assert edge.ask("minutes").status_code == 200


def test_a_damaged_key_file_is_told_by_both(edge: Edge) -> None:
    """Whoever reads it goes on with the keys that it has: an alert says so."""
    content = edge.file.read_bytes()

    def unusable(service: str) -> float:
        return edge.fleet.metric(service, "tailrace_api_keys_unusable")

    for damaged in (True, False):
        edge.file.write_bytes(b"rubbish" if damaged else content)
        for service in ("edge", "frontend"):
            wait_until(lambda: unusable(service) == damaged, f"{service} to tell")  # noqa: B023 - called here
        assert edge.ask("a").status_code == 200


def test_a_revoked_key(edge: Edge) -> None:
    assert edge.ask("gone").status_code == 200
    with locked_key_file(edge.file) as replace:
        replace(read_keys(edge.file).without_key(edge.keys["gone"].split("-")[2]))
    wait_until(lambda: edge.ask("gone").status_code == 401, "the key to be refused")


def test_without_an_instance_the_edge_says_so(edge: Edge) -> None:
    """vllm-rs would answer 500, after a while."""
    process = edge.fleet.start_frontend(
        "rust",
        "frontend-alone",
        options=["--api-keys", str(edge.file), "--served-model-name", "alone", "--place-wait", "0.2"],
        wait=False,
    )
    try:
        edge.fleet.wait_healthy("frontend-alone")
        edge.fleet.processes["w0"].stop()
        wait_until(lambda: edge.ask("a", model="alone").status_code == 503, "the edge to refuse")
        print(edge.fleet.processes["edge"].text()[-3000:], edge.ask("a", model="alone").headers)
        assert refusal(edge.ask("a", model="alone")) == (503, "No instance can take this request now.")
    finally:
        process.stop()
        edge.fleet.forget("frontend-alone")
