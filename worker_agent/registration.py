"""Register the worker in etcd, and ensure one worker per instance id."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Final

import msgspec

from tailrace.records import InstanceRecord
from tailrace.store.reading import UnreadableRecord, read_record
from tailrace.store.registration import TTL_S, Registration, register
from tailrace.store.store import Store
from worker_agent.engine.base import EngineInfo


def instance_record(
    instance_id: str,
    incarnation: str,
    address: str,
    stream_address: str,
    metrics_address: str,
    info: EngineInfo,
    profile_kind: str,
) -> InstanceRecord:
    """Return the worker's record. `profile_kind`: kind of the measured profile that applies to it, or
    empty."""
    shape = info.kv_shape
    return InstanceRecord(
        instance_id=instance_id,
        incarnation=incarnation,
        address=address,
        stream_address=stream_address,
        metrics_address=metrics_address,
        engine=info.engine,
        model=info.model,
        model_fingerprint=shape.model_fingerprint,
        model_identity=info.identity,
        block_tokens=shape.block_tokens,
        kv_blocks_total=info.kv_blocks_total,
        max_model_len=info.max_model_len,
        max_num_seqs=info.max_num_seqs,
        kv_bytes_per_token=shape.block_bytes // shape.block_tokens,
        started_s=time.time(),
        profile_kind=profile_kind,
        handover=info.handover,
        pooling=info.pooling,
        takes_adapters=info.takes_adapters,
        ranks=list(info.ranks),
        tensor_parallel_size=shape.tensor_parallel_size,
        pipeline_parallel_size=shape.pipeline_parallel_size,
        block_naming=info.naming,
    )


async def register_instance(store: Store, record: InstanceRecord) -> Registration:
    """Register the worker; `withdraw()` of the result removes it. Raise StoreUnavailable."""
    return await register(store, f"instances/{record.instance_id}", msgspec.json.encode(record))


log = logging.getLogger(__name__)

_POLL_S: Final = 0.25
_CONNECT_S: Final = 1.0
# Time beyond the lease for a renewal, and for etcd to notice its end.
_MARGIN_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Addressee:
    """The instance that a worker is, for calls that name the one they are meant for.

    A caller may have the address of a worker that has stopped; meanwhile another one may listen there.
    """

    instance_id: str
    incarnation: str

    def refusal(self, instance_id: str, incarnation: str = "") -> str:
        """Return why a call to this instance is refused; "": it is meant for this one, or names none."""
        if instance_id not in ("", self.instance_id):
            return (
                f"this is {self.instance_id}, not {instance_id}, which had this address before; "
                "try again in a few seconds"
            )
        if incarnation not in ("", self.incarnation):
            return (
                f"{self.instance_id} has been restarted: this is incarnation {self.incarnation}, "
                f"not {incarnation}; try again in a few seconds"
            )
        return ""


class IdInUse(Exception):
    """Another worker with this id is alive; the message says which, and what to do."""


async def wait_until_free(
    store: Store, instance_id: str, lease_ttl_s: float = TTL_S, own_address: str = ""
) -> None:
    """Wait until no living worker is registered under the id. Raise IdInUse or StoreUnavailable.

    A crashed worker stays registered until its lease ends. It counts as dead at once if its address refuses
    connections; otherwise a worker that is still registered after the lease's time renews the lease, so it is
    alive. `own_address`: HOST:PORT on which this process listens already; a worker registered there before is
    dead.
    """
    loop = asyncio.get_running_loop()
    holder_incarnation, since_s = "", loop.time()
    while (holder := await _holder(store, instance_id)) is not None:
        if holder.address == own_address or await _refuses_connections(holder.address):
            return
        if holder.incarnation != holder_incarnation:
            log.warning("%s is registered for %s; checking whether it is alive", instance_id, holder.address)
            holder_incarnation, since_s = holder.incarnation, loop.time()
        if loop.time() - since_s > lease_ttl_s + _MARGIN_S:
            raise IdInUse(
                f"instance id {instance_id!r} is in use: the worker at {holder.address} is alive; "
                "stop it, or start this one with another --id"
            )
        await asyncio.sleep(_POLL_S)


def replaced_message(instance_id: str, value: bytes) -> str:
    """Return why a worker stops whose registration was replaced by `value`."""
    try:
        address = read_record(InstanceRecord, value).address
    except UnreadableRecord:
        address = "an unknown address"
    return (
        f"another worker, at {address}, has registered as {instance_id!r}: this worker stops serving; "
        "to run both, use another --id for one of them"
    )


async def _holder(store: Store, instance_id: str) -> InstanceRecord | None:
    value = await store.get(f"instances/{instance_id}")
    try:
        return None if value is None else read_record(InstanceRecord, value)
    except UnreadableRecord:
        return None


async def _refuses_connections(address: str) -> bool:
    """Return whether HOST:PORT refuses connections; False if that cannot be determined."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(_CONNECT_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError, ValueError):
        return False
    writer.close()
    return False
