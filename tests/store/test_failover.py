"""Calls and watches with several members, one of which misbehaves; the others are a real etcd."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from tailrace.address import parse_endpoints
from tailrace.security.renewed_channel import CLOSE_WHEN_IDLE
from tailrace.security.transport import PlainTransport
from tailrace.service.etcd import find_etcd
from tailrace.store import client
from tailrace.store.client import EtcdClient, Member
from tailrace.store.store import LeasedValue, Store, StoreUnavailable, Swap
from tailrace.v1 import etcd_pb2
from tests.harness.local_etcd import local_etcd
from tests.ports import free_port
from tests.store.etcd_proxy import LEASE_GRANT, TXN, EtcdProxy, etcd_proxy
from tests.store.waiting import until
from tests.waiting import WAIT_S

WatchStream = grpc.aio.StreamStreamCall[etcd_pb2.WatchRequest, etcd_pb2.WatchResponse]


def prefer(store: Store, endpoint: str) -> None:
    """Let the next call try this member first."""
    members = store._client._members
    members.sort(key=lambda member: str(member.endpoint) != endpoint)


@asynccontextmanager
async def store_with_proxy(etcd: str, cluster: str) -> AsyncIterator[tuple[Store, EtcdProxy]]:
    """Yield a store that knows etcd and a proxy to it, and tries the proxy first."""
    async with etcd_proxy(etcd) as proxy:
        store = await Store.connect([proxy.endpoint, etcd], cluster)
        prefer(store, proxy.endpoint)
        yield store, proxy
        await store.close()


@pytest.fixture
def one_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no call try another member before the first one has failed, however long that takes."""
    monkeypatch.setattr(client, "_HEDGE_S", WAIT_S)


@pytest.fixture
def frequent_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check watches ten times as often, with shorter timeouts."""
    monkeypatch.setattr("tailrace.store.watch._CHECK_S", 0.2)
    monkeypatch.setattr("tailrace.store.watch._CATCH_UP_S", 0.3)


async def version(store: Store, key: str) -> int:
    """Return the number of writes to the key since its creation."""
    present = await store._read(key)
    return 0 if present is None else int(present.version)


async def test_a_silent_member_delays_one_call_and_is_then_tried_last(
    etcd: str, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with store_with_proxy(etcd, cluster) as (store, proxy):
        proxy.silent.set()
        before = len(proxy.calls)
        await store.put("policy", b"x")
        tried = len(proxy.calls)
        assert tried > before
        # The others do not try it because etcd is slow.
        monkeypatch.setattr(client, "_HEDGE_S", WAIT_S)
        assert await store.get("policy") == b"x"
        lease = await store.grant_lease(5)
        assert await store.renew_lease(lease)
        await store.revoke_lease(lease)
        assert len(proxy.calls) == tried, "only the first call tried it"


async def test_a_missing_member_is_skipped(etcd: str, cluster: str) -> None:
    store = await Store.connect(["127.0.0.1:1", "no-such-host.invalid:2379", etcd], cluster)
    await store.put("policy", b"x")
    assert await store.get("policy") == b"x"
    await store.close()


async def test_a_member_whose_reply_cannot_be_decoded_is_skipped(etcd: str, cluster: str) -> None:
    async with store_with_proxy(etcd, cluster) as (store, proxy):
        proxy.garbled = [TXN]
        assert await store.compare_and_swap("pools/a", None, b"decode")
        assert not proxy.garbled
        assert await store.get("pools/a") == b"decode" and await version(store, "pools/a") == 1


async def test_a_write_with_a_lost_reply_is_executed_once(etcd: str, cluster: str) -> None:
    async with store_with_proxy(etcd, cluster) as (store, proxy):
        writes: dict[str, Callable[[], Awaitable[int]]] = {
            "put": lambda: store.put("put", b"1"),
            "create": lambda: store.compare_and_swap("create", None, b"1"),
            "swap": lambda: store.compare_and_swap("swap", b"0", b"1"),
        }
        for key, write in writes.items():
            if key == "swap":
                await store.put("swap", b"0")
            prefer(store, proxy.endpoint)
            proxy.lost.append(TXN)
            assert await write() != 0
            assert not proxy.lost
            assert await store.get(key) == b"1"
            assert await version(store, key) == (2 if key == "swap" else 1)


async def test_a_deletion_with_a_lost_reply_succeeds(etcd: str, cluster: str) -> None:
    async with store_with_proxy(etcd, cluster) as (store, proxy):
        await store.put("stages", b"1")
        prefer(store, proxy.endpoint)
        proxy.lost.append(TXN)
        assert await store.compare_and_delete("stages", b"1")
        assert not proxy.lost
        assert await store.get("stages") is None


async def test_a_leased_value_with_a_lost_reply_is_owned(etcd: str, cluster: str) -> None:
    async with store_with_proxy(etcd, cluster) as (store, proxy):
        lease = await store.grant_lease(60)
        prefer(store, proxy.endpoint)
        proxy.lost.append(TXN)
        assert await store.create_leased("leader/x", b"1", lease)
        assert await store.get_leased("leader/x") == LeasedValue(b"1", lease)
        assert await store.create_leased("leader/x", b"1", lease), "creating it again succeeds"
        other = await store.grant_lease(60)
        assert not await store.create_leased("leader/x", b"1", other)
        await store.revoke_lease(lease)
        await store.revoke_lease(other)


@pytest.mark.usefixtures("one_attempt")
async def test_a_lost_swap_that_was_overwritten_is_unknown(etcd: str, cluster: str) -> None:
    """The first attempt was executed; before the retry, another client has written."""
    async with store_with_proxy(etcd, cluster) as (store, proxy), etcd_proxy(etcd) as slow:
        both = await Store.connect([proxy.endpoint, slow.endpoint], cluster)
        prefer(both, proxy.endpoint)
        proxy.lost.append(TXN)
        slow.held.add(TXN)
        swapping = asyncio.create_task(both.compare_and_swap("stages", None, b"1"))
        async with asyncio.timeout(WAIT_S):
            await slow.arrived.wait()
        assert await store.compare_and_swap("stages", b"1", b"2")
        slow.release.set()
        with pytest.raises(StoreUnavailable, match="unknown whether"):
            await swapping
        assert await store.get("stages") == b"2"
        await both.close()


def once_read(monkeypatch: pytest.MonkeyPatch, store: Store, then: Callable[[], Awaitable[object]]) -> None:
    """Await `then` once between the reading of the values to be swapped and the swaps."""
    read_all = store._read_all

    async def read(keys: Collection[str], action: str) -> dict[str, Any]:
        present = await read_all(keys, action)
        monkeypatch.setattr(store, "_read_all", read_all)
        await then()
        return present

    monkeypatch.setattr(store, "_read_all", read)


async def test_swaps_beside_one_that_another_writer_prevents_are_carried_out(
    etcd: str, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with store_with_proxy(etcd, cluster) as (store, _):
        once_read(monkeypatch, store, lambda: store.put("pools/b", b"other"))
        swaps = {f"pools/{key}": Swap(None, b"1") for key in "abc"}
        assert await store.compare_and_swap_all(swaps) == {"pools/a", "pools/c"}
        assert await store.get_prefix("pools/") == {"pools/a": b"1", "pools/b": b"other", "pools/c": b"1"}


async def test_swaps_with_a_lost_reply_are_carried_out_once(
    etcd: str, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with store_with_proxy(etcd, cluster) as (store, proxy):
        await store.put("pools/a", b"0")
        await store.put("pools/b", b"0")
        prefer(store, proxy.endpoint)

        async def lose_the_reply() -> None:
            proxy.lost.append(TXN)

        once_read(monkeypatch, store, lose_the_reply)
        swaps = {"pools/a": Swap(b"0", b"1"), "pools/b": Swap(b"0", None), "pools/c": Swap(None, b"1")}
        assert await store.compare_and_swap_all(swaps) == swaps.keys()
        assert not proxy.lost
        assert await store.get_prefix("pools/") == {"pools/a": b"1", "pools/c": b"1"}
        assert await version(store, "pools/a") == 2


@pytest.mark.usefixtures("one_attempt")
@pytest.mark.parametrize("executed", [True, False])
async def test_lost_swaps_one_of_which_was_overwritten_are_unknown_only_if_they_may_have_been_carried_out(
    executed: bool, etcd: str, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first member executes the swaps, or none; before the retry, another client has written."""
    async with etcd_proxy(etcd) as proxy, etcd_proxy(etcd) as slow:
        both = await Store.connect([proxy.endpoint, slow.endpoint], cluster)

        async def misbehave() -> None:
            prefer(both, proxy.endpoint)
            (proxy.lost if executed else proxy.refused).append(TXN)
            slow.held.add(TXN)

        once_read(monkeypatch, both, misbehave)
        swaps = {f"pools/{key}": Swap(None, b"1") for key in "ab"}
        swapping = asyncio.create_task(both.compare_and_swap_all(swaps))
        async with asyncio.timeout(WAIT_S):
            await slow.arrived.wait()
        other = await Store.connect([etcd], cluster)
        await other.put("pools/b", b"2")
        slow.release.set()
        if executed:
            with pytest.raises(StoreUnavailable, match="pools/a and 1 more: it is unknown whether"):
                await swapping
        else:
            assert await swapping == {"pools/a"}
        assert await other.get_prefix("pools/") == {"pools/a": b"1", "pools/b": b"2"}
        await other.close()
        await both.close()


@pytest.mark.usefixtures("one_attempt")
async def test_lost_swaps_one_of_which_was_undone_are_unknown(
    etcd: str, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were executed; before the retry, another client has deleted a value that was not there before."""
    async with etcd_proxy(etcd) as proxy, etcd_proxy(etcd) as slow:
        both = await Store.connect([proxy.endpoint, slow.endpoint], cluster)
        other = await Store.connect([etcd], cluster)
        await other.put("pools/b", b"0")

        async def misbehave() -> None:
            prefer(both, proxy.endpoint)
            proxy.lost.append(TXN)
            slow.held.add(TXN)

        once_read(monkeypatch, both, misbehave)
        swaps = {"pools/a": Swap(None, b"1"), "pools/b": Swap(b"0", b"1")}
        swapping = asyncio.create_task(both.compare_and_swap_all(swaps))
        async with asyncio.timeout(WAIT_S):
            await slow.arrived.wait()
        await other.delete("pools/a")
        slow.release.set()
        with pytest.raises(StoreUnavailable, match="it is unknown whether"):
            await swapping
        assert await other.get_prefix("pools/") == {"pools/b": b"1"}
        await other.close()
        await both.close()


async def test_a_late_write_has_no_effect(etcd: str, cluster: str) -> None:
    """The request is stuck in a member; when it continues, the value has changed."""
    async with store_with_proxy(etcd, cluster) as (store, proxy):
        proxy.held.add(TXN)
        await store.put("policy", b"ours")
        assert proxy.arrived.is_set(), "the first attempt still waits in the proxy"
        await store.put("policy", b"newer")
        proxy.release.set()
        await asyncio.wait(proxy.late)
        assert await store.get("policy") == b"newer"


async def test_each_write_with_a_lost_reply_counts_once(etcd: str, cluster: str) -> None:
    """Several clients increment a counter by compare-and-swap; members lose every third reply."""
    succeeded, unknown = 0, 0

    async def count_up(name: int, store: Store, proxy: EtcdProxy) -> None:
        nonlocal succeeded, unknown
        for number in range(40):
            prefer(store, proxy.endpoint)
            if number % 3 == 0:
                proxy.lost.append(TXN)
            present = await store.get("counter")
            # Values differ between clients, since two clients writing the same value would both report
            # success.
            value = b"%d %d" % (counted(present) + 1, name)
            try:
                swapped = await store.compare_and_swap("counter", present, value)
                succeeded += swapped > 0
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
        assert succeeded > 0
        assert succeeded <= counted(await store.get("counter")) <= succeeded + unknown


def counted(value: bytes | None) -> int:
    """Return the value of the counter."""
    return int((value or b"0").split()[0])


async def test_a_retried_lease_grant_creates_one_lease(tmp_path: Path) -> None:
    etcdctl = find_etcd().parent / "etcdctl"
    if not etcdctl.exists():
        pytest.skip("no etcdctl beside etcd")
    async with local_etcd(tmp_path / "etcd") as etcd, store_with_proxy(etcd.endpoint, "c") as (store, proxy):
        proxy.lost.append(LEASE_GRANT)
        lease = await store.grant_lease(60)
        assert not proxy.lost
        command = [str(etcdctl), "--endpoints", etcd.endpoint, "lease", "list"]
        listed = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=True)
        assert listed.stdout.split() == ["found", "1", "leases", f"{lease:016x}"]


async def test_a_watch_leaves_a_silent_member(frequent_checks: None, etcd: str, cluster: str) -> None:
    async with store_with_proxy(etcd, cluster) as (store, proxy):
        watch = store.watch_prefix("pools/")
        assert await anext(watch) == {}
        assert "/etcdserverpb.Watch/Watch" in proxy.calls
        other = await Store.connect([etcd], cluster)
        await other.put("pools/a", b"decode")
        await until(watch, lambda mapping: mapping == {"pools/a": b"decode"})
        proxy.silent.set()
        await other.put("pools/b", b"decode")
        await until(watch, lambda mapping: mapping == {"pools/a": b"decode", "pools/b": b"decode"})
        await watch.aclose()
        await other.close()


class _WriteReturnsLate:
    """A watch stream whose `write` returns only after the reply was read, as on a busy event loop."""

    def __init__(self, stream: WatchStream) -> None:
        self._stream = stream
        self._reads_again = asyncio.Event()
        self.writes = 0

    async def read(self) -> object:
        self._reads_again.set()
        return await self._stream.read()

    async def write(self, request: etcd_pb2.WatchRequest) -> None:
        self._reads_again.clear()
        await self._stream.write(request)
        self.writes += 1
        if request.HasField("progress_request"):
            await self._reads_again.wait()

    def cancel(self) -> bool:
        return self._stream.cancel()


async def test_a_watch_keeps_a_member_that_replies_before_the_write_returns(
    etcd: str, cluster: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tailrace.store.watch._CHECK_S", 0.1)
    # A busy machine must be no reason to leave it.
    monkeypatch.setattr("tailrace.store.watch._OPEN_S", WAIT_S / 2)
    monkeypatch.setattr("tailrace.store.watch._CATCH_UP_S", WAIT_S / 2)
    streams: list[_WriteReturnsLate] = []
    open_stream = Member.stream

    def late(member: Member, *arguments: Any) -> _WriteReturnsLate:
        streams.append(_WriteReturnsLate(open_stream(member, *arguments)))
        return streams[-1]

    monkeypatch.setattr(Member, "stream", late)
    store = await Store.connect([etcd], cluster)
    watch = store.watch_prefix("pools/")
    assert await anext(watch) == {}
    async with asyncio.timeout(WAIT_S):
        # The first write opens the watch; the other three are checks.
        while streams[0].writes < 4 and len(streams) == 1:
            await store.get("pools/none")
    assert len(streams) == 1, caplog.text
    await watch.aclose()
    await store.close()


async def test_a_watch_leaves_a_lagging_member(frequent_checks: None, etcd: str, cluster: str) -> None:
    """For example, a member whose disk hangs is unaware that it lags."""
    async with store_with_proxy(etcd, cluster) as (store, proxy):
        watch = store.watch_prefix("pools/")
        assert await anext(watch) == {}
        other = await Store.connect([etcd], cluster)
        proxy.behind.set()
        await other.put("pools/a", b"decode")
        await until(watch, lambda mapping: mapping == {"pools/a": b"decode"})
        await watch.aclose()
        await other.close()


async def test_a_watch_survives_compaction(frequent_checks: None, etcd: str, cluster: str) -> None:
    async with store_with_proxy(etcd, cluster) as (store, proxy):
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
            await compact(b"\x08" + _varint(revision), timeout=WAIT_S)
        await until(watch, lambda mapping: mapping == {"pools/a": b"2"})
        await watch.aclose()
        await other.close()


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    return bytes([*encoded, number])


class Renewed(PlainTransport):
    """A transport whose certificate changes each time that it is asked for."""

    def __init__(self) -> None:
        self._versions = itertools.count()

    @property  # type: ignore[misc]
    def version(self) -> int:
        return next(self._versions)


async def test_connections_with_old_certificates_are_closed(
    etcd: str, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    soon = tuple(
        (name, 1_000 if name == CLOSE_WHEN_IDLE[0] else value) for name, value in client._CHANNEL_OPTIONS
    )
    monkeypatch.setattr(client, "_CHANNEL_OPTIONS", soon)
    store = await Store.connect([etcd], cluster, Renewed())
    await store.get("key")
    (member,) = store._client._members
    replaced = member.channel._replaced
    assert replaced
    async with asyncio.timeout(WAIT_S):
        # gRPC notifies of no end of an idle connection.
        while any(c.get_state() is grpc.ChannelConnectivity.READY for c in replaced):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    await store.close()


async def test_etcd_over_ipv6(etcd: str, cluster: str) -> None:
    try:
        async with etcd_proxy(etcd, "[::1]:0") as proxy:
            store = await Store.connect([proxy.endpoint], cluster)
            await store.put("policy", b"x")
            assert proxy.calls
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
def test_endpoints_are_parsed(text: str, target: str) -> None:
    (endpoint,) = parse_endpoints([text, text])
    assert (str(endpoint), endpoint.target) == (text, target)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("http://a:2379", "without http://"),
        ("::1:2379", "in brackets"),
        ("[a]:2379", "not an IPv6 address"),
        ("a", "HOST:PORT expected"),
        ("a:0", "port 0 is not from 1 to 65535"),
        ("10.0.0.999:1", "10.0.0.999 is no IPv4 address"),
    ],
)
def test_invalid_endpoints_are_errors_with_a_reason(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_endpoints([text])


async def test_a_failed_call_lists_the_error_of_each_member() -> None:
    client = EtcdClient(parse_endpoints(["127.0.0.1:1", "127.0.0.1:2"]))
    with pytest.raises(StoreUnavailable, match=r"127.0.0.1:\d: UNAVAILABLE.*; 127.0.0.1:\d: UNAVAILABLE"):
        await client.header()
    await client.close()


async def test_etcd_without_space_is_reported(tmp_path: Path) -> None:
    async with local_etcd(tmp_path / "etcd", arguments=["--quota-backend-bytes=200000"]) as etcd:
        store = await Store.connect([etcd.endpoint], "c")
        with pytest.raises(StoreUnavailable, match="space exceeded; compact, defragment"):
            for number in range(1_000):
                await store.put(f"profiles/{number}", bytes(50_000))
        # Existing data can be read and leases renewed, so members stay registered.
        assert await store.get("profiles/0") == bytes(50_000)
        await store.close()


async def test_a_member_whose_host_name_moved_is_found(etcd: str, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("")
    unshare = ["unshare", "--mount"]
    if await asyncio.to_thread(subprocess.call, [*unshare, "mount", "--bind", str(hosts), "/etc/hosts"]):
        pytest.skip("needs a mount namespace of its own (root)")
    script = [sys.executable, "-m", "tests.store.moved_member", str(hosts), str(free_port()), etcd]
    ended = await asyncio.to_thread(
        subprocess.run, [*unshare, *script], capture_output=True, text=True, timeout=WAIT_S
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
