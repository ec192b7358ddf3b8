"""Check whether a part is ready, and wait for it."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterable
from typing import Final

import grpc

from tailrace.local.certificates import OPERATOR, transport_of
from tailrace.local.plan import ON_DEMAND, PartSpec, Tier
from tailrace.local.process import PartFailed, PartProcess
from tailrace.local.progress import Progress, Step
from tailrace.security.credentials import CERTIFICATE, KEY
from tailrace.security.roles import Identity, Role
from tailrace.security.transport import PLAIN, TlsTransport, Transport
from tailrace.service.etcd import check_etcd
from tailrace.service.probe import Unhealthy, check_grpc, check_http
from tailrace.v1.admin_pb2 import ListInstancesRequest
from tailrace.v1.admin_pb2_grpc import AdminStub
from tailrace.v1.types_pb2 import INSTANCE_STATE_ACTIVE

_CALL_TIMEOUT_S: Final = 2.0


async def active_instances(admins: Iterable[str], transport: Transport) -> dict[str, str]:
    """Return the incarnations of the active instances by id, of each cluster from its first scheduler that
    answers.

    `admins`: HOST:PORT[,..] of the schedulers of each cluster.
    """
    found: dict[str, str] = {}
    for admin in admins:
        for address in admin.split(","):
            async with transport.channel(address, Role.SCHEDULER, ()) as channel:
                try:
                    reply = await AdminStub(channel).ListInstances(
                        ListInstancesRequest(), timeout=_CALL_TIMEOUT_S
                    )
                except grpc.aio.AioRpcError:
                    continue
            active = [info for info in reply.instances if info.state == INSTANCE_STATE_ACTIVE]
            found.update({info.instance_id: info.incarnation for info in active})
            break
    return found


_TIMEOUT_S: Final = 2.0
_POLL_S: Final = 0.1


async def wait_ready(process: PartProcess, progress: Progress, certificates: str) -> None:
    """Wait until the part is ready. Raise PartFailed if it exits or is not ready in time.

    `certificates`: folder of the cluster's; empty if it has none.
    """
    spec = process.spec
    # Of all folders only etcd's own has a certificate that etcd accepts here, and trusts etcd's authority.
    own = Identity(Role.ETCD, spec.name)
    transport = transport_of(certificates, own if spec.tier is Tier.ETCD else OPERATOR)
    try:
        async with asyncio.timeout(spec.timeout_s):
            while not await is_ready(spec, transport):
                process.check()
                await asyncio.sleep(_POLL_S)
        # Else another process has answered, at the same address.
        process.check()
    except TimeoutError:
        progress.show(spec.name, Step.FAILED)
        raise process.timed_out() from None
    except PartFailed:
        progress.show(spec.name, Step.FAILED)
        raise
    progress.show(spec.name, Step.READY)


async def is_ready(spec: PartSpec, transport: Transport = PLAIN) -> bool:
    """Return whether the part is ready; takes a few seconds at most."""
    try:
        await asyncio.to_thread(_check, spec, transport)
    except Unhealthy:
        return False
    return True


def _check(spec: PartSpec, transport: Transport) -> None:
    if spec.tier is Tier.ETCD:
        folder = transport.folder.path if isinstance(transport, TlsTransport) else None
        check_etcd(spec.address, _TIMEOUT_S, folder)
        return
    if spec.tier is Tier.SCALER:
        return  # nobody connects to it
    if spec.tier is Tier.CONSOLE:
        check_http(f"http://{spec.address}/health", _TIMEOUT_S)
        return
    role = Role(spec.role) if spec.role else Role.WORKER
    check_grpc(spec.address, "", _TIMEOUT_S, transport, role)
    # A check would start an API server that is to be started by users.
    if spec.http and ON_DEMAND not in spec.command:
        # This path needs no API key. Whoever signed the certificate of users' port, the port is ours.
        context = ssl._create_unverified_context()
        if isinstance(transport, TlsTransport):
            # Behind an edge, it asks for a certificate of this cluster.
            context.load_cert_chain(transport.folder.path / CERTIFICATE, transport.folder.path / KEY)
        check_http(f"{spec.http}/health", _TIMEOUT_S, context)
