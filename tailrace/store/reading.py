"""The one place that reads records from etcd.

Anything may be there: a later version's record, a mistake, another program's bytes. What is returned has the
types and ranges that the record declares; everything else is UnreadableRecord, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Final, TypeVar

import msgspec
from msgspec.structs import asdict

from tailrace.cluster import Pool, Stage
from tailrace.records import (
    AdapterRecord,
    InstanceRecord,
    PolicyRecord,
    ProfileRecord,
    ServiceRecord,
    SloRecord,
    StageRecord,
)
from tailrace.rollout.record import RolloutRecord
from tailrace.slo import Slo

VALUE_BYTES: Final = 1 << 20
"""Largest value that is read; etcd's own limit for a request is 1.5 MiB by default."""


class UnreadableRecord(ValueError):
    """A value in etcd is not what its key says; the message says why."""


_Record = TypeVar(
    "_Record",
    AdapterRecord,
    InstanceRecord,
    ServiceRecord,
    ProfileRecord,
    RolloutRecord,
    StageRecord,
    PolicyRecord,
    SloRecord,
)
_Read = TypeVar("_Read")


def read_record(kind: type[_Record], value: bytes) -> _Record:
    """Read a record that stands for itself. Raise UnreadableRecord."""
    return _read(value, lambda: msgspec.json.decode(value, type=kind))


def read_named(kind: type[_Record], key: str, value: bytes) -> _Record:
    """Read the record at a key, which must name the same thing as the record. Raise UnreadableRecord."""
    record = read_record(kind, value)
    area, _, name = key.partition("/")
    if isinstance(record, InstanceRecord):
        named = record.instance_id
    elif isinstance(record, ProfileRecord):
        named = record.kind
    elif isinstance(record, RolloutRecord):
        named = record.model
    elif isinstance(record, AdapterRecord):
        named = record.key.partition("/")[2]
    elif isinstance(record, ServiceRecord):
        # `leader/<kind>` or `services/<kind>/<id>`.
        named = record.kind if area == "leader" else f"{record.kind}/{record.service_id}"
    else:
        return record
    if named != name:
        raise UnreadableRecord(f"it is the record of {named!r}")
    return record


def read_policy(value: bytes) -> PolicyRecord | None:
    """Read the policy; None: none is set. Raise UnreadableRecord."""
    return read_record(PolicyRecord, value) if value else None


def read_slo(value: bytes) -> Slo:
    """Read the SLOs, whose ranges are those of `tailrace set slo`. Raise UnreadableRecord."""

    def read() -> Slo:
        return Slo(**asdict(msgspec.json.decode(value, type=SloRecord)))

    return _read(value, read)


def read_stages(value: bytes) -> tuple[Stage, ...]:
    """Read the stages; none at all is allowed. Raise UnreadableRecord."""

    def read() -> tuple[Stage, ...]:
        records = msgspec.json.decode(value, type=list[StageRecord]) if value else []
        stages = tuple(Stage(r.lo, r.hi, tuple(r.instance_ids)) for r in records)
        if any(stage.lo >= stage.hi for stage in stages):
            raise ValueError("a stage ends before it begins")
        if any(before.hi > after.lo for before, after in pairwise(stages)):
            raise ValueError("stages overlap, or are not in order")
        return stages

    return _read(value, read)


def read_pool(value: bytes) -> Pool:
    """Read a pool. Raise UnreadableRecord."""
    return _read(value, lambda: Pool(value.decode()))


def _read(value: bytes, read: Callable[[], _Read]) -> _Read:
    if len(value) > VALUE_BYTES:
        raise UnreadableRecord(f"{len(value)} bytes; at most {VALUE_BYTES} are read")
    try:
        return read()
    except Exception as error:
        # Not only msgspec's: RecursionError, UnicodeDecodeError, and what a record's own checks raise.
        raise UnreadableRecord(f"{type(error).__name__}: {error}") from error
