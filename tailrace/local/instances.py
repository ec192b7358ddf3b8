"""What the schedulers of a local cluster know of its instances."""

from __future__ import annotations

from typing import Final

import grpc

from tailrace.security.roles import Role
from tailrace.security.transport import PLAIN, Transport
from tailrace.v1.admin_pb2 import ListInstancesRequest
from tailrace.v1.admin_pb2_grpc import AdminStub
from tailrace.v1.types_pb2 import INSTANCE_STATE_ACTIVE

_CALL_TIMEOUT_S: Final = 2.0


async def active_instances(admin: str, transport: Transport = PLAIN) -> dict[str, str]:
    """Incarnations by instance id, of instances that take new work, as the first scheduler of `admin`
    (HOST:PORT[,..]) that answers sees them; none when no scheduler does."""
    for address in admin.split(","):
        async with transport.channel(address, Role.SCHEDULER, ()) as channel:
            try:
                reply = await AdminStub(channel).ListInstances(
                    ListInstancesRequest(), timeout=_CALL_TIMEOUT_S
                )
            except grpc.aio.AioRpcError:
                continue
        active = [info for info in reply.instances if info.state == INSTANCE_STATE_ACTIVE]
        return {info.instance_id: info.incarnation for info in active}
    return {}
