"""Reports and the state derived from them: pure parts, and over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import grpc
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from monitor_svc.gauges import MonitorGauges
from monitor_svc.reports import LatestReports, MissedObjectives, ReceivedReport, missed_objectives
from monitor_svc.servicer import Feed, MonitorServicer
from monitor_svc.traces import TraceStore
from tailrace.request_columns import columns_from
from tailrace.slo import Slo
from tailrace.v1 import monitor_pb2, types_pb2
from tests.counting import skipped
from tests.monitor.conftest import Monitor
from tests.streamed import read_message
from tests.waiting import WAIT_S


def apply(reports: LatestReports, report: monitor_pb2.WorkerReport, now_s: float) -> None:
    """Apply a report as received."""
    reports.apply(ReceivedReport.of(report), now_s)


def decoded(delta: monitor_pb2.EncodedDelta) -> monitor_pb2.StateDelta:
    """Return a delta as a subscriber reads it."""
    return monitor_pb2.StateDelta.FromString(delta.SerializeToString())


def steady(name: str, seq: int = 0, requests: int = 0, incarnation: str = "1") -> monitor_pb2.WorkerReport:
    """Return a periodic report."""
    return monitor_pb2.WorkerReport(
        instance_id=name,
        incarnation=incarnation,
        seq=seq,
        time_s=100.0,
        load=monitor_pb2.InstanceLoad(
            running=requests, reasoning=requests, kv_blocks_total=100, generated_tokens=seq
        ),
        requests=columns_from(
            monitor_pb2.RequestReport(
                request_id=f"r{n}", phase=types_pb2.PHASE_REASONING, output_tokens=5, token_interval_ms=20
            )
            for n in range(requests)
        ),
    )


def phase_event(name: str, request_id: str, phase: types_pb2.Phase.ValueType) -> monitor_pb2.WorkerReport:
    """Return a report with one phase event only."""
    event = monitor_pb2.PhaseEvent(request_id=request_id, phase=phase)
    return monitor_pb2.WorkerReport(instance_id=name, incarnation="1", phase_events=[event])


def test_events_are_kept_until_the_next_periodic_report() -> None:
    reports = LatestReports(2.0)
    apply(reports, steady("a", requests=1), 0.0)
    apply(reports, phase_event("a", "r0", types_pb2.PHASE_ANSWERING), 0.1)
    apply(reports, phase_event("a", "r0", types_pb2.PHASE_UNSPECIFIED), 0.2)
    (report,) = decoded(reports.snapshot()).reports
    assert [e.phase for e in report.phase_events] == [types_pb2.PHASE_UNSPECIFIED]
    assert report.load.running == 1
    apply(reports, steady("a"), 0.5)
    (report,) = decoded(reports.snapshot()).reports
    assert not report.phase_events


def test_an_instance_without_reports_is_silent() -> None:
    reports = LatestReports(2.0)
    apply(reports, steady("a"), 0.0)
    apply(reports, steady("b"), 0.0)
    assert not reports.update_silent(2.0)
    apply(reports, steady("b"), 1.0)
    assert reports.update_silent(2.5)
    assert reports.silent == {"a"}
    assert not reports.update_silent(2.6)
    apply(reports, phase_event("a", "r", types_pb2.PHASE_REASONING), 2.7)
    assert reports.update_silent(2.8)
    assert not reports.silent


def test_a_suspended_monitor_extends_the_deadlines() -> None:
    reports = LatestReports(2.0)
    apply(reports, steady("a"), 0.0)
    reports.extend_deadlines(10.0)
    assert not reports.update_silent(10.5)


def test_forgotten_instances_are_removed() -> None:
    reports = LatestReports(2.0)
    apply(reports, steady("a"), 0.0)
    reports.update_silent(3.0)
    reports.forget(["a", "unknown"])
    assert not reports.instances
    assert not reports.silent


def test_a_new_incarnation_starts_empty() -> None:
    reports = LatestReports(2.0)
    apply(reports, steady("a", requests=3), 0.0)
    apply(
        reports,
        monitor_pb2.WorkerReport(
            instance_id="a",
            incarnation="2",
            phase_events=[monitor_pb2.PhaseEvent(request_id="x", phase=types_pb2.PHASE_PREFILL)],
        ),
        0.1,
    )
    (report,) = decoded(reports.snapshot()).reports
    assert report.incarnation == "2"
    assert not report.requests.request_ids


@pytest.mark.parametrize(
    ("phase", "arrival_s", "output", "reasoning", "interval_ms", "qoe", "missed"),
    [
        (types_pb2.PHASE_PREFILL, 99.5, 0, 0, 0, None, []),
        (types_pb2.PHASE_PREFILL, 98.0, 0, 0, 0, None, ["ttft"]),
        # Due one second plus 20 token intervals after arrival.
        (types_pb2.PHASE_REASONING, 97.1, 20, 20, 99, None, []),
        (types_pb2.PHASE_REASONING, 96.9, 20, 20, 99, None, ["ttft"]),
        # It is in the answering phase, without a token yet.
        (types_pb2.PHASE_ANSWERING, 96.9, 20, 20, 99, None, ["ttft"]),
        (types_pb2.PHASE_ANSWERING, 0.0, 21, 20, 101, 0.96, ["tpot"]),
        (types_pb2.PHASE_ANSWERING, 0.0, 1, 0, 0, 0.94, ["qoe"]),
    ],
)
def test_missed_objectives(
    phase: types_pb2.Phase.ValueType,
    arrival_s: float,
    output: int,
    reasoning: int,
    interval_ms: float,
    qoe: float | None,
    missed: list[str],
) -> None:
    request = monitor_pb2.RequestReport(
        phase=phase,
        arrival_s=arrival_s,
        token_interval_ms=interval_ms,
        output_tokens=output,
        reasoning_tokens=reasoning,
        qoe=qoe,
    )
    columns = columns_from([request, request])
    expected = MissedObjectives(**dict.fromkeys(missed, 2))
    assert missed_objectives(columns, 100.0, Slo(1.0, 0.1, 0.95)) == expected
    assert missed_objectives(columns, 100.0, Slo(None, None)) == MissedObjectives()


async def test_a_subscriber_overwhelmed_by_events_gets_a_snapshot() -> None:
    reports = LatestReports(2.0)
    feed = Feed(reports, events_max=3)
    with feed.subscribe() as subscription:
        assert (await subscription.next()).snapshot
        for number in range(3):
            feed.publish(ReceivedReport.of(phase_event("a", f"r{number}", types_pb2.PHASE_REASONING)))
        delta = decoded(await subscription.next())
        assert not delta.snapshot
        assert [r.phase_events[0].request_id for r in delta.reports] == ["r0", "r1", "r2"]
        for number in range(4):
            report = ReceivedReport.of(phase_event("a", f"r{number}", types_pb2.PHASE_ANSWERING))
            reports.apply(report, 0.0)
            feed.publish(report)
        delta = decoded(await subscription.next())
        assert delta.snapshot
        assert [len(r.phase_events) for r in delta.reports] == [4]
    assert feed.resnapshots == 1
    assert feed.subscribers == 0


async def test_a_lagging_subscriber_gets_the_latest_state_and_all_news() -> None:
    feed = Feed(LatestReports(2.0))
    with feed.subscribe() as subscription:
        await subscription.next()
        ended = monitor_pb2.PhaseEvent(request_id="r0", output_tokens=9)
        first, second, third = steady("a", 1, requests=2), steady("a", 3, requests=1), steady("a", 4)
        first.phase_events.append(ended)
        second.cache.seq = 7
        event = phase_event("a", "r1", types_pb2.PHASE_ANSWERING)
        for report in (steady("b", 1), first, event, second, third, steady("b", 2)):
            feed.publish(ReceivedReport.of(report))
        delta = decoded(await subscription.next())
    # Of each instance in order; the one that waits longest first.
    assert [(r.instance_id, r.seq, r.HasField("load")) for r in delta.reports] == [
        ("b", 2, True),
        ("a", 1, False),
        ("a", 0, False),
        ("a", 3, False),
        ("a", 4, True),
    ]
    _, without_state, _, cached, _ = delta.reports
    assert list(without_state.phase_events) == [ended] and not without_state.HasField("requests")
    assert cached.cache.seq == 7


async def test_report_and_watch(monitor: Monitor) -> None:
    async def stream() -> AsyncIterator[monitor_pb2.WorkerReport]:
        yield steady("a", 1, requests=2)
        yield phase_event("a", "r0", types_pb2.PHASE_ANSWERING)

    acks = [ack.seq async for ack in monitor.stub.Report(stream())]
    assert acks[-1] == 0
    watch = monitor.stub.Watch(monitor_pb2.WatchRequest(subscriber="test"))
    first = await read_message(watch, monitor_pb2.StateDelta)
    assert first.snapshot
    assert first.reports[0].requests.request_ids == ["r0", "r1"]
    assert [e.phase for e in first.reports[0].phase_events] == [types_pb2.PHASE_ANSWERING]
    async for _ in monitor.stub.Report(iter([steady("b", 7)])):
        pass
    delta = await read_message(watch, monitor_pb2.StateDelta)
    assert not delta.snapshot
    assert [(r.instance_id, r.seq) for r in delta.reports] == [("b", 7)]
    watch.cancel()


async def test_a_subscriber_that_does_not_read_gets_the_latest_state(monitor: Monitor) -> None:
    """It reads nothing while reports exceed all transport buffers."""
    watch = monitor.stub.Watch(monitor_pb2.WatchRequest(subscriber="slow"))
    assert (await read_message(watch, monitor_pb2.StateDelta)).snapshot

    def stream() -> Iterator[monitor_pb2.WorkerReport]:
        for seq in range(1, 601):
            yield steady("a", seq, requests=500)

    async for _ in monitor.stub.Report(stream()):
        pass
    received: list[int] = []
    async with asyncio.timeout(WAIT_S):
        while 600 not in received:
            delta = await read_message(watch, monitor_pb2.StateDelta)
            received += [r.seq for r in delta.reports]
    assert len(received) < 600
    assert received == sorted(received)
    watch.cancel()


async def test_an_acknowledgement_stands_for_all_reports_before(monitor: Monitor) -> None:
    reports = asyncio.Queue[monitor_pb2.WorkerReport]()
    call = monitor.stub.Report(queued(reports))
    for seq in range(1, 4):
        reports.put_nowait(steady("a", seq))
    acknowledged = 0
    async with asyncio.timeout(WAIT_S):
        while acknowledged < 3:
            ack = await read_message(call, monitor_pb2.ReportAck)
            assert ack.seq > acknowledged
            acknowledged = ack.seq
    call.cancel()


async def queued(reports: asyncio.Queue[monitor_pb2.WorkerReport]) -> AsyncIterator[monitor_pb2.WorkerReport]:
    """Yield reports without an end."""
    while True:
        yield await reports.get()


async def test_a_report_that_cannot_be_decoded_is_refused(monitor: Monitor) -> None:
    before = skipped("report of a worker")
    async with grpc.aio.insecure_channel(monitor.address) as channel:
        report: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(
            "/tailrace.v1.Monitor/Report"
        )
        call = report(iter([b"\x0a\x05x"]))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "cannot be decoded" in (caught.value.details() or "")
    assert skipped("report of a worker") == before + 1
    assert not monitor.reports.instances


async def test_a_report_without_a_name_is_refused(monitor: Monitor) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in monitor.stub.Report(iter([monitor_pb2.WorkerReport()])):
            pass
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_report_that_cannot_be_processed_is_refused_alone(
    monitor: Monitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("nobody foresaw this")

    before = skipped("report of a worker")
    with monkeypatch.context() as patch:
        patch.setattr(monitor.reports, "apply", fail)
        with pytest.raises(grpc.aio.AioRpcError, match="cannot be processed"):
            async for _ in monitor.stub.Report(iter([steady("a")])):
                pass
    assert skipped("report of a worker") == before + 1
    async for _ in monitor.stub.Report(iter([steady("a")])):
        pass
    assert "a" in monitor.reports.instances


def test_gauges_of_instances_and_slos() -> None:
    reports, traces = LatestReports(2.0), TraceStore()
    feed = Feed(reports)
    apply(reports, steady("a", 3, requests=2), 0.0)
    registry = CollectorRegistry()
    servicer = MonitorServicer(reports, feed, traces)
    registry.register(MonitorGauges(reports, feed, servicer, traces, lambda: slo))
    slo = Slo(1.0, 0.15)
    text = generate_latest(registry).decode()
    assert 'tailrace_monitor_slo_trouble_requests{instance="a",slo="tpot"} 0.0' in text
    # SLOs can change at run time.
    slo = Slo(1.0, 0.01)
    text = generate_latest(registry).decode()
    assert 'tailrace_monitor_instance_requests{instance="a",phase="reasoning"} 2.0' in text
    assert 'tailrace_monitor_instance_generated_tokens_total{instance="a"} 3.0' in text
    assert 'tailrace_monitor_slo_trouble_requests{instance="a",slo="tpot"} 2.0' in text


def test_phases_of_a_later_version_have_no_series() -> None:
    """There would be one for each number that a worker makes up."""
    reports, traces = LatestReports(2.0), TraceStore()
    feed = Feed(reports)
    servicer = MonitorServicer(reports, feed, traces)
    registry = CollectorRegistry()
    registry.register(MonitorGauges(reports, feed, servicer, traces, Slo))
    for phase in (types_pb2.PHASE_ANSWERING, types_pb2.PHASE_UNSPECIFIED, *range(1_000, 1_100)):
        servicer._apply(ReceivedReport.of(phase_event("a", "r", types_pb2.Phase.ValueType(phase))))
    assert servicer.phase_events.keys() == set(types_pb2.Phase.values())
    for name, count in [("prefill", 0), ("reasoning", 0), ("answering", 1), ("gone", 1)]:
        assert registry.get_sample_value("tailrace_monitor_phase_events_total", {"phase": name}) == count
