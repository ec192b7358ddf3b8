"""Write cluster settings to etcd by compare-and-swap: pools, stages, policy, SLOs, drains and rollouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import grpc
import msgspec

from scheduler_svc.admin.errors import AdminError
from tailrace.cluster import Pool, Stage
from tailrace.control.reported_cluster import PoolOrder
from tailrace.records import (
    PolicyRecord,
    StageRecord,
    resumed,
)
from tailrace.rollout.record import RolloutRecord
from tailrace.slo import Slo, changed_slo
from tailrace.store.reading import (
    UnreadableRecord,
    read_named,
    read_policy,
    read_pool,
    read_slo,
    read_stages,
)
from tailrace.store.store import Store, Swap

_ATTEMPTS: Final = 5
ETCD_LAG_S: Final = 5.0
"""Seconds within which etcd's watch delivers a write, or will not deliver it: another writer has reverted it,
or etcd's data was replaced."""


class Conflict(AdminError):
    """Another writer changed the value meanwhile."""

    def __init__(self, record: str) -> None:
        super().__init__(grpc.StatusCode.ABORTED, f"{record} was changed concurrently; try again")


class Settings:
    """Read and write settings. Every method raises StoreUnavailable."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def swap_pools(self, orders: Sequence[PoolOrder]) -> frozenset[str]:
        """Move at most SWAPS_MAX instances in one step, each if it is still in the pool that it was in when
        its move was ordered; return the ids of those that were moved."""
        swaps = {
            f"pools/{each.instance_id}": Swap(_encode_pool(each.before), _encode_pool(each.pool))
            for each in orders
        }
        moved = await self._store.compare_and_swap_all(swaps)
        return frozenset(key.removeprefix("pools/") for key in moved)

    async def set_pool(self, instance_id: str, pool: Pool | None) -> tuple[Pool | None, int]:
        """Move an instance to a pool from any other; return the previous one, and the revision of the write,
        0 if it was in none and stays so. Raise Conflict."""
        previous, revision = await self._replace(f"pools/{instance_id}", _encode_pool(pool))
        try:
            return (read_pool(previous) if previous else None), revision
        except UnreadableRecord:
            return None, revision

    async def swap_stages(self, expected: tuple[Stage, ...], stages: tuple[Stage, ...]) -> None:
        """Replace the stages if they are still the expected ones.

        Raise Conflict, or AdminError if the present ones cannot be read.
        """
        present = await self._store.get("stages")
        try:
            current = read_stages(present or b"")
        except UnreadableRecord as error:
            raise _of_another_version("stages in etcd", error) from error
        if current != expected or not await self._swap("stages", present, _encode(stages)):
            raise Conflict("stages")

    async def set_stages(self, stages: tuple[Stage, ...]) -> int:
        """Replace the stages; return the revision of the write. Raise Conflict."""
        _, revision = await self._replace("stages", _encode(stages))
        return revision

    async def set_policy(self, record: PolicyRecord) -> tuple[PolicyRecord | None, int]:
        """Set the policy and its parameters in one step; return the previous record or None, and the revision
        of the write. Raise Conflict."""
        for _ in range(_ATTEMPTS):
            present = await self._store.get("policy")
            if revision := await self._store.compare_and_swap("policy", present, msgspec.json.encode(record)):
                return _policy(present), revision
        raise Conflict("policy")

    async def suspend_policy(self, record: PolicyRecord, default: PolicyRecord) -> int:
        """Write the record of a suspended policy if it is the policy set (or the default, if none is);
        return the revision of the write, 0 if another one is. Raise Conflict."""
        for _ in range(_ATTEMPTS):
            present = await self._store.get("policy")
            if (_policy(present) or default) != resumed(record):
                return 0
            if revision := await self._store.compare_and_swap("policy", present, msgspec.json.encode(record)):
                return revision
        raise Conflict("policy")

    async def change_slo(
        self, changes: Mapping[str, float], check: Callable[[Slo], None]
    ) -> tuple[Slo, Slo, int]:
        """Change objectives by name (`tailrace.slo.OBJECTIVES`) if `check` raises nothing of the SLOs after;
        return those before and after, and the revision of the write.

        Raise Conflict, ParameterError, or what `check` raises.
        """
        for _ in range(_ATTEMPTS):
            present = await self._store.get("slo")
            before = _slo(present)
            slo = changed_slo(before, changes)
            check(slo)
            if revision := await self._store.compare_and_swap("slo", present, msgspec.json.encode(slo)):
                return before, slo, revision
        raise Conflict("slo")

    async def drain(self, instance_id: str) -> int:
        """Mark an instance as drained: it gets no new requests, and its own are migrated away.

        Return the revision of the write.
        """
        return await self._store.put(f"drains/{instance_id}", b"1")

    async def undrain(self, instance_id: str) -> int:
        """Remove the mark of `drain`; return the revision of the write, 0 if there was none."""
        return await self._store.delete(f"drains/{instance_id}")

    async def rollout(self, model: str) -> RolloutRecord | None:
        """Return the rollout of a model from etcd. Raise AdminError if it cannot be read."""
        return _rollout(model, await self._store.get(f"rollouts/{model}"))

    async def change_rollout(
        self, model: str, decide: Callable[[RolloutRecord | None], RolloutRecord]
    ) -> RolloutRecord:
        """Write what `decide` makes of a model's present rollout, and return it.

        It is called again if the record changes meanwhile, as it does when the leader advances the rollout.
        Raise Conflict, what `decide` raises, or AdminError if the present record cannot be read.
        """
        key = f"rollouts/{model}"
        for _ in range(_ATTEMPTS):
            present = await self._store.get(key)
            before = _rollout(model, present)
            record = decide(before)
            if record == before or await self._swap(key, present, msgspec.json.encode(record)):
                return record
        raise Conflict(f"the rollout of {model}")

    async def swap_rollout(
        self, model: str, expected: RolloutRecord | None, record: RolloutRecord | None
    ) -> None:
        """Replace the rollout of a model (None: remove it) if it is still the expected one.

        Raise Conflict, or AdminError if the present record cannot be read.
        """
        key = f"rollouts/{model}"
        present = await self._store.get(key)
        value = None if record is None else msgspec.json.encode(record)
        if _rollout(model, present) != expected or not await self._swap(key, present, value):
            raise Conflict(f"the rollout of {model}")

    async def delete_orphaned_records(self, instance_id: str) -> bool:
        """Delete the drain and the pool of an instance that does not exist; return False if it does."""
        records = [f"drains/{instance_id}", f"pools/{instance_id}"]
        return await self._store.delete_orphaned(records, f"instances/{instance_id}")

    async def _replace(self, key: str, value: bytes | None) -> tuple[bytes | None, int]:
        """Write a value, also one that is there already: with its revision, others can be waited for.

        Return the previous value, and the revision of the write. Raise Conflict.
        """
        for _ in range(_ATTEMPTS):
            present = await self._store.get(key)
            if present is None and value is None:
                return None, 0
            if value is None:
                revision = await self._store.compare_and_delete(key, present or b"")
            else:
                revision = await self._store.compare_and_swap(key, present, value)
            if revision:
                return present, revision
        raise Conflict(key)

    async def _swap(self, key: str, expected: bytes | None, value: bytes | None) -> bool:
        if value is not None:
            return await self._store.compare_and_swap(key, expected, value) > 0
        return expected is None or await self._store.compare_and_delete(key, expected) > 0


def _encode_pool(pool: Pool | None) -> bytes | None:
    return None if pool is None else pool.value.encode()


def _policy(value: bytes | None) -> PolicyRecord | None:
    try:
        return read_policy(value or b"")
    except UnreadableRecord:
        # An unreadable value is replaced.
        return None


def _slo(value: bytes | None) -> Slo:
    try:
        return read_slo(value) if value else Slo()
    except UnreadableRecord:
        # An unreadable value is replaced.
        return Slo()


def _rollout(model: str, value: bytes | None) -> RolloutRecord | None:
    try:
        return read_named(RolloutRecord, f"rollouts/{model}", value) if value else None
    except UnreadableRecord as error:
        # Overwriting it would send requests to another model than it says.
        raise _of_another_version(f"the rollout of {model} (rollouts/{model} in etcd)", error) from error


def _of_another_version(record: str, error: UnreadableRecord) -> AdminError:
    return AdminError(
        grpc.StatusCode.FAILED_PRECONDITION,
        f"{record} cannot be read by this version: {error}; use schedulers of the version that wrote it",
    )


def _encode(stages: tuple[Stage, ...]) -> bytes:
    """Encode the stages as JSON."""
    return msgspec.json.encode(
        [StageRecord(lo=s.lo, hi=s.hi, instance_ids=list(s.instance_ids)) for s in stages]
    )
