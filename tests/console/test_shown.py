"""What the console shows of a fleet and of one request."""

from __future__ import annotations

from typing import Any

import pytest

from console_svc.life import life
from console_svc.snapshot import REQUESTS_MAX, Sample, alerts, snapshot
from tailrace.cli.plain import JsonValue
from tailrace.v1 import admin_pb2 as admin
from tailrace.v1 import types_pb2
from tailrace.v1.migration_pb2 import MigrationRecord
from tests.console.fleets import eventful_life

ACTIVE = types_pb2.INSTANCE_STATE_ACTIVE


def _instance(name: str = "worker-0", **fields: Any) -> admin.InstanceInfo:
    return admin.InstanceInfo(
        instance_id=name,
        state=fields.pop("state", ACTIVE),
        kv_blocks_total=100,
        **fields,
    )


def _levels(sample: Sample) -> list[tuple[JsonValue, JsonValue]]:
    return [(alert["level"], alert["what"]) for alert in alerts(sample) if isinstance(alert, dict)]


def test_nothing_to_look_at() -> None:
    leaders = [admin.ServiceInfo(kind=k, leader=True) for k in ("scheduler", "monitor", "migration")]
    recent = admin.RecentFigures(answers=100, slo_attainment=0.99)
    assert alerts(Sample(0.0, [_instance()], recent, services=leaders)) == []


@pytest.mark.parametrize(
    ("sample", "found"),
    [
        (Sample(0.0), ("error", "fleet")),
        (Sample(0.0, [_instance(state=types_pb2.INSTANCE_STATE_SUSPECT)]), ("error", "worker-0")),
        (Sample(0.0, [_instance(report_age_s=6.0)]), ("error", "worker-0")),
        (Sample(0.0, [_instance(kv_blocks_used=96)]), ("warning", "worker-0")),
        (Sample(0.0, [_instance(state=types_pb2.INSTANCE_STATE_DRAINING)]), ("note", "worker-0")),
        (
            Sample(0.0, [_instance()], admin.RecentFigures(answers=20, slo_attainment=0.94)),
            ("warning", "SLO"),
        ),
        (
            Sample(
                0.0, [_instance()], policies=[admin.PolicyInfo(name="ares", active=True, suspended="slow")]
            ),
            ("error", "ares"),
        ),
        (
            Sample(0.0, [_instance()], services=[admin.ServiceInfo(kind="scheduler", leader=True)]),
            ("error", "monitor"),
        ),
        (
            Sample(0.0, [_instance()], migrations=[MigrationRecord(state=types_pb2.MIGRATION_STATE_ABORTED)]),
            ("warning", "migrations"),
        ),
        (Sample(0.0, problems={"ListInstances": "no answer"}), ("error", "admin API")),
    ],
)
def test_alerts(sample: Sample, found: tuple[str, str]) -> None:
    assert found in _levels(sample)


def test_few_answers_are_no_alert() -> None:
    assert _levels(Sample(0.0, [_instance()], admin.RecentFigures(answers=19, slo_attainment=0.5))) == []


def test_token_rates_are_since_the_sample_before() -> None:
    before = Sample(10.0, [_instance(incarnation="1", generated_tokens=100), _instance("b", incarnation="1")])
    restarted = _instance("b", incarnation="2", generated_tokens=900)
    now = Sample(12.0, [_instance(incarnation="1", generated_tokens=300), restarted])
    shown: Any = snapshot(now, before, {})
    assert shown["instances"]["tokens_per_s"] == [100.0, 0.0]
    assert snapshot(now, None, {})["tokens_per_s"] == 0.0


def test_requests_of_a_snapshot_are_bounded() -> None:
    rows = [admin.RequestInfo(request_id=str(n), instance_id="gone") for n in range(REQUESTS_MAX + 1)]
    shown: Any = snapshot(Sample(0.0, requests=rows), None, {})
    columns = shown["requests"]
    assert {len(column) for column in columns.values()} == {REQUESTS_MAX}
    assert shown["requests_total"] == REQUESTS_MAX + 1
    assert columns["instance"][0] == -1


def test_a_life_with_two_moves_and_a_loss() -> None:
    traces, migrations = eventful_life("r-1", 1000.0)
    found: Any = life("r-1", None, migrations, traces)
    assert found["stays"] == [
        {"at": 1000.01, "instance": "worker-0", "how": "placed"},
        {"at": 1003.0, "instance": "worker-1", "how": "moved"},
        {"at": 1006.0, "instance": "", "how": "lost"},
        {"at": 1006.5, "instance": "worker-2", "how": "placed"},
        {"at": 1009.0, "instance": "worker-3", "how": "moved"},
    ]
    assert [phase["phase"] for phase in found["phases"]] == ["prefill", "reasoning", "reasoning", "answering"]
    tokens = found["tokens"]
    assert tokens == sorted(tokens) and [pair[1] for pair in tokens] == [0, 1, 200, 420, 540, 640, 900]
    assert found["ended"] == 1012.0


def test_moves_are_known_from_migrations_while_the_request_runs() -> None:
    _, migrations = eventful_life("r-1", 1000.0)
    found: Any = life("r-1", admin.RequestInfo(request_id="r-1"), migrations, b"")
    assert [stay["instance"] for stay in found["stays"]] == ["worker-1", "worker-3"]
    assert found["ended"] is None and found["tokens"] == []


def test_a_life_has_no_spans_of_another_request_of_its_trace() -> None:
    traces, migrations = eventful_life("r-2", 1000.0)
    assert life("r-1", None, (), traces)["spans"] == []
    assert migrations
