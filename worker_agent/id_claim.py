"""One instance id, one worker: who comes second is refused, and who was replaced stops."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

import msgspec

from tailrace.records import InstanceRecord
from tailrace.store.store import Store

log = logging.getLogger(__name__)

_POLL_S: Final = 0.25
_CONNECT_S: Final = 1.0
# Beyond the lease's time, for a renewal and for etcd to notice.
_MARGIN_S: Final = 2.0


class IdInUse(Exception):
    """Another worker of this id is alive; the message says which, and what to do."""


async def wait_until_free(store: Store, instance_id: str, lease_ttl_s: float, own_address: str = "") -> None:
    """Until no living worker is registered under the id. Raises IdInUse, StoreUnavailable.

    A worker that crashed is registered until its lease ends. It counts as dead at once when its address
    refuses connections; else whoever is still registered after the time of a lease renews it, and is alive.
    `own_address`: where this process listens by now, HOST:PORT; who was registered there before is dead.
    """
    loop = asyncio.get_running_loop()
    seen, since_s = "", loop.time()
    while (holder := await _holder(store, instance_id)) is not None:
        if holder.address == own_address or await _refuses(holder.address):
            return
        if holder.incarnation != seen:
            log.warning("%s is registered for %s; waiting whether it lives", instance_id, holder.address)
            seen, since_s = holder.incarnation, loop.time()
        if loop.time() - since_s > lease_ttl_s + _MARGIN_S:
            raise IdInUse(
                f"instance id {instance_id!r} is in use: the worker at {holder.address} is alive; "
                "stop it, or start this one with another --id"
            )
        await asyncio.sleep(_POLL_S)


def replaced_message(instance_id: str, value: bytes) -> str:
    """Why a worker stops whose registration another worker has replaced by `value`."""
    try:
        address = msgspec.json.decode(value, type=InstanceRecord).address
    except msgspec.MsgspecError:
        address = "an unknown address"
    return (
        f"another worker, at {address}, has registered as {instance_id!r}: this one stops serving; "
        "to run both, start one with another --id"
    )


async def _holder(store: Store, instance_id: str) -> InstanceRecord | None:
    value = await store.get(f"instances/{instance_id}")
    try:
        return None if value is None else msgspec.json.decode(value, type=InstanceRecord)
    except msgspec.MsgspecError:
        return None


async def _refuses(address: str) -> bool:
    """Whether nobody listens at HOST:PORT. False also when that cannot be told."""
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
