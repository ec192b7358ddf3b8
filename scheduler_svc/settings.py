"""Write cluster settings to etcd by compare-and-swap: pools, stages, policy, SLOs, drains and rollouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import grpc
import msgspec

from scheduler_svc.admin.errors import AdminError
from tailrace.cluster import Pool, Stage
from tailrace.records import (
    PolicyRecord,
    StageRecord,
    decode_policy,
    decode_slo,
    encode_policy,
    encode_slo,
)
from tailrace.rollout.record import RolloutRecord
from tailrace.slo import Slo, changed_slo
from tailrace.store.store import Store

_ATTEMPTS: Final = 5


class Conflict(AdminError):
    """Another writer changed the value meanwhile."""

    def __init__(self, record: str) -> None:
        super().__init__(grpc.StatusCode.ABORTED, f"{record} was changed concurrently; try again")


class Settings:
    """Read and write settings. Every method raises StoreUnavailable."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def swap_pool(self, instance_id: str, expected: Pool | None, pool: Pool | None) -> None:
        """Move an instance between pools if it is still in the expected one. Raise Conflict."""
        key = f"pools/{instance_id}"
        before = None if expected is None else expected.value.encode()
        if not await self._swap(key, before, None if pool is None else pool.value.encode()):
            raise Conflict(f"the pool of {instance_id}")

    async def set_pool(self, instance_id: str, pool: Pool | None) -> Pool | None:
        """Move an instance to a pool from any other; return the previous one. Raise Conflict."""
        previous = await self._replace(f"pools/{instance_id}", None if pool is None else pool.value.encode())
        try:
            return Pool(previous.decode()) if previous else None
        except ValueError:
            return None

    async def swap_stages(self, expected: tuple[Stage, ...], stages: tuple[Stage, ...]) -> None:
        """Replace the stages if they are still the expected ones. Raise Conflict."""
        present = await self._store.get("stages")
        if _decode(present) != expected or not await self._swap("stages", present, _encode(stages)):
            raise Conflict("stages")

    async def set_stages(self, stages: tuple[Stage, ...]) -> None:
        """Replace the stages. Raise Conflict."""
        await self._replace("stages", _encode(stages))

    async def set_policy(self, record: PolicyRecord) -> PolicyRecord | None:
        """Set the policy and its parameters in one step; return the previous record or None. Raise
        Conflict."""
        previous = await self._replace("policy", encode_policy(record))
        try:
            return decode_policy(previous or b"")
        except msgspec.MsgspecError:
            return None

    async def change_slo(self, changes: Mapping[str, float]) -> tuple[Slo, Slo]:
        """Change objectives by name (`tailrace.slo.OBJECTIVES`); return the SLOs before and after.

        Raise Conflict or ParameterError.
        """
        for _ in range(_ATTEMPTS):
            present = await self._store.get("slo")
            before = _slo(present)
            slo = changed_slo(before, changes)
            if await self._swap("slo", present, encode_slo(slo)):
                return before, slo
        raise Conflict("slo")

    async def drain(self, instance_id: str) -> None:
        """Mark an instance as drained: it gets no new requests, and its own are migrated away."""
        await self._store.put(f"drains/{instance_id}", b"1")

    async def undrain(self, instance_id: str) -> None:
        """Remove the mark of `drain`."""
        await self._store.delete(f"drains/{instance_id}")

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

    async def _replace(self, key: str, value: bytes | None) -> bytes | None:
        for _ in range(_ATTEMPTS):
            present = await self._store.get(key)
            if present == value or await self._swap(key, present, value):
                return present
        raise Conflict(key)

    async def _swap(self, key: str, expected: bytes | None, value: bytes | None) -> bool:
        if value is not None:
            return await self._store.compare_and_swap(key, expected, value)
        return expected is None or await self._store.compare_and_delete(key, expected)


def _slo(value: bytes | None) -> Slo:
    try:
        return decode_slo(value) if value else Slo()
    except msgspec.MsgspecError:
        # An unreadable value is replaced.
        return Slo()


def _rollout(model: str, value: bytes | None) -> RolloutRecord | None:
    try:
        return msgspec.json.decode(value, type=RolloutRecord) if value else None
    except msgspec.MsgspecError as error:
        # Probably of a later version: overwriting it would send requests to another model than it says.
        raise AdminError(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"the rollout of {model} (rollouts/{model} in etcd) cannot be read by this version: {error}; "
            "use schedulers of the version that wrote it",
        ) from error


def _encode(stages: tuple[Stage, ...]) -> bytes:
    return msgspec.json.encode(
        [StageRecord(lo=s.lo, hi=s.hi, instance_ids=list(s.instance_ids)) for s in stages]
    )


def _decode(value: bytes | None) -> tuple[Stage, ...]:
    records = msgspec.json.decode(value, type=list[StageRecord]) if value else []
    return tuple(Stage(r.lo, r.hi, tuple(r.instance_ids)) for r in records)
