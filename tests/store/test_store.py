"""The store on a real etcd, killed and restarted under it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tailrace.service.etcd import local_etcd
from tailrace.store.registration import register
from tailrace.store.store import TOMBSTONES, Store, StoreUnavailable
from tests.store.waiting import until


async def test_values(store: Store) -> None:
    assert await store.get("config") is None
    await store.put("pools/a", b"prefill")
    await store.put("pools/b", b"decode")
    await store.put("policy", b"least_loaded")
    assert await store.get("pools/a") == b"prefill"
    assert await store.get_prefix("pools/") == {"pools/a": b"prefill", "pools/b": b"decode"}
    await store.delete("pools/a")
    await store.delete("pools/a")
    assert await store.get_prefix("pools/") == {"pools/b": b"decode"}


async def test_clusters_do_not_see_each_other(etcd: str, store: Store, cluster: str) -> None:
    other = await Store.connect([etcd], f"{cluster}-other")
    await other.put("policy", b"x")
    assert await store.get_prefix("") == {}
    await other.close()


async def test_compare_and_swap(store: Store) -> None:
    assert await store.compare_and_swap("stages", None, b"1")
    assert not await store.compare_and_swap("stages", None, b"2")
    assert not await store.compare_and_swap("stages", b"0", b"2")
    assert await store.compare_and_swap("stages", b"1", b"2")
    assert await store.get("stages") == b"2"
    assert not await store.compare_and_delete("stages", b"1")
    assert await store.compare_and_delete("stages", b"2")
    assert await store.get("stages") is None


async def test_of_many_swaps_one_wins(store: Store) -> None:
    await store.put("stages", b"0")
    won = await asyncio.gather(*(store.compare_and_swap("stages", b"0", b"%d" % n) for n in range(1, 20)))
    assert sum(won) == 1


async def test_watch_begins_with_what_is_there(store: Store) -> None:
    await store.put("pools/a", b"prefill")
    watch = store.watch_prefix("pools/")
    assert await anext(watch) == {"pools/a": b"prefill"}
    await store.put("pools/b", b"decode")
    assert await anext(watch) == {"pools/a": b"prefill", "pools/b": b"decode"}
    await store.delete("pools/a")
    assert await anext(watch) == {"pools/b": b"decode"}
    await watch.aclose()


async def test_watch_of_an_empty_prefix_says_so(store: Store) -> None:
    watch = store.watch_prefix("instances/")
    assert await anext(watch) == {}
    await watch.aclose()


async def test_withdrawal_leaves_word_and_a_new_registration_takes_it_back(store: Store) -> None:
    registration = await register(store, "instances/a", b"one")
    assert await store.get("instances/a") == b"one"
    await registration.update(b"two")
    assert await store.get("instances/a") == b"two"
    await registration.withdraw()
    assert await store.get("instances/a") is None
    assert await store.get(f"{TOMBSTONES}instances/a") == b"two"
    await register(store, "instances/a", b"three")
    assert await store.get(f"{TOMBSTONES}instances/a") is None


async def test_lease_of_a_dead_process_expires(etcd: str, store: Store, cluster: str) -> None:
    """The lease is granted and never renewed, as by a process that died at once."""
    lease = await store.grant_lease(2)
    await store.put_leased("instances/a", b"one", lease)
    await until(store.watch_prefix("instances/"), lambda mapping: not mapping)
    assert not await store.renew_lease(lease)


async def test_registration_comes_back_after_its_lease_was_lost(store: Store) -> None:
    registration = await register(store, "instances/a", b"one", ttl_s=2)
    watch = store.watch_prefix("instances/")
    await until(watch, lambda mapping: "instances/a" in mapping)
    await store.revoke_lease(registration._lease)
    await until(watch, lambda mapping: not mapping)
    await until(watch, lambda mapping: mapping == {"instances/a": b"one"})
    await watch.aclose()


async def test_a_name_that_another_took_is_left_to_it(etcd: str, store: Store, cluster: str) -> None:
    registration = await register(store, "instances/a", b"old", ttl_s=2)
    other = await Store.connect([etcd], cluster)
    await register(other, "instances/a", b"new", ttl_s=2)
    await store.revoke_lease(registration._lease)
    await registration._renew()
    assert await store.get("instances/a") == b"new"
    await registration.withdraw()
    assert await store.get("instances/a") == b"new"
    assert await store.get(f"{TOMBSTONES}instances/a") is None
    await other.close()


@pytest.mark.parametrize("endpoints", [[], ["nonsense"], ["host:"], [":2379"]])
async def test_bad_endpoint(endpoints: list[str]) -> None:
    with pytest.raises(ValueError):
        await Store.connect(endpoints, "default")


async def test_etcd_killed_and_restarted_on_its_data(tmp_path: Path) -> None:
    async with local_etcd(tmp_path / "etcd") as etcd:
        store = await Store.connect([etcd.endpoint, etcd.endpoint.replace("127.0.0.1", "localhost")], "c")
        await register(store, "instances/a", b"one", ttl_s=2)
        watch = store.watch_prefix("")
        assert await anext(watch) == {"instances/a": b"one"}
        etcd.kill()
        with pytest.raises(StoreUnavailable):
            await store.get("policy")
        with pytest.raises(StoreUnavailable):
            await store.compare_and_swap("policy", None, b"x")
        await etcd.start()
        other = await Store.connect([etcd.endpoint], "c")
        await other.put("policy", b"after")
        await until(watch, lambda m: m == {"instances/a": b"one", "policy": b"after"})
        await watch.aclose()
        await other.close()
        await store.close()


async def test_etcd_restarted_without_its_data(tmp_path: Path) -> None:
    """Revisions begin anew: a watch that waits for the next one of the old history would wait for ever."""
    async with local_etcd(tmp_path / "first") as etcd:
        store = await Store.connect([etcd.endpoint], "c")
        await register(store, "instances/a", b"one", ttl_s=2)
        for n in range(50):
            await store.put("policy", b"%d" % n)
        watch = store.watch_prefix("")
        await anext(watch)
        etcd.kill()
        async with local_etcd(tmp_path / "second", etcd.port):
            await until(watch, lambda m: m == {"instances/a": b"one"})
            await store.put("policy", b"new")
            await until(watch, lambda m: m.get("policy") == b"new")
        await watch.aclose()
        await store.close()


async def test_frozen_etcd_is_noticed(tmp_path: Path) -> None:
    async with local_etcd(tmp_path / "etcd") as etcd:
        store = await Store.connect([etcd.endpoint], "c")
        etcd.freeze()
        with pytest.raises(StoreUnavailable):
            await store.get("policy")
        etcd.thaw()
        assert await store.get("policy") is None
        await store.close()


async def test_an_update_leaves_a_name_that_another_took_to_it(etcd: str, store: Store, cluster: str) -> None:
    registration = await register(store, "instances/a", b"old")
    told: list[bytes] = []
    registration.on_replaced(told.append)
    other = await Store.connect([etcd], cluster)
    await register(other, "instances/a", b"new")
    await registration.update(b"old, draining")
    assert await store.get("instances/a") == b"new"
    assert told == [b"new"]
    await registration._renew()
    assert told == [b"new"], "each is told once"
    await other.close()
    await registration._renew()
    assert await store.get("instances/a") == b"old, draining", "taken back once it is free"
