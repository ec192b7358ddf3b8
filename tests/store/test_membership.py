"""Membership with a real etcd: suspicion, withdrawal, outages."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tailrace.cluster import Pool, Stage
from tailrace.model_identity import ModelIdentity
from tailrace.records import (
    InstanceRecord,
    PolicyRecord,
    ServiceRecord,
    StageRecord,
    decode_policy,
    encode_policy,
    encode_slo,
)
from tailrace.rollout.record import RolloutRecord, RolloutState
from tailrace.service.etcd import local_etcd
from tailrace.slo import Slo
from tailrace.store.membership import Membership
from tailrace.store.registration import register
from tailrace.store.store import Store
from tests.store.waiting import wait_for_members


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
    await store.put("policy", b"round_robin")
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
    await store.put("policy", encode_policy(record))
    await store.put("slo", encode_slo(Slo(1.0, None, 0.95)))
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


def test_a_policy_with_defaults_is_stored_in_the_oldest_format() -> None:
    plain = PolicyRecord(name="pascal")
    assert encode_policy(plain) == b"pascal"
    assert decode_policy(b"pascal") == plain
    assert decode_policy(b"") is None


async def test_unreadable_records_are_skipped(store: Store) -> None:
    await store.put("instances/a", b"{broken")
    await store.put("instances/b", encoded("b"))
    await store.put("pools/b", b"swimming")
    await store.put("stages", b"7")
    members = await Membership.start(store)
    assert list(members.instances) == ["b"]
    assert members.pools == {}
    assert members.stages == ()
    await members.close()


async def test_a_withdrawn_instance_is_dropped_at_once(store: Store) -> None:
    registration = await register(store, "instances/a", encoded("a"))
    members = await Membership.start(store)
    assert list(members.instances) == ["a"]
    await registration.withdraw()
    await wait_for_members(members, lambda: not members.instances)
    assert not members.suspects
    await members.close()


async def test_a_vanished_instance_is_suspect_then_dropped(store: Store) -> None:
    lease = await store.grant_lease(2)
    await store.put_leased("instances/a", encoded("a"), lease)
    members = await Membership.start(store, hold_s=0.3)
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


async def test_an_etcd_outage_changes_nothing(tmp_path: Path) -> None:
    async with local_etcd(tmp_path / "etcd") as etcd:
        store = await Store.connect([etcd.endpoint], "c")
        await register(store, "instances/a", encoded("a"), ttl_s=2)
        await store.put("policy", b"round_robin")
        members = await Membership.start(store)
        seen: list[tuple[int, int]] = []
        members.add_listener(lambda: seen.append((len(members.instances), len(members.suspects))))
        etcd.kill()
        await etcd.start()
        await store.put("policy", b"least_loaded")
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


def encoded_with_model(name: str, identity: ModelIdentity, incarnation: str = "1") -> bytes:
    """Return a record with this model as in etcd."""
    return msgspec.json.encode(msgspec.structs.replace(instance(name, incarnation), model_identity=identity))
