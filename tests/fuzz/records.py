"""Write to etcd, at every kind of key that a member reads, what no member of this version writes.

After each input every process must have read it and live, a request must be answered, and what could not be
read must have been counted. Then the input is deleted, or what was there before is put back.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final

import msgspec

from tailrace.address import parse_endpoints
from tailrace.local.state import Part
from tailrace.profiles import load_profile
from tailrace.records import (
    AdapterRecord,
    InstanceRecord,
    PolicyRecord,
    ProfileRecord,
    QoeRecord,
    ServiceRecord,
    StageRecord,
    TtftRecord,
)
from tailrace.rollout.record import RolloutRecord, RolloutState
from tailrace.slo import Slo
from tailrace.store.client import EtcdClient
from tailrace.store.etcd_api import TXN, delete_op, put_op
from tailrace.store.reading import (
    UnreadableRecord,
    read_named,
    read_policy,
    read_pool,
    read_record,
    read_slo,
    read_stages,
)
from tailrace.store.store import TOMBSTONES, LeasedValue, LeaseExpired, Store
from tailrace.v1 import etcd_pb2
from tests.fuzz.record_inputs import Way, record_input
from tests.waiting import WAIT_S

_CLUSTER: Final = "default"
# The record that is written after each input: a process that has counted it has read the input, too.
_MARKER: Final = "pools/after-the-input"
_MARKER_KIND: Final = "pools record"
_POLL_S: Final = 0.02
_COUNTED: Final = re.compile(r'^tailrace_unreadable_total\{what="([^"]+)"\} (\S+)$', re.MULTILINE)

PROFILE: Final = ProfileRecord(
    kind="k",
    engine="simulated",
    model="tiny",
    model_fingerprint="f",
    hardware="cpu",
    step_tokens=512,
    version="0",
    instance_id="w",
    measured_s=1.0,
    took_s=1.0,
    profile=load_profile("llama-3.1-8b-h100"),
    prefill_error=0.1,
    prefill_samples=9,
    decode_error=0.1,
    decode_samples=9,
    ttft=TtftRecord(base_s=0.1, per_token_s=0.1, per_token_squared_s=0.0, r_squared=1.0, samples=9),
    tpot_s=0.1,
    max_running_tokens=100,
    qoe=QoeRecord(d=(0.1, 0.1, 0.1, 0.1, 0.1), error=0.1, samples=9),
)
ADAPTER: Final = AdapterRecord(model="tiny", name="a/b c", path="/adapters/a")
_ROLLOUT: Final = RolloutRecord(
    model="fuzz", before="a", new="b", state=RolloutState.DRAINING, draining=["worker-0"], begun_s=1.0
)
_STAGES: Final = [
    StageRecord(lo=0, hi=10, instance_ids=["worker-0"]),
    StageRecord(lo=10, hi=4096, instance_ids=["worker-1"]),
]


@dataclass(frozen=True, slots=True)
class Target:
    """A key that is fuzzed."""

    key: str
    valid: bytes
    # As members read it; None: nobody reads its value.
    read: Callable[[bytes], object] | None
    # By which name members count what they cannot read.
    counted_as: str = ""
    # Whether a process holds it, which must write it again.
    is_held: bool = False
    # A value of this version that goes in first and is deleted once the input is there.
    replaces: tuple[str, bytes] | None = None

    def is_unreadable(self, value: bytes) -> bool:
        """Return whether members cannot read the value."""
        if self.read is None:
            return False
        try:
            self.read(value)
        except UnreadableRecord:
            return True
        return False


@dataclass(slots=True)
class RecordTally:
    """What was tried, and what came of it."""

    inputs: Counter[tuple[str, Way]] = field(default_factory=Counter)
    unreadable: Counter[str] = field(default_factory=Counter)
    # Of the processes, by what they name the kind.
    counted: Counter[str] = field(default_factory=Counter)
    # Under SLOs that could be read.
    refused_by_slo: int = 0
    requests: int = 0
    # What must not be, each with the input.
    findings: list[str] = field(default_factory=list)


def named_target(kind: type, key: str, valid: bytes, *, is_held: bool = False) -> Target:
    """Return the target of a record that its key names."""
    return Target(key, valid, lambda value: read_named(kind, key, value), _counted_as(key), is_held)


async def make_targets(store: Store) -> list[Target]:
    """Return the targets: beside what the cluster itself has written, and in its place."""
    found = await store.get_prefix("")
    # Of an instance that would be as good as the others, at an address where another one listens.
    instance = msgspec.json.decode(found["instances/worker-0"], type=InstanceRecord)
    beside = msgspec.json.encode(msgspec.structs.replace(instance, instance_id="fuzz", incarnation="fuzz"))
    targets = [
        named_target(InstanceRecord, "instances/fuzz", beside),
        named_target(InstanceRecord, "instances/worker-1", found["instances/worker-1"], is_held=True),
    ]
    services: dict[str, ServiceRecord] = {}
    for key, value in found.items():
        if _area(key) == "leader":
            targets.append(named_target(ServiceRecord, key, value, is_held=True))
        elif _area(key) == "services":
            record = msgspec.json.decode(value, type=ServiceRecord)
            # Of two schedulers one is enough.
            if services.setdefault(record.kind, record) is record:
                targets.append(named_target(ServiceRecord, key, value, is_held=True))
    for kind, record in services.items():
        other = msgspec.structs.replace(record, service_id="fuzz", incarnation="fuzz")
        targets.append(named_target(ServiceRecord, f"services/{kind}/fuzz", msgspec.json.encode(other)))
    tombstone = f"{TOMBSTONES}instances/fuzz-withdrawn"
    withdrawn = msgspec.json.encode(
        msgspec.structs.replace(instance, instance_id="fuzz-withdrawn", incarnation="fuzz")
    )
    policy = msgspec.json.encode(PolicyRecord(name="pascal", parameters={"quantum_tokens": 5}))
    return [
        *targets,
        Target(
            tombstone,
            withdrawn,
            lambda value: read_record(InstanceRecord, value),
            _counted_as(tombstone),
            replaces=("instances/fuzz-withdrawn", withdrawn),
        ),
        named_target(RolloutRecord, "rollouts/fuzz", msgspec.json.encode(_ROLLOUT)),
        named_target(AdapterRecord, ADAPTER.key, msgspec.json.encode(ADAPTER)),
        named_target(ProfileRecord, f"profiles/{PROFILE.kind}", msgspec.json.encode(PROFILE)),
        Target("pools/fuzz", b"decode", read_pool, _counted_as("pools/")),
        Target("pools/worker-1", b"prefill_to_decode", read_pool, _counted_as("pools/")),
        Target("policy", policy, lambda value: value and read_policy(value), _counted_as("policy")),
        Target(
            "slo",
            msgspec.json.encode(Slo(1.0, 0.2, 0.9, 0.1, 2.0)),
            lambda value: value and read_slo(value),
            _counted_as("slo"),
        ),
        Target("stages", msgspec.json.encode(_STAGES), read_stages, _counted_as("stages")),
        Target("drains/fuzz", b"1", None),
        Target("profiling/fuzz", b"worker-0", None),
        Target("of_a_later_version/fuzz", msgspec.json.encode(PROFILE), None),
    ]


def _area(key: str) -> str:
    return key.partition("/")[0]


def _counted_as(key: str) -> str:
    return f"{_area(key)} record"


def _strange_key(random: Random) -> bytes:
    """Return the rest of a key that is not a short printable text."""
    return random.choice(
        (
            b"\xff\xfe" + random.randbytes(8),
            b"instances/\xc3\x28%d" % random.getrandbits(32),
            b"instances/\x1b[31m%d" % random.getrandbits(32),
            b"rollouts/" + b"%d" % random.getrandbits(32) * 200,
        )
    )


class RecordFuzz:
    """Fuzzes the records of one running cluster."""

    def __init__(
        self, etcd: str, parts: Sequence[Part], answered: Callable[[], Awaitable[str]], random: Random
    ) -> None:
        """`answered`: sends a request; returns why it was not answered, or an empty text."""
        self._client = EtcdClient(parse_endpoints([etcd]))
        self._store = Store(self._client, _CLUSTER)
        self._parts = {part.name: part for part in parts}
        self._answered = answered
        self._random = random
        self._step = 0
        self.tally = RecordTally()

    async def run(self, inputs: int) -> None:
        """Try so many inputs at each key, and so many keys that nobody can have written."""
        try:
            for target in await make_targets(self._store):
                for _ in range(inputs):
                    way = self._random.choice([*Way])
                    await self._try(target, way, record_input(self._random, way, target.valid))
                if target.is_held:
                    await self._take(target)
            for _ in range(inputs):
                await self._try_key(_strange_key(self._random))
        finally:
            await self._client.close()

    async def _try(self, target: Target, way: Way, value: bytes) -> None:
        key, area = target.key, _area(target.key)
        self.tally.inputs[area, way] += 1
        expected = Counter[str]()
        if target.is_unreadable(value):
            self.tally.unreadable[area] += 1
            expected[target.counted_as] += 1
        shown = f"{key} ({way}): {value[:300]!r}"
        if target.replaces is not None:
            name, valid = target.replaces
            await self._store.put(name, valid)
            await self._wait_until_read(await self._counts(), Counter(), f"{name}: {valid!r}")
        before, counts = await self._store.get_leased(key), await self._counts()
        try:
            await self._store.put(key, value)
            if target.replaces is not None:
                await self._store.delete(target.replaces[0])
            await self._wait_until_read(counts, expected, shown)
            # SLOs that can be read may shed requests: that is what they are for.
            await self._request(shown, may_refuse=key == "slo" and not expected)
        finally:
            await self._put_back(key, before)
        await self._request(f"after {shown}", may_refuse=False)

    async def _take(self, target: Target) -> None:
        """Take a key from the process that holds it: it, or another one, must write it again."""
        way, value = Way.NOISE, b"\xff" + self._random.randbytes(16)
        self.tally.inputs[_area(target.key), way] += 1
        self.tally.unreadable[_area(target.key)] += 1
        shown, counts = f"{target.key} ({way}): {value!r}", await self._counts()
        await self._store.put(target.key, value)
        deadline_s = time.monotonic() + WAIT_S
        while (present := await self._store.get_leased(target.key)) is None or not present.lease:
            if time.monotonic() > deadline_s:
                self.tally.findings.append(f"nobody wrote it again in {WAIT_S:.0f} s: {shown}")
                await self._store.delete(target.key)
                break
            await asyncio.sleep(_POLL_S)
        await self._wait_until_read(counts, Counter(), shown)
        await self._request(f"after {shown}", may_refuse=False)

    async def _try_key(self, key: bytes) -> None:
        self.tally.inputs["key", Way.NOISE] += 1
        self.tally.unreadable["key"] += 1
        name, shown, counts = (
            f"/tailrace/{_CLUSTER}/".encode() + key,
            f"key {key[:300]!r}",
            await self._counts(),
        )
        try:
            await self._write(put_op(name, b"{}"))
            await self._wait_until_read(counts, Counter({"key in etcd": 1}), shown)
            await self._request(shown, may_refuse=False)
        finally:
            await self._write(delete_op(name))

    async def _put_back(self, key: str, before: LeasedValue | None) -> None:
        """Delete the input, or restore what was there before, unless its owner has done so."""
        present = await self._store.get_leased(key)
        if present is None or present.lease:
            return
        if before is None:
            await self._store.delete(key)
        else:
            with contextlib.suppress(LeaseExpired):
                await self._store.swap_leased(key, present, before.value, before.lease)

    async def _write(self, operation: etcd_pb2.RequestOp) -> None:
        await self._client.call(TXN, etcd_pb2.TxnRequest(success=[operation]), "fuzz")

    async def _request(self, shown: str, *, may_refuse: bool) -> None:
        self.tally.requests += 1
        why = await self._answered()
        if why and may_refuse:
            self.tally.refused_by_slo += 1
        elif why:
            self.tally.findings.append(f"a request was not answered ({why}): {shown}")

    async def _wait_until_read(
        self, before: Mapping[str, Counter[str]], expected: Counter[str], shown: str
    ) -> None:
        """Wait until every process has read what was written, and has counted what it could not read.

        `before`: the counts before the write.
        """
        self._step += 1
        awaited = expected + Counter({_MARKER_KIND: 1})
        await self._store.put(_MARKER, b"\xff%d" % self._step)
        deadline_s = time.monotonic() + WAIT_S
        while True:
            grown = {name: counts - before[name] for name, counts in (await self._counts()).items()}
            late = {name: awaited - counts for name, counts in grown.items() if awaited - counts}
            if not late or time.monotonic() > deadline_s:
                break
            await asyncio.sleep(_POLL_S)
        await self._store.delete(_MARKER)
        for counts in grown.values():
            self.tally.counted += counts - Counter({_MARKER_KIND: 1})
        for name, missing in late.items():
            self.tally.findings.append(f"{name} did not count {dict(missing)} in {WAIT_S:.0f} s: {shown}")
        for name in before.keys() - grown.keys():
            self.tally.findings.append(f"{name} ended: {shown}")

    async def _counts(self) -> dict[str, Counter[str]]:
        """Return what each process that lives has not been able to read."""
        living = [part for part in self._parts.values() if part.identity.alive()]
        counts = await asyncio.gather(*(asyncio.to_thread(_scrape, part) for part in living))
        return {part.name: count for part, count in zip(living, counts, strict=True) if part.identity.alive()}


def _scrape(part: Part) -> Counter[str]:
    address = part.spec.command[part.spec.command.index("--metrics") + 1]
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=WAIT_S) as reply:
            text = reply.read().decode()
    except OSError:
        # It may have ended; otherwise it is late.
        return Counter()
    return Counter({kind: int(float(count)) for kind, count in _COUNTED.findall(text)})
