"""An admin API that replies from a script: the result or the error of each call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc
from google.protobuf.message import Message

from tailrace.v1 import admin_pb2 as admin
from tailrace.v1 import admin_pb2_grpc, migration_pb2, profile_pb2, types_pb2


@dataclass
class Script:
    """The replies and errors of the server."""

    instances: list[admin.InstanceInfo] = field(default_factory=list)
    recent: admin.RecentFigures | None = None
    requests: list[admin.RequestInfo] = field(default_factory=list)
    migrations: list[migration_pb2.MigrationRecord] = field(default_factory=list)
    policies: list[admin.PolicyInfo] = field(default_factory=list)
    stages: list[types_pb2.Stage] = field(default_factory=list)
    services: list[admin.ServiceInfo] = field(default_factory=list)
    clusters: list[admin.ClusterInfo] = field(default_factory=list)
    migrate_events: list[migration_pb2.MigrationRecord] = field(default_factory=list)
    drain_events: list[admin.DrainEvent] = field(default_factory=list)
    profile_events: list[profile_pb2.ProfileEvent] = field(default_factory=list)
    profiles: list[profile_pb2.MeasuredProfile] = field(default_factory=list)
    # Called after the recorded lines.
    recording_goes_on: Callable[[], None] | None = None
    models: list[admin.ModelInfo] = field(default_factory=list)
    rollout: admin.RolloutInfo = field(default_factory=admin.RolloutInfo)
    rollout_events: list[admin.RolloutEvent] = field(default_factory=list)
    traces: bytes = b""
    recorded: list[bytes] = field(default_factory=list)
    # The error after a recording's lines, or a drain's events.
    stream_ends: tuple[grpc.StatusCode, str] | None = None
    shadow: admin.Shadow = field(default_factory=lambda: admin.Shadow(policy="pascal"))
    slo: admin.Slo = field(default_factory=lambda: admin.Slo(ttft_s=2.0, tpot_s=0.15))
    # Method name to its error status.
    errors: dict[str, tuple[grpc.StatusCode, str]] = field(default_factory=dict)
    # How often a method still fails so; without: each time.
    failures: dict[str, int] = field(default_factory=dict)
    # Trailing metadata of these errors.
    error_metadata: tuple[tuple[str, str], ...] = ()
    # Every received request, in order.
    received: list[Message] = field(default_factory=list)


class ScriptedAdmin(admin_pb2_grpc.AdminServicer):
    """Serve a script."""

    def __init__(self, script: Script) -> None:
        self.script = script

    def _record(self, method: str, request: Message, context: grpc.ServicerContext) -> None:
        self.script.received.append(request)
        if method in self.script.errors and self.script.failures.get(method, 1):
            if method in self.script.failures:
                self.script.failures[method] -= 1
            context.set_trailing_metadata(self.script.error_metadata)
            context.abort(*self.script.errors[method])

    def ListInstances(
        self, request: admin.ListInstancesRequest, context: grpc.ServicerContext
    ) -> admin.ListInstancesReply:
        self._record("ListInstances", request, context)
        return admin.ListInstancesReply(instances=self.script.instances, recent=self.script.recent)

    def ListRequests(
        self, request: admin.ListRequestsRequest, context: grpc.ServicerContext
    ) -> admin.ListRequestsReply:
        self._record("ListRequests", request, context)
        found = [
            row
            for row in self.script.requests
            if request.instance_id in ("", row.instance_id) and request.phase in (0, row.phase)
        ]
        if request.order == admin.REQUEST_ORDER_OLDEST:
            found.sort(key=lambda row: -row.age_s)
        begin = int(request.page_token or 0)
        end = begin + (request.page_size or len(found))
        return admin.ListRequestsReply(
            requests=found[begin:end],
            total_size=len(found),
            next_page_token=str(end) if end < len(found) else "",
        )

    def ListMigrations(
        self, request: migration_pb2.ListMigrationsRequest, context: grpc.ServicerContext
    ) -> migration_pb2.ListMigrationsReply:
        self._record("ListMigrations", request, context)
        found = [row for row in self.script.migrations if request.request_id in ("", row.request_id)]
        return migration_pb2.ListMigrationsReply(migrations=found[: request.limit])

    def ListPolicies(
        self, request: admin.ListPoliciesRequest, context: grpc.ServicerContext
    ) -> admin.ListPoliciesReply:
        self._record("ListPolicies", request, context)
        return admin.ListPoliciesReply(policies=self.script.policies)

    def ListStages(
        self, request: admin.ListStagesRequest, context: grpc.ServicerContext
    ) -> admin.ListStagesReply:
        self._record("ListStages", request, context)
        return admin.ListStagesReply(stages=self.script.stages)

    def ListServices(
        self, request: admin.ListServicesRequest, context: grpc.ServicerContext
    ) -> admin.ListServicesReply:
        self._record("ListServices", request, context)
        return admin.ListServicesReply(services=self.script.services, clusters=self.script.clusters)

    def SetPolicy(
        self, request: admin.SetPolicyRequest, context: grpc.ServicerContext
    ) -> admin.SetPolicyReply:
        self._record("SetPolicy", request, context)
        return admin.SetPolicyReply(previous="pascal", previous_parameters={"quantum_tokens": "200"})

    def GetSlo(self, request: admin.GetSloRequest, context: grpc.ServicerContext) -> admin.GetSloReply:
        self._record("GetSlo", request, context)
        return admin.GetSloReply(slo=self.script.slo)

    def SetSlo(self, request: admin.SetSloRequest, context: grpc.ServicerContext) -> admin.SetSloReply:
        self._record("SetSlo", request, context)
        # A zero removes an objective.
        kept = {field.name: value for field, value in request.slo.ListFields() if value}
        return admin.SetSloReply(slo=admin.Slo(**kept), previous=self.script.slo)

    def SetPool(self, request: admin.SetPoolRequest, context: grpc.ServicerContext) -> admin.SetPoolReply:
        self._record("SetPool", request, context)
        return admin.SetPoolReply(previous=types_pb2.POOL_DECODE)

    def SetStages(
        self, request: admin.SetStagesRequest, context: grpc.ServicerContext
    ) -> admin.SetStagesReply:
        self._record("SetStages", request, context)
        return admin.SetStagesReply()

    def Migrate(
        self, request: admin.AdminMigrateRequest, context: grpc.ServicerContext
    ) -> Iterator[migration_pb2.MigrationRecord]:
        self._record("Migrate", request, context)
        yield from self.script.migrate_events

    def Drain(self, request: admin.DrainRequest, context: grpc.ServicerContext) -> Iterator[admin.DrainEvent]:
        self._record("Drain", request, context)
        yield from self.script.drain_events
        if self.script.stream_ends is not None:
            context.abort(*self.script.stream_ends)

    def Rollout(self, request: admin.RolloutRequest, context: grpc.ServicerContext) -> admin.RolloutInfo:
        self._record("Rollout", request, context)
        return self.script.rollout

    def UndoRollout(
        self, request: admin.UndoRolloutRequest, context: grpc.ServicerContext
    ) -> admin.RolloutInfo:
        self._record("UndoRollout", request, context)
        return self.script.rollout

    def WatchRollout(
        self, request: admin.WatchRolloutRequest, context: grpc.ServicerContext
    ) -> Iterator[admin.RolloutEvent]:
        self._record("WatchRollout", request, context)
        yield from self.script.rollout_events

    def ForgetRollout(
        self, request: admin.ForgetRolloutRequest, context: grpc.ServicerContext
    ) -> admin.ForgetRolloutReply:
        self._record("ForgetRollout", request, context)
        return admin.ForgetRolloutReply()

    def ListModels(
        self, request: admin.ListModelsRequest, context: grpc.ServicerContext
    ) -> admin.ListModelsReply:
        self._record("ListModels", request, context)
        return admin.ListModelsReply(models=self.script.models)

    def Profile(
        self, request: admin.AdminProfileRequest, context: grpc.ServicerContext
    ) -> Iterator[profile_pb2.ProfileEvent]:
        self._record("Profile", request, context)
        yield from self.script.profile_events

    def ListProfiles(
        self, request: admin.ListProfilesRequest, context: grpc.ServicerContext
    ) -> admin.ListProfilesReply:
        self._record("ListProfiles", request, context)
        return admin.ListProfilesReply(profiles=self.script.profiles)

    def Record(
        self, request: admin.RecordRequest, context: grpc.ServicerContext
    ) -> Iterator[admin.RecordedLines]:
        self._record("Record", request, context)
        for line in self.script.recorded:
            yield admin.RecordedLines(lines=[line])
        if self.script.recording_goes_on:
            self.script.recording_goes_on()
        if self.script.stream_ends is not None:
            context.abort(*self.script.stream_ends)

    def SetShadow(
        self, request: admin.SetShadowRequest, context: grpc.ServicerContext
    ) -> admin.SetShadowReply:
        self._record("SetShadow", request, context)
        return admin.SetShadowReply(previous=self.script.shadow.name)

    def GetShadow(self, request: admin.GetShadowRequest, context: grpc.ServicerContext) -> admin.Shadow:
        self._record("GetShadow", request, context)
        return self.script.shadow

    def GetTrace(self, request: admin.GetTraceRequest, context: grpc.ServicerContext) -> admin.GetTraceReply:
        self._record("GetTrace", request, context)
        return admin.GetTraceReply(traces_data=self.script.traces)


@contextmanager
def serving(script: Script) -> Iterator[str]:
    """Serve the script on a free port; yield its address."""
    server = grpc.server(ThreadPoolExecutor(4))
    admin_pb2_grpc.add_AdminServicer_to_server(ScriptedAdmin(script), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def small_fleet() -> Script:
    """Return two instances with one request each, a finished migration, and two policies, one active."""
    record = migration_pb2.MigrationRecord(
        migration_id="m-1",
        request_id="chatcmpl-aaa1",
        source_instance_id="worker-0",
        target_instance_id="worker-1",
        epoch=1,
        state=types_pb2.MIGRATION_STATE_COMMITTED,
        phase=types_pb2.PHASE_REASONING,
        reason="operator",
        bytes=3 * 2**20,
        pause_ms=4.25,
        pause_steps=1.5,
        tokens=640,
    )
    record.rounds.add(number=1, blocks=38, bytes=2 * 2**20, ms=8.0)
    record.rounds.add(number=2, blocks=2, bytes=2**20, ms=2.0)
    opened = migration_pb2.MigrationRecord()
    opened.CopyFrom(record)
    opened.state = types_pb2.MIGRATION_STATE_PRE_COPY
    del opened.rounds[1:]
    return dataclasses.replace(
        Script(),
        instances=[
            admin.InstanceInfo(
                instance_id="worker-0",
                address="127.0.0.1:7001",
                engine="vllm",
                model="tiny",
                state=types_pb2.INSTANCE_STATE_ACTIVE,
                pool=types_pb2.POOL_PREFILL,
                running=3,
                reasoning=2,
                answering=1,
                kv_blocks_used=25,
                kv_blocks_total=100,
                block_tokens=16,
                token_interval_ms=10.0,
                generated_tokens=2**40,
            ),
            admin.InstanceInfo(
                instance_id="worker-1",
                address="127.0.0.1:7002",
                engine="simulated",
                state=types_pb2.INSTANCE_STATE_SUSPECT,
                kv_blocks_total=100,
            ),
        ],
        requests=[
            admin.RequestInfo(
                request_id="chatcmpl-aaa1",
                instance_id="worker-0",
                epoch=2,
                phase=types_pb2.PHASE_REASONING,
                state=types_pb2.REQUEST_STATE_RUNNING,
                prompt_tokens=40,
                output_tokens=600,
                reasoning_tokens=600,
                max_tokens=2000,
            ),
            admin.RequestInfo(
                request_id="chatcmpl-aab2",
                instance_id="worker-1",
                phase=types_pb2.PHASE_ANSWERING,
                state=types_pb2.REQUEST_STATE_WAITING,
            ),
        ],
        migrations=[record],
        policies=[
            admin.PolicyInfo(name="least_loaded", summary="fewest requests", active=True),
            admin.PolicyInfo(name="round_robin", summary="in turn"),
        ],
        stages=[types_pb2.Stage(lo=0, hi=8192, instance_ids=["worker-0", "worker-1"])],
        services=[
            admin.ServiceInfo(kind="scheduler", id="scheduler", address="127.0.0.1:7101", leader=True),
            admin.ServiceInfo(
                kind="frontend",
                id="frontend",
                address="127.0.0.1:7102",
                http_address="127.0.0.1:8000",
                asleep=True,
            ),
        ],
        migrate_events=[opened, record],
        drain_events=[
            admin.DrainEvent(remaining=2),
            admin.DrainEvent(remaining=0, message="worker-0 is empty", done=True),
        ],
    )
