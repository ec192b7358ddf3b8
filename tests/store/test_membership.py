"""Membership with a real etcd: suspicion, withdrawal, outages."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tailrace.address import parse_endpoints
from tailrace.cluster import Pool, Stage
from tailrace.model_identity import ModelIdentity
from tailrace.records import (
    InstanceRecord,
    PolicyRecord,
    ServiceRecord,
    StageRecord,
)
from tailrace.rollout.record import RolloutRecord, RolloutState
from tailrace.slo import Slo
from tailrace.store import client as store_client
from tailrace.store import membership as membership_module
from tailrace.store.client import EtcdClient
from tailrace.store.etcd_api import TXN, delete_op, put_op
from tailrace.store.membership import Membership, front_end_facts
from tailrace.store.registration import register
from tailrace.store.store import Store
from tailrace.telemetry.incidents import UNREADABLE, UNREADABLE_NOW
from tailrace.v1 import etcd_pb2
from tests.harness.local_etcd import local_etcd
from tests.store.waiting import wait_for_members
from tests.waiting import WAIT_S


def instance(name: str, incarnation: str = "1") -> InstanceRecord:
    """Return an instance's record."""
    return InstanceRecord(
        instance_id=name,
        incarnation=incarnation,
        address="127.0.0.1:1",
        stream_address="127.0.0.1:1",
        engine="simulated",
        model="tiny",
        model_fingerprint="f",
        model_identity=ModelIdentity("t", "w"),
        block_tokens=16,
        kv_blocks_total=100,
        max_model_len=4096,
        max_num_seqs=64,
        kv_bytes_per_token=8,
        started_s=0.0,
    )


def encoded(name: str, incarnation: str = "1") -> bytes:
    """Return an instance's record as in etcd."""
    return msgspec.json.encode(instance(name, incarnation))


async def test_all_kinds_of_records(store: Store) -> None:
    service = ServiceRecord(kind="scheduler", service_id="s", incarnation="1", address="127.0.0.1:2")
    await store.put("services/scheduler/s", msgspec.json.encode(service))
    await store.put("leader/scheduler", msgspec.json.encode(service))
    await store.put("instances/b", encoded("b"))
    await store.put("instances/a", encoded("a"))
    await store.put("pools/a", b"prefill_to_decode")
    await store.put("drains/b", b"1")
    await store.put("stages", msgspec.json.encode([StageRecord(lo=0, hi=10, instance_ids=["a"])]))
    await store.put("policy", b'{"name": "round_robin"}')
    members = await Membership.start(store)
    assert list(members.instances) == ["a", "b"]
    assert members.instances["a"] == instance("a")
    assert members.services == {("scheduler", "s"): service}
    assert members.leaders == {"scheduler": service}
    assert members.pools == {"a": Pool.PREFILL_TO_DECODE}
    assert members.draining == {"b"}
    assert members.stages == (Stage(0, 10, ("a",)),)
    assert members.policy == PolicyRecord(name="round_robin")
    assert members.suspects == frozenset()
    await members.close()


async def test_policy_and_slos(store: Store) -> None:
    members = await Membership.start(store)
    assert (members.policy, members.slo) == (None, Slo())
    record = PolicyRecord(name="pascal", parameters={"quantum_tokens": 200, "behind_tokens": 1.5})
    await store.put("policy", msgspec.json.encode(record))
    await store.put("slo", msgspec.json.encode(Slo(1.0, None, 0.95)))
    await wait_for_members(members, lambda: members.slo == Slo(1.0, None, 0.95))
    assert members.policy == record
    # A broken record keeps the previous value.
    await store.put("slo", b"{broken")
    await store.put("policy", b"{broken")
    await store.put("instances/a", encoded("a"))
    await wait_for_members(members, lambda: "a" in members.instances)
    assert (members.policy, members.slo) == (record, Slo(1.0, None, 0.95))
    await store.delete("slo")
    await store.delete("policy")
    await wait_for_members(members, lambda: (members.policy, members.slo) == (None, Slo()))
    await members.close()


async def test_unreadable_records_are_skipped(store: Store) -> None:
    await store.put("instances/a", b"{broken")
    await store.put("instances/b", encoded("b"))
    await store.put("pools/b", b"swimming")
    await store.put("stages", b"7")
    members = await Membership.start(store)
    assert list(members.instances) == ["b"]
    assert members.pools == {}
    assert members.stages == ()
    kinds = {"instances record", "pools record", "stages record"}
    assert unreadable_now() == dict.fromkeys(kinds, 1)
    # They are told for as long as they are there, however long ago they were skipped.
    await store.put("policy", b'{"name": "pascal"}')
    await wait_for_members(members, lambda: members.policy is not None)
    assert unreadable_now() == dict.fromkeys(kinds, 1)
    await store.put("pools/b", b"decode")
    await wait_for_members(members, lambda: members.pools == {"b": Pool.DECODE})
    assert unreadable_now() == dict.fromkeys(kinds - {"pools record"}, 1)
    for key in ("instances/a", "stages"):
        revision = await store.delete(key)
    await wait_for_members(members, lambda: members.revision >= revision)
    assert unreadable_now() == {}
    await members.close()


async def test_odd_keys_and_values_are_told_for_as_long_as_they_are_there(
    etcd: str, store: Store, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = EtcdClient(parse_endpoints([etcd]))
    prefix = f"/tailrace/{cluster}/".encode()
    odd_keys = [prefix + b"\xff", prefix + b"instances/\x00"]
    for key in odd_keys:
        await client.call(TXN, etcd_pb2.TxnRequest(success=[put_op(key, b"x")]), "put")
    await store.put("instances/large", bytes(1_000_000))
    options = dict(store_client._CHANNEL_OPTIONS) | {"grpc.max_receive_message_length": 500_000}
    monkeypatch.setattr(store_client, "_CHANNEL_OPTIONS", tuple(options.items()))
    narrow = await Store.connect([etcd], cluster)
    members = await Membership.start(narrow)
    told = {"key in etcd": 2, "value in etcd": 1}
    assert unreadable_now() == told
    await store.put("policy", b'{"name": "pascal"}')
    await wait_for_members(members, lambda: members.policy is not None)
    assert unreadable_now() == told
    await client.call(TXN, etcd_pb2.TxnRequest(success=[delete_op(key) for key in odd_keys]), "delete")
    revision = await store.delete("instances/large")
    await wait_for_members(members, lambda: members.revision >= revision)
    assert unreadable_now() == {}
    await members.close()
    await narrow.close()
    await client.close()


def unreadable_now() -> dict[str, float]:
    """Return how many records of each kind are skipped now."""
    samples = [sample for metric in UNREADABLE_NOW.collect() for sample in metric.samples]
    return {sample.labels["what"]: sample.value for sample in samples if sample.value}


async def test_nothing_in_etcd_stops_the_membership(etcd: str, store: Store, cluster: str) -> None:
    """Neither what was there before, nor what comes: each is skipped, named and counted, the rest goes on."""
    odd = {
        "instances/a": b"\xff\xfe",
        "instances/deep": b"[" * 100_000,
        "instances/other": encoded("a"),
        "instances/": encoded("a"),
        "instances": b"{}",
        "services/scheduler": b'"\xff"',
        "services/a/b/c": b"{}",
        "leader/scheduler": encoded("a"),
        "pools/a": b"\xff",
        "profiles/k": b'{"kind":"k"}',
        "rollouts/tiny": b'{"state":"of a later version"}',
        "adapters/tiny/a": b'{"model":"tiny","name":"b","path":"/a"}',
        "policy": b"\xff",
        "slo": b'{"ttft_s":-1,"tpot_s":null,"qoe":null,"pace_s":null,"admit":null}',
        "stages": b'[{"lo":5,"hi":1,"instance_ids":[]}]',
        "withdrawn/instances/a": b"\xff",
        "": b"x",
        "of a later version/x": bytes(1_000_000),
    }
    client = EtcdClient(parse_endpoints([etcd]))
    keys = (b"\xff\xfe", b"instances/\xff", b"drains/\x00\x1b[2J", b"x" * 2_000)
    members = await Membership.start(store)
    for part in (0, 1):
        before = sum(sample.value for metric in UNREADABLE.collect() for sample in metric.samples)
        for key, value in list(odd.items())[part::2]:
            await store.put(key, value)
        for odd_key in keys[part::2]:
            put = etcd_pb2.TxnRequest(success=[put_op(f"/tailrace/{cluster}/".encode() + odd_key, b"x")])
            await client.call(TXN, put, "put")
        await store.put(f"instances/w{part}", encoded(f"w{part}"))
        # One that follows the changes, and one that starts amid them.
        await wait_for_members(members, lambda part=part: f"w{part}" in members.instances)  # type: ignore[misc]
        other = await Membership.start(store)
        for seen in (members, other):
            assert list(seen.instances) == [f"w{n}" for n in range(part + 1)]
            assert (seen.services, seen.leaders, seen.pools, seen.stages) == ({}, {}, {}, ())
            assert (seen.policy, seen.slo, seen.drained, seen.adapters) == (None, Slo(), frozenset(), {})
        await other.close()
        after = sum(sample.value for metric in UNREADABLE.collect() for sample in metric.samples)
        assert after - before >= 5
    assert members.unread_rollouts == {"tiny"}
    await members.close()
    await client.close()


async def test_a_mistake_in_following_is_counted_and_following_goes_on(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = await Membership.start(store)
    failed = asyncio.Event()
    hold = Membership._hold_vanished

    def fail_once(*arguments: Any) -> None:
        if not failed.is_set():
            failed.set()
            raise ZeroDivisionError
        hold(*arguments)

    monkeypatch.setattr(Membership, "_hold_vanished", fail_once)
    await store.put("instances/a", encoded("a"))
    await wait_for_members(members, lambda: "a" in members.instances)
    assert failed.is_set()
    await members.close()


async def test_more_than_a_message_holds_is_read_page_by_page(etcd: str, store: Store, cluster: str) -> None:
    """Several times gRPC's default limit of 4 MiB, with values next to etcd's own limit among small ones."""
    client = EtcdClient(parse_endpoints([etcd]))
    large = {f"profiles/large{n}": bytes(1_400_000) for n in range(14)}
    for key, value in large.items():
        await store.put(key, value)
    names = [f"w{n:04}" for n in range(1_500)]
    for start in range(0, len(names), 100):
        puts = [
            put_op(f"/tailrace/{cluster}/instances/{n}".encode(), encoded(n)) for n in names[start:][:100]
        ]
        await client.call(TXN, etcd_pb2.TxnRequest(success=puts), "put")
    members = await Membership.start(store)
    assert list(members.instances) == names and members.profiles == {}
    # Changes of that size, too.
    for key, value in large.items():
        await store.put(key, value + b"x")
    await store.put("pools/a", b"decode")
    await wait_for_members(members, lambda: "a" in members.pools)
    assert list(members.instances) == names
    assert len(await store.get_prefix("")) == len(names) + len(large) + 1
    await members.close()
    await client.close()


async def test_a_withdrawn_instance_is_dropped_at_once(store: Store) -> None:
    registration = await register(store, "instances/a", encoded("a"))
    members = await Membership.start(store)
    assert list(members.instances) == ["a"]
    await registration.withdraw()
    await wait_for_members(members, lambda: not members.instances)
    assert not members.suspects
    await members.close()


async def test_a_vanished_instance_is_suspect_then_dropped(store: Store) -> None:
    lease = await store.grant_lease(WAIT_S)
    await store.put_leased("instances/a", encoded("a"), lease)
    members = await Membership.start(store, hold_s=0.3)
    # As when it expires.
    await store.revoke_lease(lease)
    await wait_for_members(members, lambda: members.suspects == {"a"})
    assert list(members.instances) == ["a"]
    await wait_for_members(members, lambda: not members.instances)
    assert not members.suspects
    await members.close()


async def test_a_vanished_instance_that_returns_is_not_suspect(store: Store) -> None:
    await store.put("instances/a", encoded("a"))
    members = await Membership.start(store)
    await store.delete("instances/a")
    await wait_for_members(members, lambda: members.suspects == {"a"})
    await store.put("instances/a", encoded("a", "2"))
    await wait_for_members(members, lambda: not members.suspects)
    assert members.instances["a"].incarnation == "2"
    await members.close()


async def test_an_earlier_withdrawal_does_not_hide_a_vanished_instance(store: Store) -> None:
    first = await register(store, "instances/a", encoded("a", "1"))
    members = await Membership.start(store)
    await first.withdraw()
    await wait_for_members(members, lambda: not members.instances)
    await store.put("instances/a", encoded("a", "2"))
    await wait_for_members(members, lambda: bool(members.instances))
    await store.delete("instances/a")
    await wait_for_members(members, lambda: members.suspects == {"a"})
    await members.close()


async def test_an_unreadable_withdrawal_is_counted_and_none(store: Store) -> None:
    before = UNREADABLE.labels("withdrawn record")._value.get()
    await store.put("instances/a", encoded("a"))
    await store.put("withdrawn/instances/a", b"\xff")
    members = await Membership.start(store)
    await store.delete("instances/a")
    await wait_for_members(members, lambda: members.suspects == {"a"})
    await store.put("pools/b", b"decode")
    await wait_for_members(members, lambda: bool(members.pools))
    assert members.suspects == {"a"}
    assert UNREADABLE.labels("withdrawn record")._value.get() == before + 1
    await members.close()


async def test_an_etcd_outage_changes_nothing(tmp_path: Path) -> None:
    async with local_etcd(tmp_path / "etcd") as etcd:
        store = await Store.connect([etcd.endpoint], "c")
        await register(store, "instances/a", encoded("a"))
        await store.put("policy", b'{"name": "round_robin"}')
        members = await Membership.start(store)
        seen: list[tuple[int, int]] = []
        members.add_listener(lambda: seen.append((len(members.instances), len(members.suspects))))
        etcd.kill()
        await etcd.start()
        await store.put("policy", b'{"name": "least_loaded"}')
        await wait_for_members(members, lambda: members.policy == PolicyRecord(name="least_loaded"))
        assert set(seen) == {(1, 0)}
        await members.close()
        await store.close()


async def test_a_failing_listener_does_not_affect_others(store: Store) -> None:
    members = await Membership.start(store)

    def fail() -> None:
        raise ZeroDivisionError("an error in the listener")

    members.add_listener(fail)
    for name in ("a", "b"):
        await store.put(f"instances/{name}", encoded(name))
        await wait_for_members(members, lambda name=name: name in members.instances)  # type: ignore[misc]
    await members.close()


async def test_a_rollout_drains_instances_while_they_run_the_old_model(store: Store) -> None:
    old, new = ModelIdentity("t", "old"), ModelIdentity("t", "new")
    rollout = RolloutRecord(
        model="/models/m",
        before=old.key,
        new=new.key,
        state=RolloutState.DRAINING,
        draining=["a", "gone"],
        begun_s=1.0,
    )
    for name in ("a", "b"):
        await store.put(f"instances/{name}", encoded_with_model(name, old))
    # Served model names can contain slashes.
    await store.put("rollouts//models/m", msgspec.json.encode(rollout))
    members = await Membership.start(store)
    assert members.rollouts == {"/models/m": rollout}
    assert members.draining == members.leaving == {"a"}
    assert not members.drained
    # An instance drained by an operator is not leaving because of the rollout.
    await store.put("drains/a", b"1")
    await wait_for_members(members, lambda: not members.leaving)
    assert members.draining == {"a"}
    await store.delete("drains/a")
    await wait_for_members(members, lambda: members.leaving == {"a"})
    # A front end serves the old model by another name and must keep its instances.
    front = ServiceRecord(
        kind="frontend",
        service_id="f",
        incarnation="1",
        address="127.0.0.1:2",
        model_name="other",
        model_key=old.key,
    )
    await store.put("services/frontend/f", msgspec.json.encode(front))
    await wait_for_members(members, lambda: not members.draining)
    await store.delete("services/frontend/f")
    await wait_for_members(members, lambda: members.draining == {"a"})
    # A broken record keeps the previous value.
    await store.put("rollouts//models/m", b"{broken")
    # After a restart with the new model, it no longer drains.
    await store.put("instances/a", encoded_with_model("a", new, "2"))
    await wait_for_members(members, lambda: not members.draining)
    assert members.rollouts == {"/models/m": rollout}
    assert not members.unread_rollouts
    # A process that starts now does not know the previous value.
    newcomer = await Membership.start(store)
    assert not newcomer.rollouts
    assert newcomer.unread_rollouts == {"/models/m"}
    await newcomer.close()
    await store.delete("rollouts//models/m")
    await wait_for_members(members, lambda: not members.rollouts)
    await members.close()


async def test_changes_that_come_together_are_applied_together(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for a fleet so large that each change takes long."""
    monkeypatch.setattr(membership_module, "_REST", 1e6)
    members, applied = await Membership.start(store), 0

    def count() -> None:
        nonlocal applied
        applied += 1

    members.add_listener(count)
    names = [f"i{n}" for n in range(200)]
    # However long each takes.
    await asyncio.gather(*(store.put(f"pools/{name}", b"decode") for name in names))
    await wait_for_members(members, lambda: len(members.pools) == len(names))
    assert applied < len(names) / 2
    await members.close()


def encoded_with_model(name: str, identity: ModelIdentity, incarnation: str = "1") -> bytes:
    """Return a record with this model as in etcd."""
    return msgspec.json.encode(msgspec.structs.replace(instance(name, incarnation), model_identity=identity))


async def test_a_write_of_the_same_value_is_followed(store: Store) -> None:
    """Whoever sets a setting to what it is already waits for the revision of that write."""
    await store.put("policy", b'{"name": "pascal"}')
    membership = await Membership.start(store)
    try:
        before = membership.revision
        await store.put("policy", b'{"name": "pascal"}')
        await wait_for_members(membership, lambda: membership.revision > before)
    finally:
        await membership.close()


def test_rollouts_see_no_front_end_that_names_no_model() -> None:
    named = ServiceRecord(kind="frontend", service_id="f", incarnation="1", address="h:1", model_name="chat")
    unnamed = msgspec.structs.replace(named, service_id="g", model_name="")
    services = {("frontend", record.service_id): record for record in (named, unnamed)}
    assert list(front_end_facts(services)) == ["f"]
