"""Checks a migration against the state and has the migration service carry it out."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import grpc

from scheduler_svc.migrations import Migrations
from scheduler_svc.refused import Refused
from scheduler_svc.traceparents import Traceparents
from tailrace.cluster import InstanceState, Phase, RequestView
from tailrace.control.reported_cluster import ReportedCluster
from tailrace.handover import Way, between
from tailrace.model_identity import difference
from tailrace.policy.when_full import WhenFull
from tailrace.v1 import migration_pb2, worker_pb2

_PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION


class Mover:
    """At most one open migration a request."""

    def __init__(self, state: ReportedCluster, migrations: Migrations, traceparents: Traceparents) -> None:
        self._state = state
        self._migrations = migrations
        self._traceparents = traceparents

    def move(
        self,
        request: RequestView,
        target_id: str,
        reason: str,
        policy: str,
        mode: worker_pb2.CopyMode.ValueType,
        when_full: WhenFull = WhenFull.REFUSE,
    ) -> AsyncGenerator[migration_pb2.MigrationRecord]:
        """Count the migration in at once; records until it is over. Raises Refused, at once too.

        `when_full` HOST is as REFUSE here: whether host memory takes a request, its target's order says.
        """
        self.check(request, target_id)
        if not self._state.migration_opened(request, target_id):
            raise Refused(_PRECONDITION, f"request {request.request_id}: a migration of it is open")
        return self._records(
            migration_pb2.MigrateRequest(
                request_id=request.request_id,
                source_instance_id=request.instance_id,
                target_instance_id=target_id,
                from_epoch=request.epoch,
                reason=reason,
                policy=policy,
                mode=mode,
                traceparent=self._traceparents.get(request.request_id)
                or self._state.traceparent(request.request_id),
                wait_for_room=when_full is WhenFull.WAIT,
            )
        )

    async def _records(
        self, asked: migration_pb2.MigrateRequest
    ) -> AsyncGenerator[migration_pb2.MigrationRecord]:
        records = self._migrations.migrate(asked)
        try:
            async for record in records:
                yield record
        finally:
            await records.aclose()
            self._state.migration_closed(asked.request_id)

    def check(self, request: RequestView, target_id: str) -> None:
        """Whether the request can go there now. Raises Refused."""
        view = self._state.view()
        target, tracked = view.instances.get(target_id), self._state.tracked(target_id)
        source = self._state.tracked(request.instance_id)
        if target is None or tracked is None or source is None:
            raise Refused(grpc.StatusCode.NOT_FOUND, f"target_instance_id: no instance {target_id!r}")
        if target_id == request.instance_id:
            raise Refused(_PRECONDITION, f"request {request.request_id} is already on {target_id}")
        if target.state is not InstanceState.ACTIVE:
            raise Refused(_PRECONDITION, f"instance {target_id} is {target.state.value}; it gets nothing new")
        if between(source.record.handover, tracked.record.handover).way is Way.STAYS:
            stays = between(source.record.handover, tracked.record.handover)
            raise Refused(_PRECONDITION, f"request {request.request_id} is not moved: {stays.reason}")
        if tracked.record.model_fingerprint != source.record.model_fingerprint:
            # By replay, then; that needs the same model.
            models = difference(source.record.model_identity, tracked.record.model_identity)
            if models:
                raise Refused(_PRECONDITION, f"{request.instance_id} and {target_id}: {models}")
        if request.migrating:
            raise Refused(_PRECONDITION, f"request {request.request_id}: a migration of it is open")
        if request.phase is Phase.PREFILL:
            raise Refused(
                _PRECONDITION, f"request {request.request_id} is in prefill; it can move once it is decoded"
            )
