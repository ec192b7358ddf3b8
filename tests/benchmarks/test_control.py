"""The synthetic workers of the control plane's benchmark."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.control.population import TOKENS_PER_S, Population
from benchmarks.control.report_streams import ReportStreams
from tailrace.perf.horizon import FutureLoad
from tailrace.v1 import monitor_pb2, types_pb2
from tests.monitor.conftest import Monitor
from tests.monitor.conftest import monitor as monitor
from tests.monitor.test_reports import steady
from tests.streamed import read_message
from tests.waiting import WAIT_S

METHOD = "/tailrace.v1.Monitor/Report"


async def connect(monitor: Monitor) -> ReportStreams:
    """Return a connection to the monitor."""
    host, _, port = monitor.address.rpartition(":")
    loop = asyncio.get_running_loop()
    _, streams = await loop.create_connection(lambda: ReportStreams(monitor.address, METHOD), host, int(port))
    return streams


async def test_reports_of_any_size_arrive_in_order_on_many_streams(monitor: Monitor) -> None:
    watch = monitor.stub.Watch(monitor_pb2.WatchRequest(subscriber="test"))
    assert (await read_message(watch, monitor_pb2.StateDelta)).snapshot
    streams = await connect(monitor)
    names = ["a", "b", "c"]
    async with asyncio.timeout(WAIT_S):
        opened = {name: streams.open() for name in names}
        # The last are larger than HTTP/2's initial window.
        for seq, requests in enumerate((1, 20, 12_000), start=1):
            for name, stream in opened.items():
                await streams.send(stream, steady(name, seq, requests).SerializeToString())
        latest: dict[str, int] = {}
        while latest != dict.fromkeys(names, 3):
            for report in (await read_message(watch, monitor_pb2.StateDelta)).reports:
                assert report.seq > latest.get(report.instance_id, 0)
                latest[report.instance_id] = report.seq
    assert not streams.closed.done()
    watch.cancel()


async def test_a_refused_report_ends_the_connection(monitor: Monitor) -> None:
    streams = await connect(monitor)
    await streams.send(streams.open(), monitor_pb2.WorkerReport().SerializeToString())
    with pytest.raises(ConnectionError):
        async with asyncio.timeout(WAIT_S):
            await streams.closed


def report_of(population: Population, now_s: float) -> monitor_pb2.WorkerReport:
    """Return the next steady report with the events that are due."""
    events = population.take_events(now_s)
    return monitor_pb2.WorkerReport.FromString(population.steady(events, now_s, 0.0))


def test_a_placed_request_reasons_answers_and_ends() -> None:
    population = Population("a", "1", 0, 20, "seed", 0.0)
    population.place("r", 0.0)
    phases: list[int] = []
    for step in range(200):
        report = report_of(population, 0.05 * step)
        phases += [event.phase for event in report.phase_events]
        columns = report.requests
        assert len(columns.request_ids) == len(columns.output_tokens) == len(columns.epochs)
    assert phases == [types_pb2.PHASE_REASONING, types_pb2.PHASE_ANSWERING, types_pb2.PHASE_UNSPECIFIED]
    assert not report.requests.request_ids


def test_reports_have_the_future_load_of_a_worker() -> None:
    population = Population("a", "1", 20, 400, "seed", 0.0)
    report = report_of(population, 5.0)
    columns = report.requests
    rows = zip(columns.prompt_tokens, columns.output_tokens, columns.predicted_remaining_tokens, strict=True)
    expected = FutureLoad()([(prompt + output, remaining) for prompt, output, remaining in rows])
    assert tuple(report.load.future_load) == expected
    assert expected[0] == report.load.context_tokens


def test_a_migrated_request_continues_where_it_was() -> None:
    source, target = (Population(name, "1", 0, 400, name, 0.0) for name in ("a", "b"))
    source.place("r", 0.0)
    report_of(source, 1.0)
    moved = source.leave("r", 3.0)
    assert moved is not None and source.leave("r", 3.0) is None
    target.join(moved, 1, 3.0)
    (left,) = report_of(source, 3.0).phase_events
    assert (left.phase, left.output_tokens) == (types_pb2.PHASE_UNSPECIFIED, 0)
    report = report_of(target, 4.0)
    (joined,) = report.phase_events
    assert (joined.epoch, joined.phase) == (1, types_pb2.PHASE_REASONING)
    columns = report.requests
    assert list(columns.epochs) == [1]
    assert abs(columns.output_tokens[0] - 3.0 * TOKENS_PER_S) <= 2
    # It also comes back, and each phase ends once.
    again = target.leave("r", 5.0)
    assert again is not None
    source.join(again, 2, 5.0)
    phases = [
        event.phase for step in range(100, 1_000) for event in report_of(source, 0.05 * step).phase_events
    ]
    assert phases == [types_pb2.PHASE_REASONING, types_pb2.PHASE_ANSWERING, types_pb2.PHASE_UNSPECIFIED]
