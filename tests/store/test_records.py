"""Records in etcd that nobody of this version wrote: read, or refused with the reason, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tailrace.cluster import Pool
from tailrace.model_identity import ModelIdentity
from tailrace.records import (
    AdapterRecord,
    InstanceRecord,
    PolicyRecord,
    ProfileRecord,
    ServiceRecord,
    StageRecord,
)
from tailrace.rollout.record import RolloutRecord, RolloutState
from tailrace.slo import Slo
from tailrace.store.etcd_roles import etcd_rights
from tailrace.store.reading import (
    VALUE_BYTES,
    UnreadableRecord,
    read_named,
    read_policy,
    read_pool,
    read_slo,
    read_stages,
)
from tailrace.store.store import Store
from tailrace.telemetry.incidents import UNREADABLE_KINDS
from tests.fuzz.record_inputs import Way, record_input
from tests.fuzz.records import PROFILE, make_targets
from tests.store.test_membership import encoded, instance

SERVICE = ServiceRecord(kind="scheduler", service_id="s", incarnation="1", address="127.0.0.1:2")
ROLLOUT = RolloutRecord(model="tiny", before="a", new="b", state=RolloutState.DRAINING, begun_s=1.0)
ADAPTER = AdapterRecord(model="/models/m", name="a/b c", path="/adapters/a")

# What is at each key, as this version writes it, and how it is read.
READERS: dict[str, tuple[bytes, Callable[[bytes], object]]] = {
    "instances/a": (encoded("a"), lambda value: read_named(InstanceRecord, "instances/a", value)),
    "services/scheduler/s": (
        msgspec.json.encode(SERVICE),
        lambda value: read_named(ServiceRecord, "services/scheduler/s", value),
    ),
    "leader/scheduler": (
        msgspec.json.encode(SERVICE),
        lambda value: read_named(ServiceRecord, "leader/scheduler", value),
    ),
    "rollouts/tiny": (
        msgspec.json.encode(ROLLOUT),
        lambda value: read_named(RolloutRecord, "rollouts/tiny", value),
    ),
    ADAPTER.key: (
        msgspec.json.encode(ADAPTER),
        lambda value: read_named(AdapterRecord, ADAPTER.key, value),
    ),
    "profiles/k": (
        msgspec.json.encode(PROFILE),
        lambda value: read_named(ProfileRecord, "profiles/k", value),
    ),
    "policy": (b'{"name": "pascal", "parameters": {"quantum_tokens": 5}}', read_policy),
    "slo": (msgspec.json.encode(Slo(1.0, 0.2, 0.9, 0.1, 2.0)), read_slo),
    "stages": (
        b'[{"lo":0,"hi":10,"instance_ids":["a"]},{"lo":10,"hi":20,"instance_ids":["b"]}]',
        read_stages,
    ),
    "pools/a": (b"decode", read_pool),
}


@pytest.mark.parametrize("key", READERS)
def test_what_this_version_writes_is_read(key: str) -> None:
    value, read = READERS[key]
    assert read(value)


# Values of the kinds that JSON has, with those that no field allows.
_LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["\u0000", "\u001b[31m", "x" * 5000])
)
_VALUES = st.recursive(
    _LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8
)


def _damaged(value: bytes) -> st.SearchStrategy[bytes]:
    """Return changed bytes of a value: flipped, cut, repeated."""

    def change(cut: tuple[int, int, bytes]) -> bytes:
        start, end, new = cut
        return value[:start] + new + value[end:]

    at = st.integers(0, len(value))
    return st.tuples(at, at, st.binary(max_size=4)).map(change)


def _mutated(value: bytes) -> st.SearchStrategy[bytes]:
    """Return a record with one field of any depth replaced, or with fields of a later version."""
    try:
        record = msgspec.json.decode(value)
    except msgspec.DecodeError:
        return st.just(value)

    def change(drawn: tuple[int, object, bool]) -> bytes:
        copy = msgspec.json.decode(value)
        number, new, added = drawn
        places = list(_places(copy))
        if not places:
            return value
        holder, name = places[number % len(places)]
        if added and isinstance(holder, dict):
            holder["of_a_later_version"] = new
        else:
            holder[name] = new
        try:
            return msgspec.json.encode(copy)
        except (msgspec.MsgspecError, OverflowError, ValueError, UnicodeEncodeError):
            return value

    del record
    return st.tuples(st.integers(0, 200), _VALUES, st.booleans()).map(change)


def _places(value: object) -> Iterator[tuple[Any, Any]]:
    """Yield every place in nested lists and dictionaries, as (container, key)."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in list(items):
        yield value, name
        yield from _places(inner)


_INPUTS = st.sampled_from(sorted(READERS)).flatmap(
    lambda key: st.tuples(
        st.just(key),
        st.binary(max_size=64)
        | st.sampled_from(
            [b"", b"\xff\xfe", b"{", b"[" * 100_000, b'{"a":' * 50_000, b"null", b"1e999", b"-0"]
        )
        | _damaged(READERS[key][0])
        | _mutated(READERS[key][0])
        | _VALUES.map(lambda value: repr(value).encode(errors="replace")),
    )
)


@given(_INPUTS)
@example(("instances/a", encoded("a").replace(b'"1"', b'"\xff"')))
def test_any_bytes_are_read_or_refused(given_input: tuple[str, bytes]) -> None:
    key, value = given_input
    try:
        record = READERS[key][1](value)
    except UnreadableRecord as error:
        assert str(error)
        return
    # What was read is finite and in range, so that nothing that plans with it can stumble.
    if isinstance(record, Slo):
        assert all(
            v is None or (math.isfinite(v) and v > 0) for v in (record.ttft_s, record.tpot_s, record.qoe)
        )
    if isinstance(record, InstanceRecord):
        assert record.instance_id == "a" and record.block_tokens >= 1
        assert 0 <= record.kv_blocks_total <= 2**53
    if isinstance(record, tuple):
        assert all(0 <= stage.lo < stage.hi for stage in record)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("instances/b", encoded("a")),
        ("instances/a", encoded("a").replace(b'"block_tokens":16', b'"block_tokens":0')),
        ("instances/a", encoded("a").replace(b'"kv_blocks_total":100', b'"kv_blocks_total":-1')),
        ("instances/a", encoded("a").replace(b'"max_model_len":4096', b'"max_model_len":1e999')),
        ("instances/a", encoded("a").replace(b'"block_tokens":16', b'"block_tokens":4294967296')),
        ("instances/a", encoded("a") + b" " * VALUE_BYTES),
        ("leader/monitor", msgspec.json.encode(SERVICE)),
        ("services/scheduler/t", msgspec.json.encode(SERVICE)),
        ("rollouts/other", msgspec.json.encode(ROLLOUT)),
        ("rollouts/tiny", msgspec.json.encode(ROLLOUT).replace(b"draining", b"shadowing")),
        ("adapters/%2Fmodels%2Fm/a", msgspec.json.encode(ADAPTER)),
        (ADAPTER.key, msgspec.json.encode(ADAPTER).replace(b"/adapters/a", b"x" * 5_000)),
        (ADAPTER.key, msgspec.json.encode(ADAPTER).replace(b"/adapters/a", b"")),
        ("profiles/other", msgspec.json.encode(PROFILE)),
    ],
)
def test_records_at_odds_with_their_key_or_range_are_refused(key: str, value: bytes) -> None:
    with pytest.raises(UnreadableRecord):
        read_named(InstanceRecord, key, value)
    with pytest.raises(UnreadableRecord):
        read_named(ServiceRecord, key, value)
    with pytest.raises(UnreadableRecord):
        read_named(RolloutRecord, key, value)
    with pytest.raises(UnreadableRecord):
        read_named(ProfileRecord, key, value)
    with pytest.raises(UnreadableRecord):
        read_named(AdapterRecord, key, value)


@pytest.mark.parametrize("field", ["ttft_s", "tpot_s", "qoe", "pace_s", "admit"])
@pytest.mark.parametrize("value", [b"-1", b"0", b"1e400", b'"fast"', b"[]"])
def test_slos_out_of_range_are_refused(field: str, value: bytes) -> None:
    fields = {"ttft_s": b"1", "tpot_s": b"1", "qoe": b"0.5", "pace_s": b"1", "admit": b"2"} | {field: value}
    record = b"{" + b",".join(b'"%s":%s' % (name.encode(), text) for name, text in fields.items()) + b"}"
    with pytest.raises(UnreadableRecord):
        read_slo(record)


def test_slos_are_read_as_they_were_written() -> None:
    for slo in (Slo(), Slo(1.0, None, 0.9, 0.1, 2.0)):
        assert read_slo(msgspec.json.encode(slo)) == slo
    # What is missing has no default.
    with pytest.raises(UnreadableRecord, match="admit"):
        read_slo(b'{"ttft_s": 1, "tpot_s": 1, "qoe": null, "pace_s": null}')


@pytest.mark.parametrize(
    "bounds", [[(5, 1)], [(3, 3)], [(0, 2**40)], [(-1, 4)], [(0, 10), (5, 20)], [(10, 20), (0, 10)]]
)
def test_stages_that_are_no_ranges_are_refused(bounds: list[tuple[int, int]]) -> None:
    records = [StageRecord(lo=lo, hi=hi, instance_ids=["a"]) for lo, hi in bounds]
    with pytest.raises(UnreadableRecord):
        read_stages(msgspec.json.encode(records))


def test_fields_of_a_later_version_are_ignored() -> None:
    later = encoded("a")[:-1] + b',"quantum_link":{"entangled":true}}'
    assert read_named(InstanceRecord, "instances/a", later) == instance("a")
    assert read_policy(b'{"name":"pascal","weights":[1]}') == PolicyRecord(name="pascal")
    assert read_pool(b"decode") is Pool.DECODE


def test_a_policy_may_have_any_short_name() -> None:
    assert read_policy('{"name": "\u00fcber"}'.encode()) == PolicyRecord(name="\u00fcber")
    assert read_policy(b"") is None
    for value in (b"\xff", b"pascal", b'{"name": "%s"}' % (b"x" * 10_000), b'{"name": ""}'):
        with pytest.raises(UnreadableRecord):
            read_policy(value)


def test_identities_and_versions_of_later_versions_are_refused_not_misread() -> None:
    record = msgspec.structs.replace(instance("a"), model_identity=ModelIdentity("t", "w", "p"))
    value = msgspec.json.encode(record).replace(b'"text":"t"', b'"text":7')
    with pytest.raises(UnreadableRecord, match="text"):
        read_named(InstanceRecord, "instances/a", value)


@pytest.mark.parametrize("identity", [None, b'{"text":""}', b'{"text":"a:b"}'])
def test_an_instance_without_a_model_identity_is_refused(identity: bytes | None) -> None:
    record = msgspec.json.decode(encoded("a"), type=dict[str, msgspec.Raw])
    del record["model_identity"]
    if identity is not None:
        record["model_identity"] = msgspec.Raw(identity)
    with pytest.raises(UnreadableRecord, match="model_identity"):
        read_named(InstanceRecord, "instances/a", msgspec.json.encode(record))


async def test_the_fuzz_writes_every_kind_of_record(store: Store) -> None:
    """All that members count as unreadable, and all that a role may write."""
    for worker in ("worker-0", "worker-1"):
        await store.put(f"instances/{worker}", encoded(worker))
    for kind in ("scheduler", "monitor", "migration", "frontend", "edge"):
        record = msgspec.structs.replace(SERVICE, kind=kind)
        await store.put(f"services/{kind}/s", msgspec.json.encode(record))
        await store.put(f"leader/{kind}", msgspec.json.encode(record))
    targets = await make_targets(store)
    assert {f"{target.key.partition('/')[0]} record" for target in targets} >= {
        kind for kind in UNREADABLE_KINDS if kind.endswith(" record")
    }
    for rights in etcd_rights("c"):
        for prefix in rights.writes:
            # Nobody reads that a service withdrew.
            if "/withdrawn/services/" not in prefix:
                name = prefix.removeprefix("/tailrace/c/")
                assert any(target.key.startswith(name) for target in targets), prefix
    assert not any(target.is_unreadable(target.valid) for target in targets)
    for way in Way:
        for target in targets:
            value = record_input(Random(f"{way} {target.key}"), way, target.valid)
            assert value == record_input(Random(f"{way} {target.key}"), way, target.valid)
            target.is_unreadable(value)
