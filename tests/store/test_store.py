"""The store with a real etcd, including its restarts."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from tailrace.store.client import LeaseExpired
from tailrace.store.registration import register
from tailrace.store.store import SWAPS_MAX, TOMBSTONES, LeasedValue, Store, StoreUnavailable, Swap
from tests.harness.local_etcd import local_etcd
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


async def test_one_of_many_concurrent_swaps_succeeds(store: Store) -> None:
    await store.put("stages", b"0")
    won = await asyncio.gather(*(store.compare_and_swap("stages", b"0", b"%d" % n) for n in range(1, 20)))
    assert sum(revision > 0 for revision in won) == 1


async def test_swaps_in_one_transaction_are_each_carried_out_if_they_find_what_they_expect(
    store: Store,
) -> None:
    for key in "abcd":
        await store.put(f"pools/{key}", b"1")
    swaps = {
        "pools/a": Swap(b"1", b"2"),
        "pools/b": Swap(b"0", b"2"),
        "pools/c": Swap(None, b"2"),
        "pools/d": Swap(b"1", None),
        "pools/e": Swap(None, b"2"),
        "pools/f": Swap(b"1", b"2"),
        "pools/g": Swap(None, None),
    }
    carried_out = await store.compare_and_swap_all(swaps)
    assert carried_out == {f"pools/{key}" for key in "adeg"}
    written = {"pools/a": b"2", "pools/b": b"1", "pools/c": b"1", "pools/e": b"2"}
    assert await store.get_prefix("pools/") == written
    assert await store.compare_and_swap_all({"pools/a": Swap(b"1", b"3")}) == frozenset()
    assert await store.compare_and_swap_all({}) == frozenset()


async def test_as_many_swaps_as_etcd_allows_are_one_change(store: Store) -> None:
    swaps = {f"pools/{number}": Swap(None, b"decode") for number in range(SWAPS_MAX)}
    assert await store.compare_and_swap_all(swaps) == swaps.keys()
    # Keys that one change wrote have its revision.
    written = await store._read_all(swaps, "the pools")
    assert len({present.mod_revision for present in written.values() if present is not None}) == 1
    assert await store.get_prefix("pools/") == dict.fromkeys(swaps, b"decode")


async def test_swaps_that_overlap_are_carried_out_by_one_of_their_writers(store: Store) -> None:
    keys = [f"pools/{number}" for number in range(20)]
    # Each writer shares its keys with those before and after it.
    writers = [{key: Swap(None, b"%d" % n) for key in (keys * 2)[n : n + 10]} for n in range(20)]
    carried_out = await asyncio.gather(*map(store.compare_and_swap_all, writers))
    written = await store.get_prefix("pools/")
    assert sum(map(len, carried_out)) == len(keys)
    assert written == {key: b"%d" % n for n, swapped in enumerate(carried_out) for key in swapped}


async def test_a_watch_begins_with_the_present_values(store: Store) -> None:
    await store.put("pools/a", b"prefill")
    watch = store.watch_prefix("pools/")
    assert await anext(watch) == {"pools/a": b"prefill"}
    await store.put("pools/b", b"decode")
    assert await anext(watch) == {"pools/a": b"prefill", "pools/b": b"decode"}
    await store.delete("pools/a")
    assert await anext(watch) == {"pools/b": b"decode"}
    await watch.aclose()


async def test_a_watch_of_an_empty_prefix_begins_empty(store: Store) -> None:
    watch = store.watch_prefix("instances/")
    assert await anext(watch) == {}
    await watch.aclose()


async def test_withdrawal_leaves_a_tombstone_that_registration_removes(store: Store) -> None:
    registration = await register(store, "instances/a", b"one")
    assert await store.get("instances/a") == b"one"
    await registration.update(b"two")
    assert await store.get("instances/a") == b"two"
    await registration.withdraw()
    assert await store.get("instances/a") is None
    assert await store.get(f"{TOMBSTONES}instances/a") == b"two"
    await register(store, "instances/a", b"three")
    assert await store.get(f"{TOMBSTONES}instances/a") is None


async def test_the_lease_of_a_dead_process_expires(etcd: str, store: Store, cluster: str) -> None:
    """The lease is granted but never renewed, as if the process had died."""
    while True:
        lease = await store.grant_lease(2)
        # On a busy machine it may expire before.
        with contextlib.suppress(LeaseExpired):
            await store.put_leased("instances/a", b"one", lease)
            break
    await until(store.watch_prefix("instances/"), lambda mapping: not mapping)
    assert not await store.renew_lease(lease)


async def test_a_registration_is_restored_after_losing_its_lease(store: Store) -> None:
    registration = await register(store, "instances/a", b"one", ttl_s=2)
    watch = store.watch_prefix("instances/")
    await until(watch, lambda mapping: "instances/a" in mapping)
    # Not before the watch has shown it: it merges changes that come together.
    async with registration._writing:
        await store.revoke_lease(registration._lease)
        await until(watch, lambda mapping: not mapping)
    await until(watch, lambda mapping: mapping == {"instances/a": b"one"})
    await watch.aclose()


async def test_a_name_taken_by_another_process_is_left_alone(etcd: str, store: Store, cluster: str) -> None:
    registration = await register(store, "instances/a", b"old")
    other = await Store.connect([etcd], cluster)
    await register(other, "instances/a", b"new")
    await store.revoke_lease(registration._lease)
    await registration._renew()
    assert await store.get("instances/a") == b"new"
    await registration.withdraw()
    assert await store.get("instances/a") == b"new"
    assert await store.get(f"{TOMBSTONES}instances/a") is None
    await other.close()


@pytest.mark.parametrize("endpoints", [[], ["nonsense"], ["host:"], [":2379"]])
async def test_invalid_endpoints_are_errors(endpoints: list[str]) -> None:
    with pytest.raises(ValueError):
        await Store.connect(endpoints, "default")


async def test_etcd_killed_and_restarted_on_its_data(tmp_path: Path) -> None:
    async with local_etcd(tmp_path / "etcd") as etcd:
        store = await Store.connect([etcd.endpoint, etcd.endpoint.replace("127.0.0.1", "localhost")], "c")
        await register(store, "instances/a", b"one", ttl_s=2)
        watch = store.watch_prefix("")
        await until(watch, lambda m: m == {"instances/a": b"one"})
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
    """Revisions restart: a watch waiting for the next revision of the old history would never see one."""
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


async def test_a_frozen_etcd_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with local_etcd(tmp_path / "etcd") as etcd:
        store = await Store.connect([etcd.endpoint], "c")
        etcd.freeze()
        with monkeypatch.context() as patch, pytest.raises(StoreUnavailable):
            patch.setattr("tailrace.store.client._DEADLINE_S", 3.0)
            await store.get("policy")
        etcd.thaw()
        assert await store.get("policy") is None
        await store.close()


async def test_a_value_without_a_lease_does_not_replace_a_registration(store: Store) -> None:
    registration = await register(store, "instances/a", b"old")
    replaced_by: list[bytes] = []
    registration.on_replaced(replaced_by.append)
    await store.put("instances/a", b"\xff")
    await registration._renew()
    held = await store.get_leased("instances/a")
    assert held is not None and held.value == b"old" and held.lease
    await store.put("instances/a", b"\xfe")
    await registration.update(b"new")
    assert await store.get_leased("instances/a") == LeasedValue(b"new", held.lease)
    assert replaced_by == []


async def test_an_update_does_not_overwrite_a_name_taken_by_another_process(
    etcd: str, store: Store, cluster: str
) -> None:
    registration = await register(store, "instances/a", b"old")
    replaced_by: list[bytes] = []
    registration.on_replaced(replaced_by.append)
    other = await Store.connect([etcd], cluster)
    await register(other, "instances/a", b"new")
    await registration.update(b"old, draining")
    assert await store.get("instances/a") == b"new"
    assert replaced_by == [b"new"]
    await registration._renew()
    assert replaced_by == [b"new"], "each replacement is reported once"
    await other.close()
    await registration._renew()
    assert await store.get("instances/a") == b"old, draining", "registered again once it is free"
