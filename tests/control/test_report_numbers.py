"""Wrong numbers of a report are cleared; what is right stays."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.control.report_numbers import (
    CACHED_MAX,
    ROWS_MAX,
    TooManyRows,
    check_size,
    clear_wrong_numbers,
)
from tailrace.v1 import cache_pb2, monitor_pb2

ANY = st.floats() | st.sampled_from([math.nan, math.inf, -math.inf, -1.0, 1e300, 0.0, 1.0])


def doubles(kind: type) -> list[str]:
    return [field.name for field in kind.DESCRIPTOR.fields if field.type == field.TYPE_DOUBLE]  # type: ignore[attr-defined]


@given(st.data())
def test_every_number_is_one_that_can_be_computed_with(data: st.DataObject) -> None:
    report = monitor_pb2.WorkerReport(time_s=data.draw(ANY))
    report.load.SetInParent()
    report.phase_events.add()
    for message in (report.load, report.requests, report.phase_events[0]):
        for name in doubles(type(message)):
            value = getattr(message, name)
            if isinstance(value, float):
                setattr(message, name, data.draw(ANY))
            else:
                value.extend(data.draw(st.lists(ANY, max_size=3)))
    clear_wrong_numbers(report)
    assert 0.0 <= report.time_s <= 1e15
    for message in (report.load, report.requests, report.phase_events[0]):
        for name in doubles(type(message)):
            value = getattr(message, name)
            for number in [value] if isinstance(value, float) else value:
                absent = name in ("qoe", "pacer_slack_tokens", "predicted_remaining_tokens")
                assert abs(number) <= 1e15 or (absent and math.isnan(number)), name
                if not name.startswith(("pacer_slack", "prefill_s_per", "prefill_base")):
                    assert not number < 0.0, name
    before = report.SerializeToString(deterministic=True)
    assert clear_wrong_numbers(report) == []
    assert report.SerializeToString(deterministic=True) == before


def test_fields_that_were_cleared_are_named() -> None:
    report = monitor_pb2.WorkerReport(load=monitor_pb2.InstanceLoad(prefill_delay_s=math.nan, steps=3))
    report.requests.request_ids.extend(["a", "b"])
    report.requests.arrival_s.extend([1.0, math.inf])
    report.requests.qoe.extend([math.nan, 0.5])
    assert clear_wrong_numbers(report) == ["prefill_delay_s", "arrival_s"]
    assert not report.load.HasField("prefill_delay_s") and report.load.steps == 3
    assert len(report.requests.qoe) == 2


REQUESTS = monitor_pb2.RequestColumns(request_ids=["a"] * (ROWS_MAX + 1))
EVENTS = [monitor_pb2.PhaseEvent()] * (ROWS_MAX + 1)
CACHED = cache_pb2.CacheUpdate(changes=[cache_pb2.CacheChange(stored=range(CACHED_MAX + 1))])


@pytest.mark.parametrize(
    ("report", "what"),
    [
        (monitor_pb2.WorkerReport(requests=REQUESTS), "requests"),
        (monitor_pb2.WorkerReport(phase_events=EVENTS), "phase events"),
        (monitor_pb2.WorkerReport(cache=CACHED), "cached blocks"),
    ],
)
def test_a_report_with_too_many_rows_is_not_read(report: monitor_pb2.WorkerReport, what: str) -> None:
    with pytest.raises(TooManyRows, match=what):
        check_size(report)
