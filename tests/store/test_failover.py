"""Calls and watches over several members of which one misbehaves; the others are a real etcd."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from tailrace.service.etcd import find_etcd, local_etcd
from tailrace.store.client import EtcdClient, Member
from tailrace.store.endpoints import parse_endpoints
from tailrace.store.store import Held, Store, StoreUnavailable
from tailrace.v1 import etcd_pb2
from tests.ports import free_port
from tests.store.etcd_proxy import LEASE_GRANT, TXN, EtcdProxy, etcd_proxy
from tests.store.waiting import until

WatchStream = grpc.aio.StreamStreamCall[etcd_pb2.WatchRequest, etcd_pb2.WatchResponse]


def prefer(store: Store, endpoint: str) -> None:
    """Have the next call ask this member first."""
    members = store._client._members
    members.sort(key=lambda member: str(member.endpoint) != endpoint)


@asynccontextmanager
async def beside_a_proxy(etcd: str, cluster: str) -> AsyncIterator[tuple[Store, EtcdProxy]]:
    """A store that knows etcd and a proxy to it, and asks the proxy first."""
    async with etcd_proxy(etcd) as proxy:
        store = await Store.connect([proxy.endpoint, etcd], cluster)
        prefer(store, proxy.endpoint)
        yield store, proxy
        await store.close()


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Watches are held against the cluster ten times as often as they are, and with less patience."""
    monkeypatch.setattr("tailrace.store.watch._CHECK_S", 0.2)
    monkeypatch.setattr("tailrace.store.watch._CATCH_UP_S", 0.3)


async def version(store: Store, key: str) -> int:
    """How often the key was written since its creation."""
    present = await store._read(key)
    return 0 if present is None else int(present.version)


async def test_a_silent_member_delays_one_call_and_is_then_asked_last(etcd: str, cluster: str) -> None:
    async with beside_a_proxy(etcd, cluster) as (store, proxy):
        proxy.silent.set()
        before = len(proxy.asked)
        await store.put("policy", b"x")
        assert await store.get("policy") == b"x"
        lease = await store.grant_lease(5)
        assert await store.renew_lease(lease)
        await store.revoke_lease(lease)
        assert len(proxy.asked) == before + 1, "the one call that found it silent"


async def test_a_member_that_does_not_exist_is_passed_over(etcd: str, cluster: str) -> None:
    store = await Store.connect(["127.0.0.1:1", "no-such-host.invalid:2379", etcd], cluster)
    await store.put("policy", b"x")
    assert await store.get("policy") == b"x"
    await store.close()


async def test_a_write_whose_reply_is_lost_is_done_once(etcd: str, cluster: str) -> None:
    async with beside_a_proxy(etcd, cluster) as (store, proxy):
        for key, write in (
            ("put", lambda: store.put("put", b"1")),
            ("create", lambda: store.compare_and_swap("create", None, b"1")),
            ("swap", lambda: store.compare_and_swap("swap", b"0", b"1")),
        ):
            if key == "swap":
                await store.put("swap", b"0")
            prefer(store, proxy.endpoint)
            proxy.lost.append(TXN)
            assert await write() in (None, True)
            assert not proxy.lost
            assert await store.get(key) == b"1"
            assert await version(store, key) == (2 if key == "swap" else 1)


async def test_a_deletion_whose_reply_is_lost_is_done(etcd: str, cluster: str) -> None:
    async with beside_a_proxy(etcd, cluster) as (store, proxy):
        await store.put("stages", b"1")
        prefer(store, proxy.endpoint)
        proxy.lost.append(TXN)
        assert await store.compare_and_delete("stages", b"1")
        assert not proxy.lost
        assert await store.get("stages") is None


async def test_a_leased_value_whose_reply_is_lost_is_ours(etcd: str, cluster: str) -> None:
    async with beside_a_proxy(etcd, cluster) as (store, proxy):
        lease = await store.grant_lease(60)
        prefer(store, proxy.endpoint)
        proxy.lost.append(TXN)
        assert await store.create_leased("leader/x", b"1", lease)
        assert await store.get_leased("leader/x") == Held(b"1", lease)
        assert await store.create_leased("leader/x", b"1", lease), "once more, and it is still ours"
        other = await store.grant_lease(60)
        assert not await store.create_leased("leader/x", b"1", other)
        await store.revoke_lease(lease)
        await store.revoke_lease(other)


async def test_a_swap_that_was_lost_and_written_over_is_not_known(etcd: str, cluster: str) -> None:
    """The first attempt was carried out; before the second one comes, somebody else has written."""
    async with beside_a_proxy(etcd, cluster) as (store, proxy), etcd_proxy(etcd) as slow:
        both = await Store.connect([proxy.endpoint, slow.endpoint], cluster)
        prefer(both, proxy.endpoint)
        proxy.lost.append(TXN)
        slow.held.add(TXN)
        swapping = asyncio.create_task(both.compare_and_swap("stages", None, b"1"))
        async with asyncio.timeout(10):
            await slow.arrived.wait()
        assert await store.compare_and_swap("stages", b"1", b"2")
        slow.release.set()
        with pytest.raises(StoreUnavailable, match="not known"):
            await swapping
        assert await store.get("stages") == b"2"
        await both.close()


async def test_a_write_that_arrives_late_does_nothing(etcd: str, cluster: str) -> None:
    """The request lies in a member that stands still; by the time it goes on, the value is another."""
    async with beside_a_proxy(etcd, cluster) as (store, proxy):
        proxy.held.add(TXN)
        await store.put("policy", b"ours")
        assert proxy.arrived.is_set(), "the first attempt still waits in the proxy"
        await store.put("policy", b"newer")
        proxy.release.set()
        await asyncio.wait(proxy.late)
        assert await store.get("policy") == b"newer"


async def test_of_many_writes_with_lost_replies_each_counts_once(etcd: str, cluster: str) -> None:
    """Several clients count up by compare-and-swap, over members that lose every third reply."""
    done, unknown = 0, 0

    async def count_up(name: int, store: Store, proxy: EtcdProxy) -> None:
        nonlocal done, unknown
        for number in range(40):
            prefer(store, proxy.endpoint)
            if number % 3 == 0:
                proxy.lost.append(TXN)
            present = await store.get("counter")
            # Unlike the others' values: two who write the same both say that they have.
            value = b"%d %d" % (counted(present) + 1, name)
            try:
                swapped = await store.compare_and_swap("counter", present, value)
                done += swapped
            except StoreUnavailable:
                unknown += 1

    async with AsyncExitStack() as stack:
        clients = []
        for name in range(3):
            proxy = await stack.enter_async_context(etcd_proxy(etcd))
            store = await Store.connect([proxy.endpoint, etcd], cluster)
            stack.push_async_callback(store.close)
            clients.append(count_up(name, store, proxy))
        await store.put("counter", b"0 -")
        await asyncio.gather(*clients)
        assert done > 0
        assert done <= counted(await store.get("counter")) <= done + unknown


def counted(value: bytes | None) -> int:
    """How far the counter of that test is."""
    return int((value or b"0").split()[0])


async def test_a_lease_that_is_granted_twice_is_one(tmp_path: Path) -> None:
    etcdctl = find_etcd().parent / "etcdctl"
    if not etcdctl.exists():
        pytest.skip("no etcdctl beside etcd")
    async with local_etcd(tmp_path / "etcd") as etcd, beside_a_proxy(etcd.endpoint, "c") as (store, proxy):
        proxy.lost.append(LEASE_GRANT)
        lease = await store.grant_lease(60)
        assert not proxy.lost
        command = [str(etcdctl), "--endpoints", etcd.endpoint, "lease", "list"]
        listed = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=True)
        assert listed.stdout.split() == ["found", "1", "leases", f"{lease:016x}"]


async def test_a_watch_leaves_a_member_that_falls_silent(often: None, etcd: str, cluster: str) -> None:
    async with beside_a_proxy(etcd, cluster) as (store, proxy):
        watch = store.watch_prefix("pools/")
        assert await anext(watch) == {}
        assert "/etcdserverpb.Watch/Watch" in proxy.asked
        other = await Store.connect([etcd], cluster)
        await other.put("pools/a", b"decode")
        assert await anext(watch) == {"pools/a": b"decode"}
        proxy.silent.set()
        await other.put("pools/b", b"decode")
        async with asyncio.timeout(10):
            assert await anext(watch) == {"pools/a": b"decode", "pools/b": b"decode"}
        await watch.aclose()
        await other.close()


class _WriteReturnsLate:
    """A watch's stream whose `write` returns once the reply has been taken in, as on a busy event loop."""

    def __init__(self, stream: WatchStream) -> None:
        self._stream = stream
        self._asks_again = asyncio.Event()
        self.writes = 0

    async def read(self) -> object:
        self._asks_again.set()
        return await self._stream.read()

    async def write(self, request: etcd_pb2.WatchRequest) -> None:
        self._asks_again.clear()
        await self._stream.write(request)
        self.writes += 1
        if request.HasField("progress_request"):
            await self._asks_again.wait()

    def cancel(self) -> bool:
        return self._stream.cancel()


async def test_a_watch_keeps_a_member_whose_reply_comes_before_the_write_returns(
    etcd: str, cluster: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tailrace.store.watch._CHECK_S", 0.1)
    streams: list[_WriteReturnsLate] = []
    open_stream = Member.stream

    def late(member: Member, *arguments: Any) -> _WriteReturnsLate:
        streams.append(_WriteReturnsLate(open_stream(member, *arguments)))
        return streams[-1]

    monkeypatch.setattr(Member, "stream", late)
    store = await Store.connect([etcd], cluster)
    watch = store.watch_prefix("pools/")
    assert await anext(watch) == {}
    async with asyncio.timeout(10):
        # The first opens the watch; three checks, of which each would have failed.
        while streams[0].writes < 4 and len(streams) == 1:
            await store.get("pools/none")
    assert len(streams) == 1, caplog.text
    await watch.aclose()
    await store.close()


async def test_a_watch_leaves_a_member_that_answers_but_is_behind(
    often: None, etcd: str, cluster: str
) -> None:
    """As one whose disk hangs: it takes no part, and does not know it."""
    async with beside_a_proxy(etcd, cluster) as (store, proxy):
        watch = store.watch_prefix("pools/")
        assert await anext(watch) == {}
        other = await Store.connect([etcd], cluster)
        proxy.behind.set()
        await other.put("pools/a", b"decode")
        async with asyncio.timeout(10):
            assert await anext(watch) == {"pools/a": b"decode"}
        await watch.aclose()
        await other.close()


async def test_a_watch_after_its_history_was_compacted(often: None, etcd: str, cluster: str) -> None:
    async with beside_a_proxy(etcd, cluster) as (store, proxy):
        watch = store.watch_prefix("pools/")
        assert await anext(watch) == {}
        proxy.silent.set()
        other = await Store.connect([etcd], cluster)
        for number in range(3):
            await other.put("pools/a", b"%d" % number)
        revision = (await other._client.header()).revision
        async with grpc.aio.insecure_channel(etcd) as channel:
            compact = channel.unary_unary(
                "/etcdserverpb.KV/Compact", request_serializer=bytes, response_deserializer=bytes
            )
            # CompactionRequest: field 1, the revision, as a varint.
            await compact(b"\x08" + _varint(revision), timeout=5)
        await until(watch, lambda mapping: mapping == {"pools/a": b"2"})
        await watch.aclose()
        await other.close()


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    return bytes([*encoded, number])


async def test_etcd_over_ipv6(etcd: str, cluster: str) -> None:
    try:
        async with etcd_proxy(etcd, "[::1]:0") as proxy:
            store = await Store.connect([proxy.endpoint], cluster)
            await store.put("policy", b"x")
            assert proxy.asked
            await store.close()
    except RuntimeError as error:
        pytest.skip(f"no IPv6 here: {error}")


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("etcd-1:2379", "dns:///etcd-1:2379"),
        ("10.0.0.1:2379", "ipv4:10.0.0.1:2379"),
        ("[::1]:2379", "ipv6:[::1]:2379"),
        ("[fe80::1%eth0]:2379", "ipv6:[fe80::1%eth0]:2379"),
    ],
)
def test_endpoints(text: str, target: str) -> None:
    (endpoint,) = parse_endpoints([text, text])
    assert (str(endpoint), endpoint.target) == (text, target)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("http://a:2379", "without http://"),
        ("::1:2379", "in brackets"),
        ("[a]:2379", "not an IPv6 address"),
        ("a:0", "HOST:PORT expected"),
        ("a:70000", "HOST:PORT expected"),
    ],
)
def test_bad_endpoints_are_explained(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        parse_endpoints([text])


async def test_a_call_without_etcd_says_what_each_member_did() -> None:
    client = EtcdClient(parse_endpoints(["127.0.0.1:1", "127.0.0.1:2"]))
    with pytest.raises(StoreUnavailable, match=r"127.0.0.1:\d: UNAVAILABLE.*; 127.0.0.1:\d: UNAVAILABLE"):
        await client.header()
    await client.close()


async def test_etcd_without_space_is_told_as_such(tmp_path: Path) -> None:
    async with local_etcd(tmp_path / "etcd", arguments=["--quota-backend-bytes=200000"]) as etcd:
        store = await Store.connect([etcd.endpoint], "c")
        with pytest.raises(StoreUnavailable, match="space exceeded; compact, defragment"):
            for number in range(1_000):
                await store.put(f"profiles/{number}", bytes(50_000))
        # What is there can be read, and leases be renewed: who is a member stays one.
        assert await store.get("profiles/0") == bytes(50_000)
        await store.close()


async def test_a_member_whose_name_moved_is_found_at_its_new_address(etcd: str, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("")
    unshare = ["unshare", "--mount"]
    if await asyncio.to_thread(subprocess.call, [*unshare, "mount", "--bind", str(hosts), "/etc/hosts"]):
        pytest.skip("needs a mount namespace of its own (root)")
    script = [sys.executable, "-m", "tests.store.moved_member", str(hosts), str(free_port()), etcd]
    ended = await asyncio.to_thread(
        subprocess.run, [*unshare, *script], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
