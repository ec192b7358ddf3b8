"""The console's HTTP API, before an admin API that replies from a script."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import pytest
from aiohttp import ClientSession, web

from console_svc.actions import ACTIONS
from console_svc.clusters import VIEWERS_MAX, Clusters, TooManyViewers
from console_svc.fleet import WatchedFleet
from console_svc.snapshot import Sample
from console_svc.web import HEADER, Site
from tailrace.cli.admin import AdminAddress
from tailrace.security.audit import AuditEntry
from tailrace.security.transport import PLAIN
from tailrace.v1 import admin_pb2 as admin
from tests.cli.scripted_admin import Script, serving, small_fleet
from tests.waiting import WAIT_S

PAGE = Path(__file__).parents[2] / "console_svc/page"
OWN = {HEADER: "1", "Content-Type": "application/json"}


class Entries:
    """Audit entries, in order."""

    def __init__(self) -> None:
        self.all: list[AuditEntry] = []

    def write(self, entry: AuditEntry) -> None:
        self.all.append(entry)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no call to the admin API be late, which is served by this process."""
    for name in ("fleet.CALL_TIMEOUT_S", "clusters.CALL_TIMEOUT_S", "actions._CALL_TIMEOUT_S"):
        monkeypatch.setattr(f"console_svc.{name}", WAIT_S)


@pytest.fixture
def script() -> Script:
    return small_fleet()


@pytest.fixture
def entries() -> Entries:
    return Entries()


@pytest.fixture
def address(script: Script) -> Iterator[AdminAddress]:
    with serving(script) as address:
        yield AdminAddress(address, address, PLAIN)


@asynccontextmanager
async def console(address: AdminAddress, entries: Entries, token: str = "") -> AsyncIterator[str]:
    """Serve a console during the block; yield its URL."""
    clusters = Clusters(address)
    site = Site(clusters, entries, "127.0.0.1", token)
    runner = web.AppRunner(site.app(), shutdown_timeout=0.1)
    async with clusters.running():
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


@asynccontextmanager
async def client(address: AdminAddress, entries: Entries, token: str = "") -> AsyncIterator[ClientSession]:
    async with console(address, entries, token) as url, ClientSession(url) as session:
        yield session


async def _snapshot(session: ClientSession, cluster: str = "", **headers: str) -> Any:
    async with session.get("/api/events", params={"cluster": cluster}, headers=headers) as reply:
        assert reply.status == HTTPStatus.OK
        line = await asyncio.wait_for(reply.content.readuntil(b"\n\n"), WAIT_S)
        return json.loads(line.removeprefix(b"data: "))


async def test_a_snapshot_has_the_fleet_in_columns(address: AdminAddress, entries: Entries) -> None:
    async with client(address, entries) as session:
        now = await _snapshot(session)
    assert now["instances"]["id"] == ["worker-0", "worker-1"]
    assert now["requests"]["id"] == ["chatcmpl-aaa1", "chatcmpl-aab2"]
    assert now["requests"]["instance"] == [0, 1]
    assert now["policy"] == {"name": "least_loaded", "suspended": ""}
    assert now["session"] == {
        "admin": address.text,
        "who": "local",
        "may_act": True,
        "cluster": "",
        "own": True,
        "clusters": [],
    }
    assert "worker-1" in [alert["what"] for alert in now["alerts"]]


async def test_nobody_polls_while_nobody_watches(
    address: AdminAddress, entries: Entries, script: Script
) -> None:
    async with client(address, entries) as session:
        assert (await session.get("/")).status == HTTPStatus.OK
        assert script.received == []
        await _snapshot(session)
        assert script.received != []


async def test_all_viewers_share_one_poll(
    address: AdminAddress, entries: Entries, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_wait, sample, snapshots, viewers = asyncio.Event(), WatchedFleet._sample, WatchedFleet._snapshots, 0

    async def sample_once_all_wait(fleet: WatchedFleet) -> Sample:
        await all_wait.wait()
        return await sample(fleet)

    async def count_viewers(fleet: WatchedFleet) -> AsyncIterator[bytes]:
        nonlocal viewers
        viewers += 1
        if viewers == 5:
            all_wait.set()
        async for each in snapshots(fleet):
            yield each

    monkeypatch.setattr(WatchedFleet, "_sample", sample_once_all_wait)
    monkeypatch.setattr(WatchedFleet, "_snapshots", count_viewers)
    monkeypatch.setattr("console_svc.fleet._INTERVAL_S", WAIT_S)
    async with client(address, entries) as session:
        first, *others = await asyncio.gather(*(_snapshot(session) for _ in range(5)))
    assert all(other == first for other in others)
    polls = [request for request in script.received if isinstance(request, admin.ListInstancesRequest)]
    assert len(polls) == 1


async def test_viewers_are_bounded(address: AdminAddress) -> None:
    clusters = Clusters(address)
    async with clusters.running(), AsyncExitStack() as stack:
        for _ in range(VIEWERS_MAX):
            await stack.enter_async_context(clusters.watched(""))
        with pytest.raises(TooManyViewers):
            async with clusters.watched(""):
                pass
        await stack.aclose()
        async with clusters.watched(""):
            pass


async def test_an_admin_api_that_does_not_answer_is_an_alert(entries: Entries) -> None:
    async with client(AdminAddress("127.0.0.1:1", "127.0.0.1:1", PLAIN), entries) as session:
        now = await _snapshot(session)
    assert now["instances"]["id"] == []
    assert now["alerts"][0]["what"] == "admin API"


@pytest.mark.parametrize(
    ("action", "body", "method", "done"),
    [
        (
            "policy",
            {"name": "pascal", "parameters": {"quantum_tokens": "200"}},
            "SetPolicy",
            "pascal is the policy; before: pascal",
        ),
        ("shadow", {"name": "pascal"}, "SetShadow", "the shadow is pascal; before: none"),
        ("shadow", {"name": ""}, "SetShadow", "the shadow is none; before: none"),
        (
            "slo",
            {"objectives": {"ttft": "1.5s", "qoe": "0.9"}},
            "SetSlo",
            "SLOs: ttft=1.5s qoe=0.9; before: ttft=2s tpot=150ms",
        ),
        (
            "pool",
            {"instance": "worker-0", "pool": "prefill"},
            "SetPool",
            "pool of worker-0: prefill; before: decode",
        ),
        (
            "pool",
            {"instance": "worker-0", "pool": "none"},
            "SetPool",
            "pool of worker-0: none; before: decode",
        ),
        (
            "stages",
            {"stages": [{"lo": 0, "hi": 8192, "instance_ids": ["worker-0"]}]},
            "SetStages",
            "stages: 1",
        ),
        ("drain", {"instance": "worker-0"}, "Drain", "worker-0 drains: 2 requests left"),
        ("drain", {"instance": "worker-0", "undrain": True}, "Drain", "worker-0 takes new requests again"),
        (
            "migrate",
            {"request": "chatcmpl-aaa1", "target": "worker-1"},
            "Migrate",
            "chatcmpl-aaa1 is on worker-1, paused 4.2 ms",
        ),
    ],
)
async def test_an_action_is_carried_out_and_leaves_an_audit_line(
    address: AdminAddress, entries: Entries, action: str, body: dict[str, object], method: str, done: str
) -> None:
    async with client(address, entries) as session:
        reply = await session.post(f"/api/actions/{action}", json=body, headers=OWN)
        assert (reply.status, await reply.json()) == (HTTPStatus.OK, {"done": done})
    (entry,) = entries.all
    assert (entry.who, entry.peer, entry.what) == ("local", "127.0.0.1", method)
    assert body.items() <= entry.request.items()
    assert (entry.outcome, entry.details) == ("OK", done)


async def test_a_refused_action_leaves_an_audit_line(
    address: AdminAddress, entries: Entries, script: Script
) -> None:
    script.errors["SetPolicy"] = (grpc.StatusCode.PERMISSION_DENIED, "role viewer; SetPolicy requires admin")
    async with client(address, entries) as session:
        reply = await session.post("/api/actions/policy", json={"name": "pascal"}, headers=OWN)
        assert reply.status == HTTPStatus.FORBIDDEN
        assert "requires admin" in (await reply.json())["error"]
    assert [entry.outcome for entry in entries.all] == ["PERMISSION_DENIED"]


@pytest.mark.parametrize(
    ("action", "body", "error"),
    [
        ("slo", {"objectives": {"tpot": "fast"}}, "slo, parameter 'tpot': 'fast' is not allowed"),
        ("slo", {"objectives": {"latency": "1s"}}, "slo has no parameter 'latency'"),
        (
            "pool",
            {"instance": "worker-0", "pool": "both"},
            "pool: there is no 'both'; there are: none,",
        ),
        ("stages", {"stages": [{"lo": 0, "hi": 9, "instance_ids": [""]}]}, "stages[0].instance_ids[0]: "),
        (
            "stages",
            {"stages": [{"lo": -1, "hi": 9, "instance_ids": []}]},
            "stages[0].lo: Expected `int`",
        ),
    ],
)
async def test_what_is_not_valid_is_refused_by_the_name_of_its_field(
    address: AdminAddress, entries: Entries, script: Script, action: str, body: object, error: str
) -> None:
    async with client(address, entries) as session:
        reply = await session.post(f"/api/actions/{action}", json=body, headers=OWN)
        assert reply.status == HTTPStatus.BAD_REQUEST
        assert (await reply.json())["error"].startswith(error)
    assert script.received == []


@contextmanager
def with_clusters_below(script: Script, address: AdminAddress, *names: str) -> Iterator[list[Script]]:
    """Let the cluster `c` have others below it during the block; yield their scripts."""
    with ExitStack() as stack:
        below = [small_fleet() for _ in names]
        script.clusters = [admin.ClusterInfo(name="c", models=["chat"], admin_addresses=[address.text])]
        for name, other in zip(names, below, strict=True):
            where = stack.enter_context(serving(other))
            script.clusters.append(
                admin.ClusterInfo(name=f"c.{name}", models=[name], admin_addresses=[where])
            )
        yield below


async def test_clusters_below_its_own_are_shown_and_acted_on(
    address: AdminAddress, entries: Entries, script: Script
) -> None:
    with with_clusters_below(script, address, "coder") as (coder,):
        del coder.instances[1:]
        async with client(address, entries) as session:
            # Before anybody watches, they are known, too.
            now = await _snapshot(session, "c.coder")
            assert now["instances"]["id"] == ["worker-0"]
            assert now["session"]["cluster"] == "c.coder" and not now["session"]["own"]
            assert now["session"]["clusters"] == [
                {"name": "c", "models": ["chat"]},
                {"name": "c.coder", "models": ["coder"]},
            ]
            own = await _snapshot(session, "c")
            assert own["instances"]["id"] == ["worker-0", "worker-1"] and own["session"]["own"]
            found = await (await session.get("/api/policies", params={"cluster": "c.coder"})).json()
            assert found["policies"]
            reply = await session.post(
                "/api/actions/policy", params={"cluster": "c.coder"}, json={"name": "pascal"}, headers=OWN
            )
            assert reply.status == HTTPStatus.OK
    assert [entry.request["cluster"] for entry in entries.all] == ["c.coder"]
    assert any(isinstance(request, admin.SetPolicyRequest) for request in coder.received)
    assert not any(isinstance(request, admin.SetPolicyRequest) for request in script.received)


async def test_a_cluster_that_does_not_exist_is_not_found(
    address: AdminAddress, entries: Entries, script: Script
) -> None:
    with with_clusters_below(script, address, "coder"):
        async with client(address, entries) as session:
            for call in (
                session.get("/api/events", params={"cluster": "c.none"}),
                session.get("/api/policies", params={"cluster": "c.none"}),
                session.post(
                    "/api/actions/drain", params={"cluster": "c.none"}, json={"instance": "w"}, headers=OWN
                ),
            ):
                reply = await call
                assert reply.status == HTTPStatus.NOT_FOUND
                error = "cluster: there is no 'c.none'; there are: c, c.coder"
                assert (await reply.json())["error"] == error
    assert entries.all == []


async def test_a_cluster_that_goes_ends_its_viewers_and_one_that_moves_does_not(
    address: AdminAddress, entries: Entries, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("console_svc.clusters._INTERVAL_S", 0.05)
    with with_clusters_below(script, address, "coder"), serving(small_fleet()) as elsewhere:
        async with (
            client(address, entries) as session,
            session.get("/api/events", params={"cluster": "c.coder"}) as reply,
        ):

            async def until(wanted: Callable[[Any], bool]) -> None:
                async with asyncio.timeout(WAIT_S):
                    while not wanted(json.loads((await reply.content.readuntil(b"\n\n"))[len(b"data: ") :])):
                        pass

            await until(lambda now: bool(now["instances"]["id"]))
            # Its schedulers are away for a moment, and come back elsewhere.
            script.clusters[1] = admin.ClusterInfo(name="c.coder")
            await asyncio.wait_for(_asked_twice(script), WAIT_S)
            script.clusters[1] = admin.ClusterInfo(name="c.coder", admin_addresses=[elsewhere])
            await until(lambda now: now["session"]["admin"] == elsewhere and bool(now["instances"]["id"]))
            del script.clusters[1]
            await asyncio.wait_for(reply.content.read(), WAIT_S)
            assert (await session.get("/api/policies", params={"cluster": "c.coder"})).status == 404


async def _asked_twice(script: Script) -> None:
    """Wait until the console has asked for services twice more."""

    def asked() -> int:
        return sum(isinstance(request, admin.ListServicesRequest) for request in script.received)

    before = asked()
    while asked() < before + 2:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def test_a_migration_that_is_aborted_is_no_success(
    address: AdminAddress, entries: Entries, script: Script
) -> None:
    del script.migrate_events[1:]
    async with client(address, entries) as session:
        body = {"request": "chatcmpl-aaa1", "target": "worker-1"}
        reply = await session.post("/api/actions/migrate", json=body, headers=OWN)
        assert reply.status == HTTPStatus.CONFLICT
    assert [entry.outcome for entry in entries.all] == ["ABORTED"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content-Type": "application/json"}, HTTPStatus.FORBIDDEN),
        (OWN | {"Origin": "http://evil.example"}, HTTPStatus.FORBIDDEN),
        (OWN | {"Origin": "null"}, HTTPStatus.FORBIDDEN),
        (OWN | {"Sec-Fetch-Site": "cross-site"}, HTTPStatus.FORBIDDEN),
        (OWN | {"Sec-Fetch-Site": "same-site"}, HTTPStatus.FORBIDDEN),
        (OWN | {"Host": "evil.example"}, HTTPStatus.FORBIDDEN),
        (OWN | {"Content-Type": "text/plain"}, HTTPStatus.UNSUPPORTED_MEDIA_TYPE),
    ],
)
@pytest.mark.parametrize("action", [*ACTIONS])
async def test_other_sites_cannot_act(
    address: AdminAddress,
    entries: Entries,
    script: Script,
    action: str,
    headers: dict[str, str],
    status: HTTPStatus,
) -> None:
    async with client(address, entries) as session:
        reply = await session.post(f"/api/actions/{action}", data='{"name": "pascal"}', headers=headers)
        assert reply.status == status
    assert script.received == [] and entries.all == []


async def test_the_page_itself_can_act(address: AdminAddress, entries: Entries) -> None:
    async with console(address, entries) as url, ClientSession(url) as session:
        reply = await session.post(
            "/api/actions/policy", json={"name": "pascal"}, headers=OWN | {"Origin": url}
        )
        assert reply.status == HTTPStatus.OK


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8081", "localhost.evil.example", ""])
async def test_a_name_bound_to_this_address_is_refused(
    address: AdminAddress, entries: Entries, host: str
) -> None:
    async with client(address, entries) as session:
        for path in ("/", "/api/events", "/api/policies"):
            assert (await session.get(path, headers={"Host": host})).status == HTTPStatus.FORBIDDEN


@pytest.mark.parametrize("host", ["localhost:8081", "LOCALHOST", "127.0.0.1", "[::1]:8081", "10.0.0.5:8081"])
async def test_addresses_are_its_own_host(address: AdminAddress, entries: Entries, host: str) -> None:
    async with client(address, entries) as session:
        assert (await session.get("/", headers={"Host": host})).status == HTTPStatus.OK


async def test_with_a_token_nothing_of_the_cluster_is_shown_without_it(
    address: AdminAddress, entries: Entries, script: Script
) -> None:
    async with client(address, entries, token="s3cret-s3cret-s3cret") as session:
        for headers in (
            {},
            {"Authorization": "Bearer s3cret"},
            {"Authorization": "Basic s3cret-s3cret-s3cret"},
        ):
            for path in ("/api/events", "/api/policies", "/api/requests/chatcmpl-aaa1"):
                assert (await session.get(path, headers=headers)).status == HTTPStatus.UNAUTHORIZED
            reply = await session.post("/api/actions/policy", json={"name": "p"}, headers=OWN | headers)
            assert reply.status == HTTPStatus.UNAUTHORIZED
        assert script.received == []
        assert (await session.get("/")).status == HTTPStatus.OK
        assert await _snapshot(session, Authorization="Bearer s3cret-s3cret-s3cret")


async def test_a_token_that_is_no_text_is_a_wrong_one(address: AdminAddress, entries: Entries) -> None:
    async with console(address, entries, token="s3cret-s3cret-s3cret") as url:
        port = urlsplit(url).port
        assert port is not None
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = b"GET /api/policies HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer s3cret\xff\r\n\r\n"
        writer.write(head)
        async with asyncio.timeout(WAIT_S):
            assert await reader.readline() == b"HTTP/1.1 401 Unauthorized\r\n"
        writer.close()


@pytest.mark.parametrize(
    "body",
    [
        "",
        "[]",
        "{}",
        '{"name": ""}',
        '{"name": 5}',
        '{"name": "p", "more": 1}',
        '{"name": "%s"}' % ("x" * 501),
    ],
)
async def test_malformed_actions(address: AdminAddress, entries: Entries, script: Script, body: str) -> None:
    async with client(address, entries) as session:
        reply = await session.post("/api/actions/policy", data=body, headers=OWN)
        assert reply.status == HTTPStatus.BAD_REQUEST
    assert script.received == []


async def test_sizes_are_bounded(address: AdminAddress, entries: Entries) -> None:
    async with client(address, entries) as session:
        reply = await session.post("/api/actions/policy", data=b" " * 100_000, headers=OWN)
        assert reply.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE
        assert (await session.get(f"/api/requests/{'x' * 501}")).status == HTTPStatus.BAD_REQUEST
        assert (await session.post("/api/actions/none", json={}, headers=OWN)).status == HTTPStatus.NOT_FOUND


async def test_policies_with_parameters_and_the_shadow(
    address: AdminAddress, entries: Entries, script: Script
) -> None:
    script.shadow = admin.Shadow(
        name="ares", policy="pascal", counts=[admin.ShadowCount(point="place", same=3)]
    )
    async with client(address, entries) as session:
        found = await (await session.get("/api/policies")).json()
        assert [policy["name"] for policy in found["policies"]] == ["least_loaded", "round_robin"]
        assert found["shadow"]["counts"] == [{"point": "place", "same": 3, "different": 0, "failed": 0}]
        script.errors["ListPolicies"] = (grpc.StatusCode.UNAVAILABLE, "no leader")
        reply = await session.get("/api/policies")
        assert (reply.status, await reply.json()) == (HTTPStatus.SERVICE_UNAVAILABLE, {"error": "no leader"})


async def test_every_reply_carries_the_policy_of_the_page(address: AdminAddress, entries: Entries) -> None:
    async with client(address, entries) as session:
        for path in ("/", "/page/app.js", "/api/policies", "/api/actions/none", "/none", "/page/none.js"):
            headers = (await session.get(path)).headers
            policy = headers["Content-Security-Policy"]
            assert policy.startswith("default-src 'none'; script-src 'self';")
            assert "unsafe" not in policy and "frame-ancestors 'none'" in policy
            assert headers["X-Content-Type-Options"] == "nosniff"


async def test_only_files_of_the_page_are_served(address: AdminAddress, entries: Entries) -> None:
    async with client(address, entries) as session:
        for file in PAGE.iterdir():
            assert (await session.get(f"/page/{file.name}")).status == HTTPStatus.OK
        for path in ("/page/..%2Fmain.py", "/page/../main.py", "/page/main.py", "/page/"):
            assert (await session.get(path)).status == HTTPStatus.NOT_FOUND


@pytest.mark.parametrize("file", sorted(PAGE.glob("*.js")), ids=lambda file: file.name)
def test_scripts_never_make_markup_of_text(file: Path) -> None:
    text = file.read_text()
    for danger in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function("):
        assert danger not in text


def test_the_page_loads_nothing_from_elsewhere() -> None:
    for file in PAGE.iterdir():
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "://" not in text.replace("'://'", ""), file.name
    assert "style=" not in (PAGE / "index.html").read_text()
