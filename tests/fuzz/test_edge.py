"""What the edge makes of any request that Envoy may ask it about, and of any record in etcd."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import re
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import httpx
import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from edge_svc.configuration import (
    CLUSTER,
    DEFAULT_BOUNDS,
    KEY_CHECK,
    MODEL_CHOICE,
    OWN_PATHS,
    UNAVAILABLE,
    Bounds,
    bootstrap,
    endpoints,
    endpoints_file,
)
from edge_svc.configuration import clusters as configured_clusters
from edge_svc.directory import Asked, directory, merged
from edge_svc.hosts import Hosts
from edge_svc.main import envoy_path
from edge_svc.proxy import Proxy
from edge_svc.web import Answers
from tailrace.records import AdapterRecord, ServiceRecord
from tailrace.store import model_clusters
from tailrace.store.model_clusters import ModelClusters
from tailrace.store.store import Store
from tailrace.tenancy.file import KeyFile
from tailrace.tenancy.keys import Tenant, TenantKeys
from tests.edge.test_directory import front_end
from tests.ports import free_port
from tests.waiting import WAIT_S

BOUNDS: Final = Bounds(max_body_bytes=1 << 16)
SERVED: Final = directory(
    [front_end("f", "first", 1, "rust"), front_end("g", "first", 2), front_end("h", "second", 3)], []
)
CLUSTERS: Final = frozenset(each.cluster for each in SERVED.clusters)


class Question(NamedTuple):
    """A request as it is sent, apart from its length."""

    method: bytes
    target: bytes
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes


class Reply(NamedTuple):
    """What came back."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def nested(depth: int) -> bytes:
    """Return JSON that is nested so deeply."""
    return b'{"model": "first", "x": ' + b"[" * depth + b"]" * depth + b"}"


NAMES: Final = st.sampled_from(["first", "second", "third", ""]) | st.text(max_size=300)
JSON: Final = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=30),
    lambda each: st.lists(each, max_size=4) | st.dictionaries(st.text(max_size=9), each, max_size=4),
    max_leaves=12,
)
OBJECTS: Final = st.fixed_dictionaries(
    {}, optional={"model": NAMES | JSON, "n": JSON, "prompt": JSON, "stream": JSON, "messages": JSON}
).map(lambda each: json.dumps(each).encode())
BODIES: Final = st.one_of(
    OBJECTS,
    OBJECTS,
    JSON.map(lambda each: json.dumps(each).encode()),
    # Surrogates and other text that a JSON encoder of ours does not write.
    st.tuples(OBJECTS, st.integers(0, 200), st.binary(max_size=4)).map(
        lambda each: each[0][: each[1]] + each[2] + each[0][each[1] :]
    ),
    st.binary(max_size=300),
    st.integers(0, 20_000).map(nested),
    st.integers(0, 70_000).map(lambda size: b'{"model": "%s"}' % (b"a" * size)),
)
# Bytes that Envoy lets through.
SAFE: Final = bytes(range(0x21, 0x7F)).replace(b"#", b"")
PATHS: Final = st.one_of(
    st.sampled_from([b"/v1/completions", b"/v1/chat/completions", b"/tokenize", b"/v2/rerank", b"/metrics"]),
    st.lists(
        st.sampled_from([b"v1", b"..", b".", b"", b"edge", b"model", b"completions", b"%2e%2e", b"%00"])
        | st.binary(max_size=5).map(lambda each: b"".join(b"%%%02x" % byte for byte in each)),
        max_size=6,
    ).map(lambda parts: b"/" + b"/".join(parts)),
    st.lists(st.sampled_from(SAFE), max_size=60).map(lambda each: b"/" + bytes(each)),
)
QUERIES: Final = st.one_of(
    st.just(b""),
    st.sampled_from([b"?model=first", b"?model=second&model=first", b"?model=%ff", b"?model", b"?=&;"]),
    st.lists(st.sampled_from(SAFE), max_size=40).map(lambda each: b"?model=" + bytes(each)),
)
# All that a header's value may have.
VALUES: Final = st.lists(st.sampled_from([9, *range(0x20, 0x7F), *range(0x80, 0x100)]), max_size=60).map(
    bytes
)
HEADERS: Final = st.lists(
    st.one_of(
        st.tuples(
            st.just(b"authorization"),
            VALUES.map(lambda each: b"Bearer sk-tailrace-0-" + each)
            | VALUES.map(lambda each: b"Bearer " + each)
            | VALUES,
        ),
        st.tuples(
            st.just(b"content-type"),
            st.sampled_from([b"application/json", b"multipart/form-data; boundary=x", b"a/b; c=\xff"])
            | VALUES,
        ),
        st.tuples(st.sampled_from([b"x-a", b"cookie", b"accept", b"if-match", b"range"]), VALUES),
    ),
    max_size=3,
    unique_by=lambda each: each[0],
)
METHODS: Final = st.sampled_from([b"GET", b"HEAD", b"POST", b"PUT", b"DELETE", b"OPTIONS", b"TRACE"])


def questions(prefixes: Sequence[str]) -> st.SearchStrategy[list[Question]]:
    """Return several questions whose paths begin so."""
    prefix = st.sampled_from([each.encode() for each in prefixes])
    target = st.tuples(prefix, PATHS, QUERIES).map(b"".join)
    return st.lists(st.builds(Question, METHODS, target, HEADERS, BODIES), min_size=1, max_size=10)


@contextmanager
def logged() -> Iterator[list[logging.LogRecord]]:
    """Collect in the block what is logged as an error, or with an exception."""
    found: list[logging.LogRecord] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.exc_info or record.levelno >= logging.ERROR:
                found.append(record)

    handler, root = Collect(), logging.getLogger()
    root.addHandler(handler)
    try:
        yield found
    finally:
        root.removeHandler(handler)


async def ask_one(port: int, question: Question) -> Reply:
    """Send a question on a connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        lines = [b"%s %s HTTP/1.1" % (question.method, question.target), b"host: edge", b"connection: close"]
        lines += [b"%s: %s" % each for each in question.headers]
        lines += [b"content-length: %d" % len(question.body)]
        writer.write(b"\r\n".join(lines) + b"\r\n\r\n" + question.body)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    finally:
        writer.close()
    first, *fields = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, _, value in (field.partition(": ") for field in fields)}
    return Reply(int(first.split()[1]), headers, body)


def ask(answers: Answers, asked: Sequence[Question]) -> list[Reply]:
    """Return the replies; nothing may have been logged."""

    async def run() -> list[Reply]:
        longest = BOUNDS.max_header_kib << 10
        server: TestServer = TestServer(answers.app())
        sizes: Any = {"max_line_size": longest, "max_field_size": longest}
        async with asyncio.timeout(WAIT_S):
            await server.start_server(**sizes)
            try:
                assert server.port is not None
                return [await ask_one(server.port, each) for each in asked]
            finally:
                await server.close()

    with logged() as errors:
        replies = asyncio.run(run())
    assert not errors, errors[0].getMessage()
    return replies


def check_refusal(question: Question, reply: Reply) -> None:
    """Check that a reply other than 200 is OpenAI's error, short, with its status."""
    assert 400 <= reply.status < 500 or reply.status == 503, (question, reply)
    if question.method != b"HEAD":
        error = json.loads(reply.body)["error"]
        status = 503 if reply.status == UNAVAILABLE else reply.status
        assert error["code"] == status and error["message"] and len(reply.body) < 2_000
        assert error["message"].isprintable()


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> KeyFile:
    """A file of keys, none of which a test sends."""
    made, _ = TenantKeys(tenants=(Tenant(name="a"),)).with_key("a", "now")
    file = tmp_path_factory.mktemp("keys") / "keys.json"
    file.write_bytes(msgspec.json.encode(made))
    return KeyFile(file)


def answers_with(keys: KeyFile | None) -> Answers:
    """Return answers of an edge that serves two models."""
    return Answers(lambda: SERVED, keys, BOUNDS, CollectorRegistry())


@given(questions([MODEL_CHOICE]))
@example([Question(b"POST", b"/edge/model/v1/completions", (), b'{"model": "\\ud800"}')])
@example([Question(b"GET", b"/edge/model/" + b"a" * 50_000, (), b"")])
@example([Question(b"GET", b"/edge/model/v1/completions?model=" + b"a" * 50_000, (), b"")])
@example([Question(b"POST", b"/edge/model/v1/completions", (), nested(200_000 // 8))])
def test_any_request_leads_to_a_model_or_is_refused(asked: list[Question]) -> None:
    for question, reply in zip(asked, ask(answers_with(None), asked), strict=True):
        if reply.status == 200:
            assert reply.headers[CLUSTER] in CLUSTERS
        else:
            check_refusal(question, reply)
            assert CLUSTER not in reply.headers


@given(questions([KEY_CHECK]))
@example([Question(b"GET", b"/edge/key/v1/models", [(b"authorization", b"Bearer sk-tailrace-0-\xff")], b"")])
@example([Question(b"GET", b"/edge/key/v1/%0a", (), b"")])
def test_any_request_without_a_key_is_refused_for_that(keys: KeyFile, asked: list[Question]) -> None:
    for question, reply in zip(asked, ask(answers_with(keys), asked), strict=True):
        check_refusal(question, reply)
        assert reply.status == 401 and reply.headers["www-authenticate"] == "Bearer"


@given(questions([*OWN_PATHS, ""]))
def test_own_paths_are_answered_or_refused(keys: KeyFile, asked: list[Question]) -> None:
    for question, reply in zip(asked, ask(answers_with(keys), asked), strict=True):
        if reply.status != 200:
            check_refusal(question, reply)
        else:
            assert not reply.body.startswith(b'{"object"')


ANY_NAME: Final = st.sampled_from(["a", "b", "c", "A", "a/b", "../a", "a.json"]) | st.text(
    min_size=1, max_size=40
)
ADDRESSES: Final = st.sampled_from(
    ["127.0.0.1:1", "127.0.0.1:1", "[::1]:2", "host.example:3", "[fe80::1%lo]:4", "1.2.3:4", "", ":", "a:b:5"]
) | st.text(max_size=30)
FRONT_ENDS: Final = st.builds(
    lambda name, model, address, server, names, kind: msgspec.structs.replace(
        front_end(name, model, 1, server), http_address=address, names=names, kind=kind
    ),
    ANY_NAME,
    ANY_NAME | st.just(""),
    ADDRESSES,
    st.sampled_from(["rust", "python", "", "other"]),
    st.lists(ANY_NAME, max_size=3),
    st.sampled_from(["frontend", "frontend", "frontend", "edge"]),
)
ADAPTERS: Final = st.builds(AdapterRecord, model=ANY_NAME, name=ANY_NAME, path=ANY_NAME)
RECORDS: Final = st.tuples(st.lists(FRONT_ENDS, max_size=6), st.lists(ADAPTERS, max_size=4))
IPS: Final = {"host.example": ["192.0.2.1", "2001:db8::1"], "1.2.3": []}


@given(st.lists(RECORDS, max_size=3), st.lists(ANY_NAME | st.none(), max_size=4))
def test_any_records_make_a_valid_configuration(
    clusters: list[tuple[list[ServiceRecord], list[AdapterRecord]]], asked: list[str | None]
) -> None:
    found = merged([directory(*each) for each in clusters])
    names = [each.cluster for each in found.clusters]
    assert len(set(names)) == len(names)
    folder = Path("/folder")
    for each in found.clusters:
        assert endpoints_file(each.cluster, folder).parent == folder
        assert re.fullmatch(r"(rust|python)-[0-9a-f]{32}", each.cluster)
        (resource,) = endpoints(each, IPS)["resources"]
        for lb in resource["endpoints"][0]["lb_endpoints"]:
            first = lb["endpoint"]
            for socket in (first, *first["additional_addresses"]):
                ipaddress.ip_address(socket["address"]["socket_address"]["address"])
    for name, served in found.names.items():
        assert served.name == name and found.find(name) is served
        for path in ("/v1/completions", "/v1/responses"):
            assert served.cluster(path, Asked()) in names
    for name_asked in asked:
        served_one = found.find(name_asked)
        assert served_one is None or found.names[served_one.name] is served_one
    json.dumps(configured_clusters(found.clusters, folder, tls=True))


BELOW: Final = st.builds(
    lambda cluster, area, name: f"{cluster}/{area}{name}",
    st.sampled_from(["m", "n", "", "."]),
    st.sampled_from(["services/frontend/", "adapters/", "services/", "", "/"]),
    st.sampled_from(["f", "first/sql", "g"]) | st.text(max_size=10),
)
GOOD: Final = {
    "m/services/frontend/f": msgspec.json.encode(front_end("f", "first", 1)),
    "m/adapters/first/sql": msgspec.json.encode(AdapterRecord(model="first", name="sql", path="/a")),
}
VALUES_BELOW: Final = st.one_of(
    st.sampled_from([*GOOD.values()]),
    st.binary(max_size=60),
    JSON.map(lambda each: json.dumps(each).encode()),
    st.tuples(st.sampled_from([*GOOD.values()]), st.integers(0, 300), st.binary(max_size=3)).map(
        lambda each: each[0][: each[1]] + each[2] + each[0][each[1] + 1 :]
    ),
)


@given(st.lists(st.dictionaries(BELOW, VALUES_BELOW, max_size=4), min_size=1, max_size=3))
def test_what_cannot_be_read_is_left_out_alone(snapshots: list[dict[str, bytes]]) -> None:
    """Whatever came before and beside them, sound records of a model are read."""

    class Etcd:
        async def watch_below(self) -> AsyncGenerator[dict[str, bytes]]:
            for each in (*snapshots, snapshots[-1] | GOOD):
                yield each
            await asyncio.Event().wait()

    async def run() -> ModelClusters:
        seen, last = [], asyncio.Event()

        def changed() -> None:
            seen.append(clusters.records)
            if len(seen) > len(snapshots):
                last.set()

        clusters = ModelClusters(
            cast(Store, Etcd()), model_clusters.FRONT_ENDS, model_clusters.ADAPTERS, changed=changed
        )
        async with asyncio.timeout(WAIT_S), clusters.following():
            await last.wait()
        return clusters

    with logged() as errors:
        below = asyncio.run(run()).records
    assert not errors, errors[0].getMessage()
    found = [directory(each.services, each.adapters) for each in below.values()]
    assert any({"first", "sql"} <= each.names.keys() for each in found)


async def test_hosts_are_found_and_others_left_out() -> None:
    hosts = Hosts()
    assert not await hosts.find(["localhost:1", "127.0.0.1:2", "no.invalid:3", "nonsense", f"{'a' * 99}.b:4"])
    assert "127.0.0.1" in hosts.ips["localhost"]
    assert not hosts.ips["no.invalid"] and "nonsense" not in hosts.ips
    assert await hosts.find(["localhost:1", "nonsense", "[::1]:2"])


def test_a_model_whose_front_ends_are_away_is_not_unknown() -> None:
    """A client tries again after 503; after 404 it does not."""
    away = directory([front_end("h", "second", 3)], []).after(SERVED)
    asked = [
        Question(b"POST", b"/edge/model/v1/completions", (), b'{"model": "%s"}' % name)
        for name in (b"first", b"third")
    ]
    answers = Answers(lambda: away, None, BOUNDS, CollectorRegistry())
    assert [reply.status for reply in ask(answers, asked)] == [UNAVAILABLE, 404]
    none = directory([], []).after(away)
    answers = Answers(lambda: none, None, BOUNDS, CollectorRegistry())
    assert [reply.status for reply in ask(answers, asked)] == [UNAVAILABLE, UNAVAILABLE]
    assert not SERVED.after(none).gone


def test_a_tenant_reaches_its_own_models_only(tmp_path: Path) -> None:
    """Front ends with vLLM's Rust API server know no tenants."""
    made, key = TenantKeys(tenants=(Tenant(name="a", models=("second",)),)).with_key("a", "now")
    file = tmp_path / "keys.json"
    file.write_bytes(msgspec.json.encode(made))
    headers = [(b"authorization", b"Bearer " + key.encode())]
    path = b"/edge/model/v1/completions"
    bodies = [b'{"model": "second"}', b'{"model": "first"}', b""]
    asked = [Question(b"POST", path, headers, body) for body in bodies]
    asked.append(Question(b"GET", path + b"?model=first", headers, b""))
    answers = answers_with(KeyFile(file))
    assert [reply.status for reply in ask(answers, asked)] == [200, 403, 400, 403]


async def test_the_proxy_takes_names_of_hosts_and_refuses_unknown_methods(tmp_path: Path) -> None:
    port, behind = free_port(), free_port()
    # Beside them what Envoy would refuse, and with it the others.
    records = [front_end("f", "first", 1), front_end("g", "first", 2), front_end("h", "first", 3)]
    addresses = [f"localhost:{behind}", "nonsense", "no.invalid:1"]
    pairs = zip(records, addresses, strict=True)
    found = directory([msgspec.structs.replace(each, http_address=at) for each, at in pairs], [])
    hosts, answers = Hosts(), Answers(lambda: found, None, BOUNDS, CollectorRegistry())
    own, model = web.AppRunner(answers.app()), web.Application()
    model.router.add_route("*", "/v1/completions", hello)
    server = web.AppRunner(model)
    try:
        for each in (own, server):
            await each.setup()
        await web.UnixSite(own, str(tmp_path / "edge.sock")).start()
        # `localhost` may be ::1 first, where nobody listens.
        await web.TCPSite(server, "127.0.0.1", behind).start()
        await hosts.find(addresses)
        proxy = Proxy(envoy_path(None), tmp_path, 1)
        proxy.route(found.clusters, {**hosts.ips, "localhost": ["::1", "127.0.0.1"]})
        url, body = f"http://127.0.0.1:{port}/v1/completions", {"model": "first"}
        configuration = bootstrap(f"127.0.0.1:{port}", tmp_path, DEFAULT_BOUNDS, with_keys=False, https=False)
        with logged() as errors:
            async with (
                proxy.running(configuration),
                httpx.AsyncClient(http1=False, http2=True, timeout=WAIT_S) as client,
            ):
                # While clusters are read, they are not yet known.
                async with asyncio.timeout(WAIT_S):
                    while (reply := await client.post(url, json=body)).status_code == 503:  # noqa: ASYNC110
                        await asyncio.sleep(0.05)
                assert (reply.status_code, reply.text) == (200, "hello")
                reply = await client.request("X-Y", url, json=body)
                assert reply.status_code == 405 and reply.json()["error"]["code"] == 405
        assert not errors, errors[0].getMessage()
    finally:
        await own.cleanup()
        await server.cleanup()


async def hello(request: web.Request) -> web.Response:
    """Answer as a front end."""
    return web.Response(text="hello")
