"""Membership on a real etcd: suspicion, withdrawal, etcd away."""

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
from tests.store.waiting import member_state


def instance(name: str, incarnation: str = "1") -> InstanceRecord:
    """An instance's record."""
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
    """An instance's record as in etcd."""
    return msgspec.json.encode(instance(name, incarnation))


async def test_everything_that_is_kept(store: Store) -> None:
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
    await member_state(members, lambda: members.slo == Slo(1.0, None, 0.95))
    assert members.policy == record
    # What a broken record replaced goes on to hold.
    await store.put("slo", b"{broken")
    await store.put("policy", b"{broken")
    await store.put("instances/a", encoded("a"))
    await member_state(members, lambda: "a" in members.instances)
    assert (members.policy, members.slo) == (record, Slo(1.0, None, 0.95))
    await store.delete("slo")
    await store.delete("policy")
    await member_state(members, lambda: (members.policy, members.slo) == (None, Slo()))
    await members.close()


def test_a_policy_at_its_defaults_is_stored_as_every_version_reads_it() -> None:
    plain = PolicyRecord(name="pascal")
    assert encode_policy(plain) == b"pascal"
    assert decode_policy(b"pascal") == plain
    assert decode_policy(b"") is None


async def test_what_cannot_be_read_is_left_out(store: Store) -> None:
    await store.put("instances/a", b"{broken")
    await store.put("instances/b", encoded("b"))
    await store.put("pools/b", b"swimming")
    await store.put("stages", b"7")
    members = await Membership.start(store)
    assert list(members.instances) == ["b"]
    assert members.pools == {}
    assert members.stages == ()
    await members.close()


async def test_withdrawn_is_dropped_at_once(store: Store) -> None:
    registration = await register(store, "instances/a", encoded("a"))
    members = await Membership.start(store)
    assert list(members.instances) == ["a"]
    await registration.withdraw()
    await member_state(members, lambda: not members.instances)
    assert not members.suspects
    await members.close()


async def test_vanished_is_held_then_dropped(store: Store) -> None:
    lease = await store.grant_lease(2)
    await store.put_leased("instances/a", encoded("a"), lease)
    members = await Membership.start(store, hold_s=0.3)
    await member_state(members, lambda: members.suspects == {"a"})
    assert list(members.instances) == ["a"]
    await member_state(members, lambda: not members.instances)
    assert not members.suspects
    await members.close()


async def test_vanished_that_returns_is_cleared(store: Store) -> None:
    await store.put("instances/a", encoded("a"))
    members = await Membership.start(store)
    await store.delete("instances/a")
    await member_state(members, lambda: members.suspects == {"a"})
    await store.put("instances/a", encoded("a", "2"))
    await member_state(members, lambda: not members.suspects)
    assert members.instances["a"].incarnation == "2"
    await members.close()


async def test_an_older_withdrawal_does_not_hide_that_the_next_run_vanished(store: Store) -> None:
    first = await register(store, "instances/a", encoded("a", "1"))
    members = await Membership.start(store)
    await first.withdraw()
    await member_state(members, lambda: not members.instances)
    await store.put("instances/a", encoded("a", "2"))
    await member_state(members, lambda: bool(members.instances))
    await store.delete("instances/a")
    await member_state(members, lambda: members.suspects == {"a"})
    await members.close()


async def test_etcd_away_changes_nothing(tmp_path: Path) -> None:
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
        await member_state(members, lambda: members.policy == PolicyRecord(name="least_loaded"))
        assert set(seen) == {(1, 0)}
        await members.close()
        await store.close()


async def test_a_listener_that_fails_keeps_nobody_from_hearing(store: Store) -> None:
    members = await Membership.start(store)

    def fail() -> None:
        raise ZeroDivisionError("its own mistake")

    members.add_listener(fail)
    for name in ("a", "b"):
        await store.put(f"instances/{name}", encoded(name))
        await member_state(members, lambda name=name: name in members.instances)  # type: ignore[misc]
    await members.close()


async def test_a_rollout_drains_instances_as_long_as_they_run_what_goes(store: Store) -> None:
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
        await store.put(f"instances/{name}", running(name, old))
    # Names that users call models may have slashes.
    await store.put("rollouts//models/m", msgspec.json.encode(rollout))
    members = await Membership.start(store)
    assert members.rollouts == {"/models/m": rollout}
    assert members.draining == members.leaving == {"a"}
    assert not members.drained
    # What an operator drains is not the rollout's to give to anybody.
    await store.put("drains/a", b"1")
    await member_state(members, lambda: not members.leaving)
    assert members.draining == {"a"}
    await store.delete("drains/a")
    await member_state(members, lambda: members.leaving == {"a"})
    # Somebody comes who calls the old model by another name: it must not be left without instances.
    front = ServiceRecord(
        kind="frontend",
        service_id="f",
        incarnation="1",
        address="127.0.0.1:2",
        model_name="other",
        model_key=old.key,
    )
    await store.put("services/frontend/f", msgspec.json.encode(front))
    await member_state(members, lambda: not members.draining)
    await store.delete("services/frontend/f")
    await member_state(members, lambda: members.draining == {"a"})
    # What a broken record replaced goes on to hold.
    await store.put("rollouts//models/m", b"{broken")
    # Started anew with the new model: it drains no more.
    await store.put("instances/a", running("a", new, "2"))
    await member_state(members, lambda: not members.draining)
    assert members.rollouts == {"/models/m": rollout}
    assert not members.unread_rollouts
    # Who starts now cannot know what it said.
    late = await Membership.start(store)
    assert not late.rollouts
    assert late.unread_rollouts == {"/models/m"}
    await late.close()
    await store.delete("rollouts//models/m")
    await member_state(members, lambda: not members.rollouts)
    await members.close()


def running(name: str, identity: ModelIdentity, incarnation: str = "1") -> bytes:
    """As in etcd."""
    return msgspec.json.encode(msgspec.structs.replace(instance(name, incarnation), model_identity=identity))
