"""Reports of several monitors are merged."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence

import grpc
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from scheduler_svc.metrics import SchedulerMetrics
from scheduler_svc.monitor_watch import MergedReports, MonitorWatch
from tailrace.control.events import ReportsStopped
from tailrace.records import ServiceRecord
from tailrace.service.channels import Channels
from tailrace.service.server import Servicer, serve_grpc
from tailrace.service.tasks import supervised
from tailrace.v1 import monitor_pb2
from tests.counting import failures_of, skipped
from tests.raw_replies import UNDECODABLE
from tests.static_members import StaticMembers
from tests.waiting import WAIT_S


class SilentInstances:
    """Takes who is silent."""

    def apply(self, event: ReportsStopped) -> None:
        """See ReportedCluster."""


def new_reports(
    merged: MergedReports, monitor: str, delta: monitor_pb2.StateDelta
) -> list[monitor_pb2.WorkerReport]:
    """Apply a monitor's delta; return those of its reports that are new."""
    new = [report for report in delta.reports if merged.is_new(monitor, report)]
    encoded = monitor_pb2.EncodedDelta.FromString(delta.SerializeToString())
    merged.end_delta(monitor, encoded, {report.instance_id for report in delta.reports})
    return new


def report(name: str, seq: int, incarnation: str = "1") -> monitor_pb2.WorkerReport:
    """Return a report with only its position in the sequence."""
    return monitor_pb2.WorkerReport(instance_id=name, incarnation=incarnation, seq=seq)


def delta(
    reports: Sequence[monitor_pb2.WorkerReport] = (), silent: Sequence[str] = (), snapshot: bool = False
) -> monitor_pb2.StateDelta:
    """Return a message of a monitor."""
    return monitor_pb2.StateDelta(reports=reports, silent_instance_ids=silent, snapshot=snapshot)


def test_a_worker_that_switched_monitors_is_not_silent() -> None:
    merged = MergedReports()
    assert not merged.connected
    assert len(new_reports(merged, "m1", delta([report("w", 1)], snapshot=True))) == 1
    new_reports(merged, "m2", delta(snapshot=True))
    new_reports(merged, "m2", delta([report("w", 2)]))
    new_reports(merged, "m1", delta(silent=["w"]))
    assert merged.silent == frozenset()
    new_reports(merged, "m2", delta(silent=["w"]))
    assert merged.silent == {"w"}, "now no monitor hears it"
    new_reports(merged, "m1", delta([report("w", 3)]))
    assert merged.silent == frozenset()


def test_a_monitor_that_never_heard_from_a_worker_does_not_vouch_for_it() -> None:
    merged = MergedReports()
    new_reports(merged, "m1", delta([report("w", 1)], snapshot=True))
    new_reports(merged, "m2", delta(snapshot=True))
    new_reports(merged, "m1", delta(silent=["w"]))
    assert merged.silent == {"w"}


def test_a_disconnected_monitor_does_not_count() -> None:
    merged = MergedReports()
    new_reports(merged, "m1", delta([report("w", 1)], ["w"], snapshot=True))
    new_reports(merged, "m2", delta([report("w", 2)], snapshot=True))
    assert merged.silent == frozenset()
    merged.disconnected("m2")
    assert merged.connected and merged.silent == {"w"}
    merged.disconnected("m1")
    assert not merged.connected


def test_an_old_snapshot_does_not_move_a_worker_back() -> None:
    merged = MergedReports()
    new_reports(merged, "m1", delta([report("w", 5)], snapshot=True))
    new_reports(merged, "m2", delta([report("w", 6)], snapshot=True))
    assert new_reports(merged, "m1", delta([report("w", 5)], snapshot=True)) == []
    again = new_reports(merged, "m2", delta([report("w", 6)], snapshot=True))
    assert len(again) == 1, "the snapshot of its own monitor may contain missed events"
    restarted = new_reports(merged, "m1", delta([report("w", 1, "2")]))
    assert len(restarted) == 1, "a restarted worker has a new sequence"


@given(st.lists(st.tuples(st.sampled_from(["m1", "m2", "m3"]), st.integers(1, 30)), max_size=60))
def test_reports_never_go_back_between_monitors(received: list[tuple[str, int]]) -> None:
    merged = MergedReports()
    taken: list[tuple[str, int]] = []
    for monitor, seq in received:
        taken += [(monitor, r.seq) for r in new_reports(merged, monitor, delta([report("w", seq)]))]
    for number, (monitor, seq) in enumerate(taken[1:], 1):
        before = taken[:number]
        assert monitor == before[-1][0] or seq > max(s for _, s in before)


def encoded_delta(*reports: bytes) -> bytes:
    """Return an encoded message with these encoded reports."""
    return monitor_pb2.EncodedDelta(reports=reports).SerializeToString()


async def test_a_report_that_cannot_be_read_or_applied_is_skipped_alone() -> None:
    """Over gRPC, from a monitor that passes on what it got; then it sends what is no delta."""
    # The deltas of each watch.
    watches: asyncio.Queue[asyncio.Queue[bytes]] = asyncio.Queue()

    async def watch(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> AsyncIterator[bytes]:
        deltas: asyncio.Queue[bytes] = asyncio.Queue()
        watches.put_nowait(deltas)
        while True:
            yield await deltas.get()

    def add(servicer: object, server: grpc.aio.Server) -> None:
        method: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_stream_rpc_method_handler(watch)
        handlers = grpc.method_handlers_generic_handler("tailrace.v1.Monitor", {"Watch": method})
        server.add_generic_rpc_handlers((handlers,))

    taken: asyncio.Queue[str] = asyncio.Queue()

    def take(applied: monitor_pb2.WorkerReport, now_s: float) -> None:
        if applied.instance_id == "poison":
            raise KeyError("nobody foresaw this")
        taken.put_nowait(applied.instance_id)

    channels = Channels()
    async with serve_grpc("127.0.0.1:0", [Servicer(add, None, "tailrace.v1.Monitor")]) as server:
        members = StaticMembers()
        members.services["monitor", "m"] = ServiceRecord(
            kind="monitor", service_id="m", incarnation="1", address=server.address
        )
        monitor = MonitorWatch(
            "s",
            members,  # type: ignore[arg-type]
            channels,
            SilentInstances(),  # type: ignore[arg-type]
            take,
            SchedulerMetrics(CollectorRegistry()),
        )
        before = skipped("report of a worker")
        async with supervised({"monitors of a test": monitor.run}), asyncio.timeout(WAIT_S):
            encoded = [report(name, 1).SerializeToString() for name in ("a", "poison", "b")]
            deltas = await watches.get()
            deltas.put_nowait(encoded_delta(encoded[0], b"\x0a\x05x", encoded[1], encoded[2]))
            assert [await taken.get(), await taken.get()] == ["a", "b"]
            # The stream itself goes on: another one would begin with a snapshot.
            deltas.put_nowait(encoded_delta(report("c", 1).SerializeToString()))
            assert await taken.get() == "c"
            assert watches.empty() and skipped("report of a worker") == before + 2
            wrong = report("e", 1)
            wrong.load.prefill_delay_s = math.nan
            deltas.put_nowait(encoded_delta(wrong.SerializeToString()))
            assert await taken.get() == "e"
            assert skipped("report of a worker") == before + 3
            undecodable, failed = skipped("reply of a service"), failures_of("monitor watches")
            deltas.put_nowait(UNDECODABLE)
            # The new watch begins with a snapshot, so nothing is lost.
            deltas = await watches.get()
            deltas.put_nowait(encoded_delta(report("d", 1).SerializeToString()))
            assert await taken.get() == "d"
            assert skipped("reply of a service") == undecodable + 1
            assert failures_of("monitor watches") == failed
    await channels.close()
