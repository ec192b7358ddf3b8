"""Convert the cluster's state to the admin API's messages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from tailrace.cache.index import Tier
from tailrace.cluster import InstanceView, Phase, RequestView, Stage
from tailrace.control.recent_answers import Recent
from tailrace.control.reported_cluster import ReportedCluster
from tailrace.control.reported_instance import ReportedInstance
from tailrace.messages import (
    INSTANCE_STATE_NUMBERS,
    PHASE_NUMBERS,
    REQUEST_STATE_NUMBERS,
    TRANSFER_MODES,
    pool_number,
)
from tailrace.policy import registry
from tailrace.policy.parameters import Parameter, Value, format_value
from tailrace.records import PolicyRecord, ServiceRecord
from tailrace.service.tasks import in_slices
from tailrace.slo import Slo
from tailrace.store.membership import Membership
from tailrace.v1 import admin_pb2, monitor_pb2, types_pb2


async def instance_infos(state: ReportedCluster, slo: Slo, now_s: float) -> list[admin_pb2.InstanceInfo]:
    """Return all instances; `now_s` is the scheduler's monotonic clock.

    For a large fleet that takes long, and is done in slices between which placements get their turn.
    """
    phases: defaultdict[str, list[Phase]] = defaultdict(list)
    async for location in in_slices(state.locations()):
        phases[location.instance_id].append(location.phase)
    view = state.view()
    return [
        _instance_info(state, tracked, instance, phases[name], slo, now_s)
        async for name, instance in in_slices(view.instances.items())
        # It may have left meanwhile.
        if (tracked := state.tracked(name)) is not None
    ]


def _instance_info(
    state: ReportedCluster,
    tracked: ReportedInstance,
    view: InstanceView,
    phases: Sequence[Phase],
    slo: Slo,
    now_s: float,
) -> admin_pb2.InstanceInfo:
    name = view.instance_id
    record = tracked.record
    # Not reported yet: all zero, including the capacity.
    load = tracked.load if tracked.load is not None else monitor_pb2.InstanceLoad()
    return admin_pb2.InstanceInfo(
        instance_id=name,
        incarnation=record.incarnation,
        address=record.address,
        metrics_address=record.metrics_address,
        engine=record.engine,
        model=record.model,
        state=INSTANCE_STATE_NUMBERS[view.state],
        pool=pool_number(view.pool),
        running=view.running,
        waiting=view.waiting,
        prefilling=phases.count(Phase.PREFILL),
        reasoning=phases.count(Phase.REASONING),
        answering=phases.count(Phase.ANSWERING),
        kv_blocks_used=load.kv_blocks_used,
        kv_blocks_total=load.kv_blocks_total,
        block_tokens=tracked.block_tokens,
        token_interval_ms=load.token_interval_ms_mean,
        migrations_in=load.migrations_in,
        migrations_out=load.migrations_out,
        # A report may be later than what the caller takes for now.
        report_age_s=max(0.0, now_s - tracked.last_report_s),
        generated_tokens=load.generated_tokens,
        preemptions=load.preemptions,
        profile_kind=record.profile_kind,
        cached_blocks=state.cache.index.count(name),
        cached_host_blocks=state.cache.index.count(name, Tier.HOST),
        prompt_tokens=load.prompt_tokens,
        cached_prompt_tokens=load.cached_prompt_tokens,
        model_key=record.model_identity.key,
        way=TRANSFER_MODES[record.handover.mode],
        way_reason=record.handover.reason,
        ranks=[admin_pb2.RankInfo(process=rank.process, hardware=rank.hardware) for rank in record.ranks],
        tensor_parallel_size=record.tensor_parallel_size,
        pipeline_parallel_size=record.pipeline_parallel_size,
        recent=recent_figures(state.recent.of(name, now_s), slo),
    )


def recent_figures(recent: Recent, slo: Slo) -> admin_pb2.RecentFigures:
    """Return what happened of late to one instance or to all."""
    (ttft_p50_s, ttft_p99_s), (tpot_p50_s, tpot_p99_s) = recent.ttft_s(), recent.tpot_s()
    return admin_pb2.RecentFigures(
        answers=len(recent.answers),
        ttft_ms_p50=1e3 * ttft_p50_s,
        ttft_ms_p99=1e3 * ttft_p99_s,
        tpot_ms_p50=1e3 * tpot_p50_s,
        tpot_ms_p99=1e3 * tpot_p99_s,
        slo_attainment=recent.attainment(slo),
        moves_in=recent.moves_in,
        moves_out=recent.moves_out,
    )


def request_info(state: ReportedCluster, request: RequestView, wall_s: float) -> admin_pb2.RequestInfo:
    """Return one request; `wall_s` is the time of day."""
    tracked = state.tracked(request.instance_id)
    block_tokens = tracked.block_tokens if tracked is not None else 1
    return admin_pb2.RequestInfo(
        request_id=request.request_id,
        frontend_id=request.frontend_id,
        instance_id=request.instance_id,
        epoch=request.epoch,
        phase=PHASE_NUMBERS[request.phase],
        state=REQUEST_STATE_NUMBERS[request.state],
        prompt_tokens=request.prompt_tokens,
        output_tokens=request.output_tokens,
        reasoning_tokens=request.reasoning_tokens,
        max_tokens=request.max_tokens,
        kv_blocks=request.kv_tokens // block_tokens,
        age_s=max(0.0, wall_s - request.arrival_s) if request.arrival_s else 0.0,
        token_interval_ms=request.token_interval_s * 1e3,
        migrating=request.migrating,
        pacer_slack_tokens=request.pacer_slack_tokens,
        qoe=request.qoe,
        predicted_remaining_tokens=request.predicted_remaining_tokens,
        demoted=request.demoted,
    )


def policy_infos(active: PolicyRecord, values: Mapping[str, Value]) -> list[admin_pb2.PolicyInfo]:
    """Return all installed policies, the active one by the name that was set, with its order if that is
    another policy's; `values`: the parameters of the active one.

    A policy that cannot be loaded is listed with the reason.
    """
    infos = []
    active_name, *_ = registry.parts_of(active.name)
    for installed in registry.names():
        is_active = installed == active_name
        name = active.name if is_active else installed
        info = admin_pb2.PolicyInfo(name=name, active=is_active)
        info.suspended = active.suspended if info.active else ""
        # The one in force has been loaded, whatever is known of others yet.
        in_force = is_active and not active.suspended
        info.summary = "" if in_force else registry.problem_of(installed)
        if not info.summary:
            choice = registry.choose(name)
            declared = registry.declared_parameters(choice.policy, choice.order)
            info.summary = choice.policy.summary
            given = values if info.active else {}
            info.parameters.extend(_parameter(p, given.get(p.name)) for p in declared)
            info.batch_order = choice.order
        infos.append(info)
    return infos


def _parameter(parameter: Parameter, value: Value | None) -> admin_pb2.PolicyParameter:
    return admin_pb2.PolicyParameter(
        name=parameter.name,
        type=parameter.type_name,
        unit=parameter.unit,
        description=parameter.description,
        source=parameter.source,
        default=format_value(parameter.default),
        value="" if value is None else format_value(value),
        allowed=parameter.allowed,
    )


def stage_messages(stages: tuple[Stage, ...]) -> list[types_pb2.Stage]:
    """Return the stages as messages."""
    return [types_pb2.Stage(lo=s.lo, hi=s.hi, instance_ids=s.instance_ids) for s in stages]


def cluster_info(name: str, services: Collection[ServiceRecord]) -> admin_pb2.ClusterInfo:
    """Return a cluster by its services."""
    models = {record.model_name for record in services if record.kind == "frontend" and record.model_name}
    addresses = {record.address for record in services if record.kind == "scheduler"}
    return admin_pb2.ClusterInfo(name=name, models=sorted(models), admin_addresses=sorted(addresses))


def service_infos(members: Membership) -> list[admin_pb2.ServiceInfo]:
    """Return all services by kind and id."""
    return [
        admin_pb2.ServiceInfo(
            kind=record.kind,
            id=record.service_id,
            address=record.address,
            leader=(leader := members.leaders.get(record.kind)) is not None
            and leader.service_id == record.service_id,
            http_address=record.http_address,
            metrics_address=record.metrics_address,
            asleep=record.asleep,
        )
        for _, record in sorted(members.services.items())
    ]
