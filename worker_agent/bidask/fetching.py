"""Have the migration service move a request here that was won by bid-ask: it admits and journals all
migrations."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

import grpc

from tailrace.security.roles import Role
from tailrace.service.channels import Channels, decoded
from tailrace.v1 import migration_pb2, migration_pb2_grpc, types_pb2, worker_pb2
from worker_agent.bidask.bid_receiver import Won

log = logging.getLogger(__name__)

# Longer than waiting for admission and copying, both of which the migration service ends before.
_MIGRATE_S: Final = 40.0


class Fetching:
    """Fetch a won request; implements bid_receiver.Fetch."""

    def __init__(self, instance_id: str, channels: Channels, service: Callable[[], str | None]) -> None:
        """`service()` returns the address of the migration service while there is one."""
        self._instance_id = instance_id
        self._channels = channels
        self._service = service

    async def __call__(self, won: Won) -> bool:
        """Return whether the migration was committed."""
        address = self._service()
        if address is None:
            return False
        award, state = won.award, types_pb2.MIGRATION_STATE_UNSPECIFIED
        call = migration_pb2_grpc.MigrationStub(self._channels.get(address, Role.MIGRATION)).Migrate(
            migration_pb2.MigrateRequest(
                request_id=won.request_id,
                source_instance_id=won.sender,
                target_instance_id=self._instance_id,
                from_epoch=award.from_epoch,
                reason=award.reason,
                policy=award.policy,
                mode=worker_pb2.COPY_MODE_PRE_COPY,
                traceparent=award.traceparent,
            ),
            timeout=_MIGRATE_S,
        )
        try:
            async for record in call:
                state = decoded(record, f"the migration service at {address}").state
        except grpc.aio.AioRpcError as error:
            log.info("%s was not fetched: %s", won.request_id, error.details())
            return False
        finally:
            call.cancel()
        return state == types_pb2.MIGRATION_STATE_COMMITTED
