"""What the page shows of the fleet at one time, as columns, and the alerts that follow from it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from tailrace.cli.plain import JsonValue, enum_word, to_plain, to_plain_list
from tailrace.v1.admin_pb2 import InstanceInfo, PolicyInfo, RecentFigures, RequestInfo, ServiceInfo, Slo
from tailrace.v1.migration_pb2 import MigrationRecord
from tailrace.v1.types_pb2 import (
    INSTANCE_STATE_ACTIVE,
    INSTANCE_STATE_DRAINING,
    INSTANCE_STATE_SUSPECT,
    MIGRATION_STATE_ABORTED,
    MIGRATION_STATE_UNKNOWN,
    InstanceState,
    Pool,
    Stage,
)

REQUESTS_MAX: Final = 20_000
"""Most requests in a snapshot."""
MIGRATIONS_MAX: Final = 200
"""Most migrations in a snapshot, the latest ones."""

_SILENT_S: Final = 5.0
_KV_FULL: Final = 0.95
_ATTAINMENT: Final = 0.95
# Fewer answers say little about a share.
_ANSWERS_MIN: Final = 20
_LED: Final = ("scheduler", "monitor", "migration")


@dataclass(frozen=True, slots=True)
class Sample:
    """The replies of the admin API at one time. `at_s`: seconds since the Unix epoch."""

    at_s: float
    instances: Sequence[InstanceInfo] = ()
    recent: RecentFigures = field(default_factory=RecentFigures)
    requests: Sequence[RequestInfo] = ()
    requests_total: int = 0
    migrations: Sequence[MigrationRecord] = ()
    policies: Sequence[PolicyInfo] = ()
    services: Sequence[ServiceInfo] = ()
    stages: Sequence[Stage] = ()
    slo: Slo = field(default_factory=Slo)
    # What did not answer, by the name of the call.
    problems: Mapping[str, str] = field(default_factory=dict)


def snapshot(now: Sample, before: Sample | None, session: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """Return the snapshot of a sample. `before`: the sample from which token rates are computed."""
    active = active_policy(now.policies)
    rates = _token_rates(now, before)
    numbers = {instance.instance_id: number for number, instance in enumerate(now.instances)}
    return {
        "at": now.at_s,
        "session": dict(session),
        "policy": {"name": active.name, "suspended": active.suspended} if active is not None else None,
        "slo": {field.name: value for field, value in now.slo.ListFields()},
        "recent": to_plain(now.recent),
        "tokens_per_s": round(sum(rates), 1),
        "instances": _instance_columns(now, rates),
        "requests": _request_columns(now.requests[:REQUESTS_MAX], numbers),
        "requests_total": max(now.requests_total, len(now.requests)),
        "migrations": to_plain_list(now.migrations[:MIGRATIONS_MAX]),
        "stages": to_plain_list(now.stages),
        "services": to_plain_list(now.services),
        "alerts": alerts(now),
    }


def active_policy(policies: Sequence[PolicyInfo]) -> PolicyInfo | None:
    """Return the active policy; None while it is unknown."""
    return next((policy for policy in policies if policy.active), None)


def _token_rates(now: Sample, before: Sample | None) -> list[float]:
    """Return the tokens per second of each instance since `before`; 0 for one that is new or restarted."""
    if before is None or now.at_s <= before.at_s:
        return [0.0] * len(now.instances)
    past = {(i.instance_id, i.incarnation): i.generated_tokens for i in before.instances}
    seconds = now.at_s - before.at_s
    return [
        max(0, i.generated_tokens - past.get((i.instance_id, i.incarnation), i.generated_tokens)) / seconds
        for i in now.instances
    ]


def _instance_columns(now: Sample, rates: Sequence[float]) -> dict[str, JsonValue]:
    rows = now.instances
    stages = {name: number for number, stage in enumerate(now.stages) for name in stage.instance_ids}
    return {
        "id": [row.instance_id for row in rows],
        "state": [enum_word(InstanceState.DESCRIPTOR, row.state) for row in rows],
        "pool": [enum_word(Pool.DESCRIPTOR, row.pool) for row in rows],
        "stage": [stages.get(row.instance_id, -1) for row in rows],
        "model": [row.model for row in rows],
        "engine": [row.engine for row in rows],
        "running": [row.running for row in rows],
        "waiting": [row.waiting for row in rows],
        "kv": [row.kv_blocks_used for row in rows],
        "kv_total": [row.kv_blocks_total for row in rows],
        "interval_ms": [round(row.token_interval_ms, 1) for row in rows],
        "silent_s": [round(row.report_age_s, 1) for row in rows],
        "tokens_per_s": [round(rate, 1) for rate in rates],
        "attainment": [round(row.recent.slo_attainment, 3) if row.recent.answers else None for row in rows],
        "moves_in": [row.recent.moves_in for row in rows],
        "moves_out": [row.recent.moves_out for row in rows],
    }


def _request_columns(rows: Sequence[RequestInfo], numbers: Mapping[str, int]) -> dict[str, JsonValue]:
    """Return the requests as columns; an instance is its number among the instances, -1: not listed."""
    return {
        "id": [row.request_id for row in rows],
        "instance": [numbers.get(row.instance_id, -1) for row in rows],
        "phase": [row.phase for row in rows],
        "state": [row.state for row in rows],
        "epoch": [row.epoch for row in rows],
        "prompt": [row.prompt_tokens for row in rows],
        "output": [row.output_tokens for row in rows],
        "kv": [row.kv_blocks for row in rows],
        "age": [round(row.age_s, 1) for row in rows],
        "moving": [int(row.migrating) for row in rows],
    }


def alerts(now: Sample) -> list[JsonValue]:
    """Return what an operator should look at, the worst first. `level`: error, warning or note."""
    found = [("error", "admin API", f"{call}: {reason}") for call, reason in now.problems.items()]
    if "ListInstances" not in now.problems:
        found += _instance_alerts(now.instances)
    active = active_policy(now.policies)
    if active is not None and active.suspended:
        found.append(("error", active.name, f"suspended, least_loaded decides: {active.suspended}"))
    found += [
        ("error", kind, "no service of this kind leads")
        for kind in _LED
        if now.services and not any(service.kind == kind and service.leader for service in now.services)
    ]
    recent = now.recent
    if recent.answers >= _ANSWERS_MIN and recent.slo_attainment < _ATTAINMENT:
        missed = round(recent.answers * (1 - recent.slo_attainment))
        share = f"{100 * recent.slo_attainment:.1f}%"
        found.append(
            ("warning", "SLO", f"{share} attainment: {missed} of {recent.answers} answers missed it")
        )
    failed = [m for m in now.migrations if m.state in (MIGRATION_STATE_ABORTED, MIGRATION_STATE_UNKNOWN)]
    if failed:
        last = max(failed, key=lambda record: record.closed_s)
        text = f"{len(failed)} of the last {len(now.migrations)} did not commit; the latest: {last.error}"
        found.append(("warning", "migrations", text))
    order = ("error", "warning", "note")
    found.sort(key=lambda alert: order.index(alert[0]))
    return [{"level": level, "what": what, "text": text} for level, what, text in found]


def _instance_alerts(instances: Sequence[InstanceInfo]) -> list[tuple[str, str, str]]:
    found = []
    if not any(instance.state == INSTANCE_STATE_ACTIVE for instance in instances):
        found.append(("error", "fleet", "no active instance: new requests wait or are refused"))
    for row in instances:
        if row.state == INSTANCE_STATE_SUSPECT or row.report_age_s > _SILENT_S:
            found.append(
                ("error", row.instance_id, f"silent: its last report is {row.report_age_s:.1f} s old")
            )
        elif row.state == INSTANCE_STATE_DRAINING:
            found.append(("note", row.instance_id, f"draining: {row.running + row.waiting} requests left"))
        if row.kv_blocks_used > _KV_FULL * row.kv_blocks_total > 0:
            share = f"{100 * row.kv_blocks_used / row.kv_blocks_total:.0f}%"
            found.append(("warning", row.instance_id, f"KV cache {share} full: it preempts requests"))
    return found
