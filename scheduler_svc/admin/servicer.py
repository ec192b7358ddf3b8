"""Implement the Admin service.

Calls that only the leader may carry out arrive here on the leader only (`forward.py`); exceptions become the
call's status (`errors.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, suppress
from typing import Final

import grpc

from scheduler_svc.admin import listing
from scheduler_svc.admin.errors import AdminError
from scheduler_svc.admin.forward import RECORD_S, fetch_trace, profile_events
from scheduler_svc.admin.in_force import InForce
from scheduler_svc.admin.request_pages import request_page
from scheduler_svc.admin.rollout_calls import RolloutCalls
from scheduler_svc.admin.shadowing import Shadowing
from scheduler_svc.admin.validation import (
    check_drained,
    check_instance,
    find_request,
    format_parameters,
    read_stages,
)
from scheduler_svc.drainer import drain_events
from scheduler_svc.following import Following
from scheduler_svc.migrations import Migrations, MigrationStarter
from scheduler_svc.recorder import Recorder
from scheduler_svc.settings import Settings
from tailrace.control.active_policy import ActivePolicy
from tailrace.control.reported_cluster import ReportedCluster
from tailrace.messages import POOLS, given_objectives, pool_number, profile_message, slo_message
from tailrace.policy.registry import load_all
from tailrace.service.channels import Channels
from tailrace.store.membership import Membership
from tailrace.v1 import admin_pb2, admin_pb2_grpc, migration_pb2, profile_pb2, types_pb2, worker_pb2

OPERATOR: Final = "operator"
# A worker tells at once what came to it, and in its steady reports what was lost on the way.
_SHOWN_WITHIN_S: Final = 1.0
_POLL_S: Final = 0.01
_LOAD_S: Final = 2.0


class AdminServicer(admin_pb2_grpc.AdminServicer):
    """Check each request, carry it out, and reply."""

    def __init__(
        self,
        state: ReportedCluster,
        members: Membership,
        channels: Channels,
        active: ActivePolicy,
        following: Following,
        settings: Settings,
        migration_starter: MigrationStarter,
        migrations: Migrations,
        recorder: Recorder,
        shadowing: Shadowing,
        rollouts: RolloutCalls,
        in_force: InForce,
        clusters: Callable[[], list[admin_pb2.ClusterInfo]],
    ) -> None:
        """`clusters`: returns this cluster and those that belong to it."""
        self._state = state
        self._members = members
        self._channels = channels
        self._active = active
        self._following = following
        self._settings = settings
        self._migration_starter = migration_starter
        self._migrations = migrations
        self._recorder = recorder
        self._shadowing = shadowing
        self._rollouts = rollouts
        self._in_force = in_force
        self._clusters = clusters

    # ---- reads

    async def ListInstances(
        self,
        request: admin_pb2.ListInstancesRequest,
        context: grpc.aio.ServicerContext[admin_pb2.ListInstancesRequest, admin_pb2.ListInstancesReply],
    ) -> admin_pb2.ListInstancesReply:
        """List instances in id order."""
        now_s, slo = time.monotonic(), self._active.slo
        return admin_pb2.ListInstancesReply(
            instances=await listing.instance_infos(self._state, slo, now_s),
            recent=listing.recent_figures(self._state.recent.of_all(now_s), slo),
        )

    async def ListRequests(
        self,
        request: admin_pb2.ListRequestsRequest,
        context: grpc.aio.ServicerContext[admin_pb2.ListRequestsRequest, admin_pb2.ListRequestsReply],
    ) -> admin_pb2.ListRequestsReply:
        """List a page of requests, of one instance or phase if given."""
        return await request_page(self._state, request, time.time())

    async def ListMigrations(
        self,
        request: migration_pb2.ListMigrationsRequest,
        context: grpc.aio.ServicerContext[
            migration_pb2.ListMigrationsRequest, migration_pb2.ListMigrationsReply
        ],
    ) -> migration_pb2.ListMigrationsReply:
        """List migrations, latest first, from the migration service."""
        return await self._migrations.recent(request)

    async def ListPolicies(
        self,
        request: admin_pb2.ListPoliciesRequest,
        context: grpc.aio.ServicerContext[admin_pb2.ListPoliciesRequest, admin_pb2.ListPoliciesReply],
    ) -> admin_pb2.ListPoliciesReply:
        """List installed policies."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_LOAD_S):
                # A package that was installed since: its import may take long, or never end.
                await asyncio.to_thread(load_all)
        infos = listing.policy_infos(self._active.record, self._active.values)
        return admin_pb2.ListPoliciesReply(policies=infos)

    async def ListStages(
        self,
        request: admin_pb2.ListStagesRequest,
        context: grpc.aio.ServicerContext[admin_pb2.ListStagesRequest, admin_pb2.ListStagesReply],
    ) -> admin_pb2.ListStagesReply:
        """List stages in order of length."""
        return admin_pb2.ListStagesReply(stages=listing.stage_messages(self._state.view().stages))

    async def ListServices(
        self,
        request: admin_pb2.ListServicesRequest,
        context: grpc.aio.ServicerContext[admin_pb2.ListServicesRequest, admin_pb2.ListServicesReply],
    ) -> admin_pb2.ListServicesReply:
        """List services by kind and id, and the clusters that belong to this one."""
        return admin_pb2.ListServicesReply(
            services=listing.service_infos(self._members),
            revision=self._members.revision,
            clusters=self._clusters(),
        )

    async def GetTrace(
        self,
        request: admin_pb2.GetTraceRequest,
        context: grpc.aio.ServicerContext[admin_pb2.GetTraceRequest, admin_pb2.GetTraceReply],
    ) -> admin_pb2.GetTraceReply:
        """Fetch a trace from the monitors' store."""
        return await fetch_trace(self._members, self._channels, request)

    async def ListProfiles(
        self,
        request: admin_pb2.ListProfilesRequest,
        context: grpc.aio.ServicerContext[admin_pb2.ListProfilesRequest, admin_pb2.ListProfilesReply],
    ) -> admin_pb2.ListProfilesReply:
        """List profiles by kind."""
        records = [record for _, record in sorted(self._members.profiles.items())]
        return admin_pb2.ListProfilesReply(profiles=map(profile_message, records))

    async def Record(
        self,
        request: admin_pb2.RecordRequest,
        context: grpc.aio.ServicerContext[admin_pb2.RecordRequest, admin_pb2.RecordedLines],
    ) -> AsyncIterator[admin_pb2.RecordedLines]:
        """Record on the leader; ends when the caller disconnects."""
        if not 0 < request.seconds <= RECORD_S:
            raise AdminError(grpc.StatusCode.INVALID_ARGUMENT, f"seconds: must be from 0 to {RECORD_S:.0f}")
        async with aclosing(self._recorder.record(request.seconds)) as recording:
            async for lines in recording:
                yield admin_pb2.RecordedLines(lines=lines)

    async def GetShadow(
        self,
        request: admin_pb2.GetShadowRequest,
        context: grpc.aio.ServicerContext[admin_pb2.GetShadowRequest, admin_pb2.Shadow],
    ) -> admin_pb2.Shadow:
        """Return the leader's shadow policy."""
        return self._shadowing.message()

    async def ListModels(
        self,
        request: admin_pb2.ListModelsRequest,
        context: grpc.aio.ServicerContext[admin_pb2.ListModelsRequest, admin_pb2.ListModelsReply],
    ) -> admin_pb2.ListModelsReply:
        """List models by their public name."""
        return admin_pb2.ListModelsReply(models=self._rollouts.models())

    async def WatchRollout(
        self,
        request: admin_pb2.WatchRolloutRequest,
        context: grpc.aio.ServicerContext[admin_pb2.WatchRolloutRequest, admin_pb2.RolloutEvent],
    ) -> AsyncIterator[admin_pb2.RolloutEvent]:
        """Stream a rollout's progress; disconnecting does not end the rollout."""
        async with aclosing(self._rollouts.events(request)) as events:
            async for event in events:
                yield event

    # ---- writes

    async def SetShadow(
        self,
        request: admin_pb2.SetShadowRequest,
        context: grpc.aio.ServicerContext[admin_pb2.SetShadowRequest, admin_pb2.SetShadowReply],
    ) -> admin_pb2.SetShadowReply:
        """Set the shadow policy on the leader; it ends with the leadership."""
        previous = self._shadowing.set(request)
        return admin_pb2.SetShadowReply(previous=previous)

    async def SetPolicy(
        self,
        request: admin_pb2.SetPolicyRequest,
        context: grpc.aio.ServicerContext[admin_pb2.SetPolicyRequest, admin_pb2.SetPolicyReply],
    ) -> admin_pb2.SetPolicyReply:
        """Set the policy; reply once every scheduler follows it."""
        in_force = self._active.record
        present, revision = await self._following.set_policy(request)
        previous = present or in_force
        await self._in_force.wait("the policy", revision)
        return admin_pb2.SetPolicyReply(
            previous=previous.name, previous_parameters=format_parameters(previous.parameters)
        )

    async def GetSlo(
        self,
        request: admin_pb2.GetSloRequest,
        context: grpc.aio.ServicerContext[admin_pb2.GetSloRequest, admin_pb2.GetSloReply],
    ) -> admin_pb2.GetSloReply:
        """Return the SLOs in force."""
        return admin_pb2.GetSloReply(slo=slo_message(self._active.slo))

    async def SetSlo(
        self,
        request: admin_pb2.SetSloRequest,
        context: grpc.aio.ServicerContext[admin_pb2.SetSloRequest, admin_pb2.SetSloReply],
    ) -> admin_pb2.SetSloReply:
        """Change SLOs; reply once every scheduler follows them."""
        previous, slo, revision = await self._following.change_slo(given_objectives(request.slo))
        await self._in_force.wait("the record of SLOs", revision)
        return admin_pb2.SetSloReply(slo=slo_message(slo), previous=slo_message(previous))

    async def SetPool(
        self,
        request: admin_pb2.SetPoolRequest,
        context: grpc.aio.ServicerContext[admin_pb2.SetPoolRequest, admin_pb2.SetPoolReply],
    ) -> admin_pb2.SetPoolReply:
        """Move an instance to a pool; UNSPECIFIED removes it from all."""
        # The pool record of an instance that is gone may be removed.
        removes = request.pool == types_pb2.POOL_UNSPECIFIED
        if not (removes and request.instance_id in self._members.pools):
            check_instance(self._state, "instance_id", request.instance_id)
        if request.pool != types_pb2.POOL_UNSPECIFIED and request.pool not in POOLS:
            raise AdminError(grpc.StatusCode.INVALID_ARGUMENT, f"pool: there is no pool {request.pool}")
        name, pool = request.instance_id, POOLS.get(request.pool)
        previous, revision = await self._settings.set_pool(name, pool)
        await self._in_force.wait(f"the pool of {name}", revision)
        return admin_pb2.SetPoolReply(previous=pool_number(previous))

    async def SetStages(
        self,
        request: admin_pb2.SetStagesRequest,
        context: grpc.aio.ServicerContext[admin_pb2.SetStagesRequest, admin_pb2.SetStagesReply],
    ) -> admin_pb2.SetStagesReply:
        """Replace all stages."""
        stages = read_stages(self._state, request.stages)
        await self._in_force.wait("the list of stages", await self._settings.set_stages(stages))
        return admin_pb2.SetStagesReply()

    async def Migrate(
        self,
        request: admin_pb2.AdminMigrateRequest,
        context: grpc.aio.ServicerContext[admin_pb2.AdminMigrateRequest, migration_pb2.MigrationRecord],
    ) -> AsyncIterator[migration_pb2.MigrationRecord]:
        """Migrate a request and stream its records; disconnecting does not abort the migration.

        The last record comes once the model shows the request at the target, so that it can be named again.
        """
        matches = find_request(self._state, request.request_id)
        check_instance(self._state, "target_instance_id", request.target_instance_id)
        records = self._migration_starter.move(
            matches,
            request.target_instance_id,
            request.reason or OPERATOR,
            OPERATOR,
            request.mode or worker_pb2.COPY_MODE_PRE_COPY,
        )
        async for record in records:
            if record.state == types_pb2.MIGRATION_STATE_COMMITTED:
                await self._shown_at(record.target_instance_id, record.request_id)
            yield record

    async def _shown_at(self, instance_id: str, request_id: str) -> None:
        """Wait, but not for long, until the instance's own report shows the request: it may have ended."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_SHOWN_WITHIN_S):
                # Reports come from a stream of many; waiting for one request has no event of its own.
                while self._state.located(request_id) != instance_id:  # noqa: ASYNC110
                    await asyncio.sleep(_POLL_S)

    async def Profile(
        self,
        request: admin_pb2.AdminProfileRequest,
        context: grpc.aio.ServicerContext[admin_pb2.AdminProfileRequest, profile_pb2.ProfileEvent],
    ) -> AsyncIterator[profile_pb2.ProfileEvent]:
        """Profile an instance; any scheduler relays the call to the worker. Ends when the caller
        disconnects."""
        check_instance(self._state, "instance_id", request.instance_id)
        async for event in profile_events(self._members, self._channels, request):
            yield event

    async def Drain(
        self,
        request: admin_pb2.DrainRequest,
        context: grpc.aio.ServicerContext[admin_pb2.DrainRequest, admin_pb2.DrainEvent],
    ) -> AsyncIterator[admin_pb2.DrainEvent]:
        """Drain an instance and stream the progress; disconnecting does not stop the draining."""
        name = request.instance_id
        if request.undrain:
            check_drained(self._state, self._members.drained, name)
            await self._in_force.wait(f"the end of the drain of {name}", await self._settings.undrain(name))
            yield admin_pb2.DrainEvent(message=f"{name} takes new requests", done=True)
            return
        check_instance(self._state, "instance_id", name)
        await self._in_force.wait(f"the drain of {name}", await self._settings.drain(name))
        async for event in drain_events(self._state, name):
            yield event

    async def Rollout(
        self,
        request: admin_pb2.RolloutRequest,
        context: grpc.aio.ServicerContext[admin_pb2.RolloutRequest, admin_pb2.RolloutInfo],
    ) -> admin_pb2.RolloutInfo:
        """Begin a rollout, which the leader then advances by itself."""
        return await self._rollouts.begin(request)

    async def UndoRollout(
        self,
        request: admin_pb2.UndoRolloutRequest,
        context: grpc.aio.ServicerContext[admin_pb2.UndoRolloutRequest, admin_pb2.RolloutInfo],
    ) -> admin_pb2.RolloutInfo:
        """Begin a rollout back to the previous model."""
        return await self._rollouts.undo(request)

    async def ForgetRollout(
        self,
        request: admin_pb2.ForgetRolloutRequest,
        context: grpc.aio.ServicerContext[admin_pb2.ForgetRolloutRequest, admin_pb2.ForgetRolloutReply],
    ) -> admin_pb2.ForgetRolloutReply:
        """Remove the record of a finished rollout, if the front ends' behaviour does not change with it."""
        await self._rollouts.forget(request.model)
        return admin_pb2.ForgetRolloutReply()
