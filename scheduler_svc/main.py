"""`tailrace serve scheduler`: places requests, runs the policy, and serves the admin API."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import click

from scheduler_svc.actuator import Actuator, WorkerCalls
from scheduler_svc.admin.errors import AdminErrors
from scheduler_svc.admin.forward import LeaderForwarding, LeaderRoute
from scheduler_svc.admin.in_force import InForce
from scheduler_svc.admin.listing import cluster_info
from scheduler_svc.admin.rollout_calls import RolloutCalls
from scheduler_svc.admin.servicer import AdminServicer
from scheduler_svc.admin.shadowing import Shadowing
from scheduler_svc.cache_sync import CacheSync
from scheduler_svc.desired import LOOP, DesiredMetrics
from scheduler_svc.drainer import Drainer
from scheduler_svc.following import Following, hung_before
from scheduler_svc.loop import DecisionLoop
from scheduler_svc.metrics import SchedulerMetrics
from scheduler_svc.migrations import Migrations, MigrationStarter
from scheduler_svc.monitor_watch import MonitorWatch
from scheduler_svc.orphans import remove_orphaned_records
from scheduler_svc.recorder import Recorder
from scheduler_svc.rollouts import Rollouts
from scheduler_svc.servicer import SchedulerServicer
from scheduler_svc.settings import Settings
from tailrace.brief_help import BriefCommand
from tailrace.control.active_policy import ActivePolicy, warm_up
from tailrace.control.events import KnownMembers, MembersChanged
from tailrace.control.guard import DEFAULT_BUDGETS, Budgets, PolicyGuard
from tailrace.control.live import LiveControl
from tailrace.control.reported_cluster import ReportedCluster
from tailrace.numeric import Duration, RealRange
from tailrace.policy.parameters import ParameterError, read_assignments
from tailrace.policy.registry import UnknownPolicyError, UnusablePolicyError, all_parameters, load
from tailrace.records import PolicyRecord
from tailrace.scaling import DEFAULT_SCALING, Scaling
from tailrace.security.audit import AuditFile, Auditing
from tailrace.service.options import CommonOptions, common_options, file_of
from tailrace.service.runtime import ServiceContext, Shutdown, open_service, run_service
from tailrace.service.server import Servicer, serve_grpc
from tailrace.service.settings import settings_options
from tailrace.service.tasks import Loop, supervised
from tailrace.service.watchdog import waited_for_core_s
from tailrace.store.election import Leadership
from tailrace.store.model_clusters import SERVICES, ModelClusters
from tailrace.telemetry.audit import audit_export
from tailrace.v1 import admin_pb2
from tailrace.v1.admin_pb2_grpc import add_AdminServicer_to_server
from tailrace.v1.scheduler_pb2_grpc import add_SchedulerServicer_to_server

log = logging.getLogger(__name__)

KIND: Final = "scheduler"
DEFAULT_POLICY: Final = "least_loaded"
# Resigning leadership takes two calls to etcd.
_DRAIN_S: Final = 10.0


@click.command("scheduler", cls=BriefCommand)
@common_options(KIND)
@click.option(
    "--policy",
    default=DEFAULT_POLICY,
    show_default=True,
    metavar="NAME",
    help="Default policy until one is set with `tailrace set policy`.",
)
@click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="KEY=VALUE",
    help="A parameter of that policy; can be repeated.",
)
@click.option(
    "--audit-log",
    type=click.Path(dir_okay=False, path_type=Path),
    envvar="TAILRACE_AUDIT_LOG",
    metavar="FILE",
    help="Append an audit log of admin API changes, as JSON lines.  [default: to the log]",
)
@click.option(
    "--call-budget",
    "call_budget_s",
    type=Duration(min=0.001, max=10.0),
    default=DEFAULT_BUDGETS.call_s,
    show_default=True,
    metavar="SECONDS",
    help="A policy that takes longer for a placement, several times in a row, is suspended.",
)
@click.option(
    "--tick-budget",
    "tick_budget_share",
    type=RealRange(min=0.01, max=10.0),
    default=DEFAULT_BUDGETS.tick_share,
    show_default=True,
    metavar="SHARE",
    help="The same for its ticks, as a share of its tick interval.",
)
@settings_options(Scaling, "scaling")
def command(
    common: CommonOptions,
    policy: str,
    assignments: tuple[str, ...],
    audit_log: Path | None,
    call_budget_s: float,
    tick_budget_share: float,
    scaling: Scaling,
) -> None:
    """Decide where requests run; run a second scheduler as a standby."""
    if scaling.least > scaling.most:
        raise click.UsageError(f"--desired-min {scaling.least} must not exceed --desired-max {scaling.most}")
    hung = hung_before()
    try:
        parameters = read_assignments(assignments)
        load(policy, parameters=parameters)
        values = all_parameters(policy, parameters)
    except ParameterError as error:
        raise click.BadParameter(str(error), param_hint="--set") from error
    except (UnknownPolicyError, UnusablePolicyError) as error:
        raise click.BadParameter(str(error), param_hint="--policy") from error
    default = PolicyRecord(name=policy, parameters={name: values[name] for name in parameters})
    budgets = Budgets(call_budget_s, tick_budget_share)
    run_service(lambda shutdown: serve(common, default, shutdown, audit_log, budgets, hung, scaling))


async def serve(
    common: CommonOptions,
    policy: PolicyRecord,
    shutdown: Shutdown,
    audit_log: Path | None = None,
    budgets: Budgets = DEFAULT_BUDGETS,
    hung: PolicyRecord | None = None,
    scaling: Scaling = DEFAULT_SCALING,
) -> None:
    """Run the scheduler until cancelled. Raise StoreUnavailable, ListenError or OSError.

    `hung`: the policy, suspended, that made this process restart because a call did not return.
    """
    async with open_service(KIND, common) as service:
        leading = Leadership()
        parts = Parts(service, policy, leading, budgets, scaling)
        route = LeaderRoute(common.member_id, service.members, service.channels, leading)
        allowed = [AdminErrors(), LeaderForwarding(route)]
        async with (
            parts.following_members(hung),
            auditing(common.member_id, audit_log) as audit,
            serve_grpc(common.listen, parts.servicers, common.transport, [audit], allowed) as server,
            await service.stand(server.address, leading) as membership,
        ):

            async def drain() -> None:
                # Let another scheduler lead and serve front ends before this one stops answering.
                await server.set_serving(False)
                await membership.aclose()

            with shutdown.draining(drain, _DRAIN_S):
                try:
                    await parts.run()
                finally:
                    await membership.aclose()
                    await parts.actuator.close()
                    await parts.migrations.close()


@asynccontextmanager
async def auditing(name: str, path: Path | None) -> AsyncIterator[Auditing]:
    """Open the audit log. Raise OSError if the file cannot be appended to."""
    with file_of("--audit-log"):
        file = AuditFile(path)
    export = audit_export(KIND, name)
    try:
        yield Auditing(file) if export is None else Auditing(file, export)
    finally:
        file.close()
        if export is not None:
            await export.close()


class Parts:
    """Build and connect the scheduler's parts."""

    def __init__(
        self,
        service: ServiceContext,
        policy: PolicyRecord,
        leading: Leadership,
        budgets: Budgets,
        scaling: Scaling,
    ) -> None:
        self.metrics = SchedulerMetrics(service.registry)
        self.metrics.leading.set_function(lambda: float(leading.is_set()))
        self.state = ReportedCluster()
        self.metrics.cache_index_blocks.set_function(lambda: float(len(self.state.cache.index)))
        self.metrics.pending_placements.set_function(lambda: float(self.state.pending_placements))
        self.metrics.cache_snapshots.set_function(lambda: float(self.state.cache.follower.snapshots))
        self.active = ActivePolicy(policy, service.members.slo)
        self._members = service.members
        self._cluster = service.common.cluster
        self._below = ModelClusters(service.store, SERVICES)
        self._leading = leading
        self._desired = DesiredMetrics(self.state, service.members, self.active, scaling, leading)
        service.registry.register(self._desired)
        settings = self._settings = Settings(service.store)
        migrations = self.migrations = Migrations(service.members, service.channels)
        migration_starter = MigrationStarter(self.state, migrations)
        workers = WorkerCalls(self.state, service.channels)
        self.actuator = Actuator(self.state, migration_starter, workers, settings, self.metrics)
        guard = PolicyGuard(self.metrics, budgets, waited_for_core_s)
        self.control = LiveControl(self.state, self.active, self.actuator, guard)
        self._following = Following(self.control, service.members, settings, guard)
        guard.on_suspend = self._following.suspend
        self.metrics.policy_suspended.set_function(lambda: float(bool(self.active.record.suspended)))
        self._loop = DecisionLoop(self.control, leading, self.metrics, self._desired.asked_in_vain)
        self._drainer = Drainer(self.state, self.actuator, leading)
        name = service.common.member_id
        self._watch = MonitorWatch(
            name, service.members, service.channels, self.state, self._loop.handle_report, self.metrics
        )
        self._cache_sync = CacheSync(self.state, service.channels)
        self._rollouts = Rollouts(service.members, self.state, settings.swap_rollout, leading)
        shadowing = Shadowing(self.control, self.metrics, guard)
        leading.on_end(shadowing.end)
        leading.on_end(self._loop.forget_ticks)
        admin = AdminServicer(
            self.state,
            service.members,
            service.channels,
            self.active,
            self._following,
            settings,
            migration_starter,
            migrations,
            Recorder(self.control, leading),
            shadowing,
            RolloutCalls(self._rollouts, service.members, settings),
            InForce(service.common.member_id, service.members, service.channels),
            self._clusters,
        )
        self.servicers = [
            Servicer(
                add_SchedulerServicer_to_server,
                SchedulerServicer(self._loop, service.members, service.tracing),
                "tailrace.v1.Scheduler",
            ),
            Servicer(add_AdminServicer_to_server, admin, "tailrace.v1.Admin"),
        ]

    @asynccontextmanager
    async def following_members(self, hung: PolicyRecord | None) -> AsyncIterator[None]:
        """Follow etcd, and watch the calls of policies, the loading of the first one included, during the
        block. `hung`: as in `serve`."""
        with self._following.watched_calls():
            if hung is not None:
                self._following.suspend_record(hung)
            self._follow_members()
            self._members.add_listener(self._follow_members)
            yield

    async def run(self) -> None:
        """Run until cancelled."""
        loops: dict[str, Loop] = {
            "policies": warm_up,
            "suspensions": self._following.run,
            "monitors": self._watch.run,
            "prefix caches": self._cache_sync.run,
            "ticks": self._loop.run_ticks,
            "drains": self._drainer.run,
            "rollouts": self._rollouts.run,
            LOOP: self._desired.run,
            "model clusters": self._below.follow,
            "orphaned records": lambda: remove_orphaned_records(
                self._members, self._settings.delete_orphaned_records, self._leading
            ),
        }
        async with supervised(loops):
            await asyncio.get_running_loop().create_future()

    def _clusters(self) -> list[admin_pb2.ClusterInfo]:
        below = self._below.records.items()
        return [
            cluster_info(self._cluster, self._members.services.values()),
            *(cluster_info(f"{self._cluster}.{name}", each.services) for name, each in below),
        ]

    def _follow_members(self) -> None:
        self.control.handle(MembersChanged(KnownMembers.of(self._members), time.monotonic()))
        services = self._members.services.items()
        self.metrics.keep_members(
            {name: record.model for name, record in self._members.instances.items()},
            {name: record.model for (kind, name), record in services if kind == "frontend"},
        )
        self._following.follow()
        self.metrics.in_force(self.active.name)
