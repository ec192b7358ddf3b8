"""Reports to a monitor over real gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import pytest

from tailrace.cluster import Phase
from tailrace.profiles import load_profile
from tailrace.request_columns import optional_of, traceparents_of
from tailrace.service.channels import Channels
from tailrace.telemetry.incidents import LOOP_FAILURES
from tailrace.v1 import admin_pb2, monitor_pb2, monitor_pb2_grpc, types_pb2
from tests.waiting import WAIT_S
from worker_agent import reports
from worker_agent.engine.base import EngineStats, RequestKey, RequestStats
from worker_agent.load import Heartbeats, MigrationLoad, request_report
from worker_agent.progress import StepBounds, StepProgress
from worker_agent.reports import PhaseEvents, ReportStream
from worker_agent.running_requests import RunningRequest, RunningRequests
from worker_agent.speeds import Speeds

# When r2's answer began, in seconds of the monotonic clock.
ANSWERS_SINCE_S = time.monotonic()
TRACEPARENT = f"00-{1:032x}-{2:016x}-01"


class ScriptedMonitor(monitor_pb2_grpc.MonitorServicer):
    """Monitor that queues the reports."""

    def __init__(self) -> None:
        self.reports: asyncio.Queue[monitor_pb2.WorkerReport] = asyncio.Queue()
        # How many reports are refused first, as reports that cannot be read are.
        self.unreadable = 0
        # While it is not set, reports are neither read nor acknowledged.
        self.hears = asyncio.Event()
        self.hears.set()

    async def Report(
        self,
        requests: AsyncIterator[monitor_pb2.WorkerReport],
        context: grpc.aio.ServicerContext[monitor_pb2.WorkerReport, monitor_pb2.ReportAck],
    ) -> AsyncIterator[monitor_pb2.ReportAck]:
        async for report in requests:
            await self.hears.wait()
            if report.seq <= self.unreadable:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the request cannot be decoded")
            self.reports.put_nowait(report)
            yield monitor_pb2.ReportAck(seq=report.seq)

    def Watch(
        self,
        request: monitor_pb2.WatchRequest,
        context: grpc.aio.ServicerContext[monitor_pb2.WatchRequest, monitor_pb2.StateDelta],
    ) -> AsyncIterator[monitor_pb2.StateDelta]:
        raise NotImplementedError("workers only report")

    async def GetTrace(
        self,
        request: admin_pb2.GetTraceRequest,
        context: grpc.aio.ServicerContext[admin_pb2.GetTraceRequest, admin_pb2.GetTraceReply],
    ) -> admin_pb2.GetTraceReply:
        raise NotImplementedError("workers only report")

    async def next(self) -> monitor_pb2.WorkerReport:
        async with asyncio.timeout(WAIT_S):
            return await self.reports.get()

    async def next_periodic(self) -> monitor_pb2.WorkerReport:
        while not (report := await self.next()).HasField("load"):
            pass
        return report


@asynccontextmanager
async def serving(monitor: ScriptedMonitor, port: int = 0) -> AsyncIterator[int]:
    server = grpc.aio.server()
    monitor_pb2_grpc.add_MonitorServicer_to_server(monitor, server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


def request(
    number: int, phase: Phase, state: str = "running", predicted: float | None = None
) -> RequestStats:
    return RequestStats(
        f"r{number}",
        "fe",
        2,
        phase,
        state,
        100,
        20,
        5,
        400,
        8,
        1.0,
        12.5,
        predicted_remaining_tokens=predicted,
    )


def running() -> RunningRequests:
    """Return requests: r2's answer began at its sixth token; r1 is traced."""
    requests = RunningRequests()
    requests.add(RequestKey(0, 1), "r1", "fe", 2, TRACEPARENT)
    answering = requests.add(RequestKey(0, 2), "r2", "fe", 2)
    answering.pace.begin(5, ANSWERS_SINCE_S)
    return requests


STATS = EngineStats(
    requests=[
        request(1, Phase.REASONING, predicted=250.0),
        request(2, Phase.ANSWERING, "paused"),
        request(3, Phase.PREFILL, "preempted"),
    ],
    kv_blocks_used=24,
    kv_blocks_total=100,
    host_kv_bytes_used=0,
    host_kv_bytes_total=0,
    prefill_backlog_tokens=80,
    steps=7,
    generated_tokens=60,
    preemptions=1,
    token_interval_ms_mean=11.0,
    token_interval_ms_p99=19.0,
)


@asynccontextmanager
async def reporting(
    address: str | Sequence[str], news: PhaseEvents, interval_s: float, stats: EngineStats = STATS
) -> AsyncIterator[None]:
    channels = Channels()
    stream = ReportStream(
        "w",
        "i",
        16,
        lambda: stats,
        lambda request_ids: [each for each in stats.requests if each.request_id in request_ids],
        lambda: MigrationLoad(1, 2, 3e6),
        running(),
        news,
        lambda: Speeds.of(load_profile("llama-3.1-8b-h100"), 0.1),
        lambda: [address] if isinstance(address, str) else address,
        channels,
        interval_s,
    )
    task = asyncio.create_task(stream.run())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await channels.close()


async def test_periodic_reports_are_complete() -> None:
    monitor = ScriptedMonitor()
    async with serving(monitor) as port, reporting(f"127.0.0.1:{port}", PhaseEvents(), 0.05):
        first, second = await monitor.next_periodic(), await monitor.next_periodic()
    assert second.seq > first.seq
    load = second.load
    assert (load.running, load.waiting, load.paused) == (1, 1, 1)
    assert (load.prefilling, load.reasoning, load.answering) == (1, 1, 1)
    assert (load.migrations_in, load.migrations_out, load.migration_bytes_per_s) == (1, 2, 3e6)
    assert load.context_tokens == 360 and load.kv_blocks_used == 24
    columns = second.requests
    assert columns.request_ids == ["r1", "r2", "r3"]
    assert columns.states[1] == types_pb2.REQUEST_STATE_PAUSED


async def test_figures_that_cannot_be_reported_hide_no_others() -> None:
    """A report only observes: a wrong figure of an engine is counted, and the worker goes on."""
    first, second, third = STATS.requests
    requests = [first, replace(second, kv_blocks=-5), third]
    broken = replace(STATS, requests=requests, prefill_backlog_tokens=-1, steps=1 << 80)
    news = PhaseEvents()
    news.gone(running().add(RequestKey(0, 9), "r9", "fe", 2), -7)
    before = LOOP_FAILURES.labels("reports")._value.get()
    monitor = ScriptedMonitor()
    async with serving(monitor) as port, reporting(f"127.0.0.1:{port}", news, 0.05, broken):
        await monitor.next_periodic()
        report = await monitor.next_periodic()
    assert report.load.kv_blocks_used == 24 and report.load.prefill_backlog_tokens == 0
    assert report.load.running == 1 and report.load.prefill_base_s > 0
    assert report.requests.request_ids == ["r1", "r3"]
    assert LOOP_FAILURES.labels("reports")._value.get() - before >= 4


def test_heartbeats_describe_the_engine_and_go_out_without_that() -> None:
    progress = StepProgress(StepBounds(1.0, 1.0), 0.0)
    progress.stuck_for_s(STATS, 1.0)
    beat = Heartbeats(progress, lambda: STATS)()("fe")
    assert (beat.steps, beat.running) == (7, True)
    # The preempted request waits.
    assert (beat.engine.waiting, beat.engine.kv_usage) == (1, 0.24)
    assert Heartbeats(progress, lambda: STATS)()("another").engine.waiting == 0
    before = LOOP_FAILURES.labels("heartbeats")._value.get()
    beat = Heartbeats(progress, lambda: replace(STATS, kv_blocks_total="many"))()("fe")  # type: ignore[arg-type]
    assert (beat.steps, beat.running, beat.HasField("engine")) == (7, True, False)
    assert LOOP_FAILURES.labels("heartbeats")._value.get() == before + 1


async def test_periodic_reports_contain_the_values_policies_use(monkeypatch: pytest.MonkeyPatch) -> None:
    def later(
        request: RequestStats, running: RunningRequest | None, now_s: float
    ) -> monitor_pb2.RequestReport:
        assert now_s >= ANSWERS_SINCE_S
        return request_report(request, running, ANSWERS_SINCE_S + 2.0)

    monkeypatch.setattr(reports, "request_report", later)
    monitor = ScriptedMonitor()
    async with serving(monitor) as port, reporting(f"127.0.0.1:{port}", PhaseEvents(), 3600):
        report = await monitor.next_periodic()
    columns = report.requests
    assert traceparents_of(columns)["r1"] == TRACEPARENT
    # 15 answering tokens in 2 s, in which a user reads 21.
    assert columns.phase_tokens[:2] == [20, 15]
    slack, qoe = columns.pacer_slack_tokens, columns.qoe
    assert [optional_of(column, row) for column in (slack, qoe) for row in (0, 2)] == [None] * 4
    assert slack[1] == pytest.approx(-6.0) and 0.5 < qoe[1] < 0.95
    assert optional_of(columns.predicted_remaining_tokens, 2) is None
    load = report.load
    assert load.future_load[0] == load.context_tokens
    assert load.prefill_delay_s > 0 and load.max_running_tokens > 0


async def test_phase_changes_are_reported_at_once() -> None:
    monitor, news = ScriptedMonitor(), PhaseEvents()
    async with serving(monitor) as port, reporting(f"127.0.0.1:{port}", news, 3600):
        assert (await monitor.next()).HasField("load")
        news.changed("r1")
        news.changed("r2")
        news.gone(RunningRequests().add(RequestKey(0, 9), "r9", "fe", 4), 33)
        report = await monitor.next()
    assert not report.HasField("load")
    events = {event.request_id: event for event in report.phase_events}
    assert events["r1"].phase == types_pb2.PHASE_REASONING and events["r1"].epoch == 2
    assert events["r1"].predicted_remaining_tokens == 250.0
    assert not events["r2"].HasField("predicted_remaining_tokens")
    assert events["r9"].phase == types_pb2.PHASE_UNSPECIFIED and events["r9"].output_tokens == 33


async def test_returning_monitor_is_found_again() -> None:
    news = PhaseEvents()
    first, second = ScriptedMonitor(), ScriptedMonitor()
    async with contextlib.AsyncExitStack() as stack:
        async with serving(first) as port:
            await stack.enter_async_context(reporting(f"127.0.0.1:{port}", news, 0.05))
            await first.next_periodic()
        # The port refuses connections; later reports contain everything that is missed.
        news.changed("r2")
        async with serving(second, port):
            await second.next_periodic()


async def test_a_report_that_the_monitor_cannot_read_costs_no_later_one() -> None:
    monitor = ScriptedMonitor()
    monitor.unreadable = 2
    async with serving(monitor) as port, reporting(f"127.0.0.1:{port}", PhaseEvents(), 0.05):
        assert (await monitor.next_periodic()).seq > monitor.unreadable


async def test_standby_monitor_gets_reports_while_the_first_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leading, standby = ScriptedMonitor(), ScriptedMonitor()
    async with serving(leading) as first, serving(standby) as second:
        addresses = [f"127.0.0.1:{first}", f"127.0.0.1:{second}"]
        async with reporting(addresses, PhaseEvents(), 0.05):
            with monkeypatch.context() as patch:
                # However late it is on a busy machine, it is not given up.
                patch.setattr(reports, "_ACKNOWLEDGE_S", WAIT_S)
                before = await leading.next_periodic()
                assert standby.reports.empty(), "only one monitor gets reports at a time"
                leading.hears.clear()
            after = await standby.next_periodic()
            assert after.seq > before.seq, "sequence numbers continue, so that the newer report is known"
            leading.hears.set()
            # It is probed in the background and gets reports again once it answers.
            while (await leading.next_periodic()).seq < after.seq:
                pass


async def test_departed_monitor_is_replaced_at_once() -> None:
    standby = ScriptedMonitor()
    async with serving(standby) as port, reporting(["127.0.0.1:1", f"127.0.0.1:{port}"], PhaseEvents(), 3600):
        await standby.next_periodic()
