"""Synthetic workers that report to a real monitor.

One process plays all instances. Each has a report stream of its own; as targets of migrations all have one
address, and a request that migrates continues on its target after a moment. Placements arrive on standard
input, a line `INSTANCE REQUEST` each. Every second a line goes to standard output: the number of steady
reports, by how many seconds they were late (P99), and the number of requests that have migrated. It ends when
standard input does.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Mapping
from typing import Final

import grpc
import uvloop

from benchmarks.control.population import Population
from benchmarks.control.report_streams import ReportStreams
from tailrace.security.handlers import Handler
from tailrace.v1 import types_pb2, worker_pb2

_METHOD: Final = "/tailrace.v1.Monitor/Report"
# Connections that the streams share; a real fleet has one for each worker.
_CONNECTIONS: Final = 16
# Phase changes within this time are sent together, as by workers.
_GATHER_S: Final = 0.005
# Seconds that a migration takes.
_COPY_S: Final = 0.1


class Reporter:
    """One instance's report stream."""

    def __init__(self, population: Population, interval_s: float, lateness: list[float]) -> None:
        """`lateness`: receives by how many seconds each steady report was late."""
        self.population = population
        self.wakeup = asyncio.Event()
        self._interval_s = interval_s
        self._lateness = lateness

    async def run(self, streams: ReportStreams, first_s: float) -> None:
        """Report until cancelled; the first steady report is due at `first_s`. Raise ConnectionError."""
        stream = streams.open()
        due_s = first_s
        while True:
            await self._wait(min(due_s, self.population.next_due_s + _GATHER_S))
            now_s = time.monotonic()
            events = self.population.take_events(now_s)
            if now_s >= due_s:
                self._lateness.append(now_s - due_s)
                due_s = max(due_s + self._interval_s, now_s)
                await streams.send(stream, self.population.steady(events, now_s, time.time()))
            elif events:
                await streams.send(stream, self.population.changes(events, time.time()))

    async def _wait(self, until_s: float) -> None:
        """Wait until the time or until a placement arrives."""
        self.wakeup.clear()
        left_s = max(0.0, until_s - time.monotonic())
        timer = asyncio.get_running_loop().call_later(left_s, self.wakeup.set)
        try:
            await self.wakeup.wait()
        finally:
            timer.cancel()


class Workers:
    """The part of the Worker service that the migration service and the scheduler call."""

    def __init__(self, reporters: Mapping[str, Reporter]) -> None:
        self.migrated = 0
        self._reporters = reporters

    async def import_request(
        self,
        request: worker_pb2.ImportRequest,
        context: grpc.aio.ServicerContext[worker_pb2.ImportRequest, worker_pb2.ImportEvent],
    ) -> AsyncIterator[worker_pb2.ImportEvent]:
        """Move a request from its instance to another one."""
        yield worker_pb2.ImportEvent(state=types_pb2.MIGRATION_STATE_OPEN, way=types_pb2.WAY_LIVE)
        await asyncio.sleep(_COPY_S)
        source, target = (
            self._reporters[name] for name in (request.source_instance_id, request.target_instance_id)
        )
        now_s = time.monotonic()
        moved = source.population.leave(request.request_id, now_s)
        if moved is None:
            yield worker_pb2.ImportEvent(state=types_pb2.MIGRATION_STATE_ABORTED, reason="it has finished")
            return
        target.population.join(moved, request.epoch, now_s)
        source.wakeup.set()
        target.wakeup.set()
        self.migrated += 1
        yield worker_pb2.ImportEvent(
            state=types_pb2.MIGRATION_STATE_COMMITTED, phase=moved.phase, tokens=moved.tokens
        )

    async def return_prompts(
        self,
        request: worker_pb2.HandBackPromptsRequest,
        context: grpc.aio.ServicerContext[worker_pb2.HandBackPromptsRequest, worker_pb2.HandBackPromptsReply],
    ) -> worker_pb2.HandBackPromptsReply:
        """Return no prompts: none waits."""
        return worker_pb2.HandBackPromptsReply()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the methods."""
        handlers: dict[str, Handler] = {
            "Import": grpc.unary_stream_rpc_method_handler(
                self.import_request,
                request_deserializer=worker_pb2.ImportRequest.FromString,
                response_serializer=worker_pb2.ImportEvent.SerializeToString,
            ),
            "HandBackPrompts": grpc.unary_unary_rpc_method_handler(
                self.return_prompts,
                request_deserializer=worker_pb2.HandBackPromptsRequest.FromString,
                response_serializer=worker_pb2.HandBackPromptsReply.SerializeToString,
            ),
        }
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("tailrace.v1.Worker", handlers),)
        )


async def report_all(options: argparse.Namespace) -> None:
    """Run all reporters until standard input ends."""
    lateness: list[float] = []
    now_s = time.monotonic()
    reporters = {
        name: Reporter(
            Population(name, options.incarnation, options.requests, options.mean_tokens, name, now_s),
            options.interval,
            lateness,
        )
        for name in (f"{options.prefix}{number}" for number in range(options.instances))
    }
    workers = Workers(reporters)
    server = grpc.aio.server()
    workers.add_to(server)
    server.add_insecure_port(options.listen)
    await server.start()
    generator = random.Random(1)
    host, _, port = options.monitor.rpartition(":")
    loop = asyncio.get_running_loop()
    connections = [
        (await loop.create_connection(lambda: ReportStreams(options.monitor, _METHOD), host, int(port)))[1]
        for _ in range(_CONNECTIONS)
    ]
    start_s = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        running: list[asyncio.Task[None]] = []
        for number, reporter in enumerate(reporters.values()):
            first_s = start_s + generator.random() * options.interval
            running.append(tasks.create_task(reporter.run(connections[number % _CONNECTIONS], first_s)))
        running.append(tasks.create_task(_print_figures(lateness, workers)))
        running += [tasks.create_task(_closed(connection)) for connection in connections]
        await _read_placements(reporters)
        for task in running:
            task.cancel()
    await server.stop(None)


async def _closed(streams: ReportStreams) -> None:
    await asyncio.shield(streams.closed)


async def _read_placements(reporters: dict[str, Reporter]) -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    while line := await reader.readline():
        instance_id, request_id = line.decode().split()
        reporter = reporters[instance_id]
        reporter.population.place(request_id, time.monotonic())
        reporter.wakeup.set()


async def _print_figures(lateness: list[float], workers: Workers) -> None:
    while True:
        await asyncio.sleep(1)
        late, lateness[:] = sorted(lateness), []
        worst = late[int(0.99 * (len(late) - 1))] if late else 0.0
        migrated, workers.migrated = workers.migrated, 0
        print(f"{len(late)} {worst:.4f} {migrated}", flush=True)


def main() -> None:
    """Run the reporters."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--monitor", required=True, metavar="HOST:PORT")
    parser.add_argument("--listen", required=True, metavar="HOST:PORT", help="address of all instances")
    parser.add_argument("--prefix", required=True, help="instance ids are PREFIX0, PREFIX1, ...")
    parser.add_argument("--incarnation", required=True)
    parser.add_argument("--instances", type=int, required=True)
    parser.add_argument("--requests", type=int, required=True, help="on each instance at the start")
    parser.add_argument("--mean-tokens", type=int, required=True, help="of an output")
    parser.add_argument("--interval", type=float, required=True, help="seconds between steady reports")
    # In a real fleet they are other machines: they get only the CPU time that the control plane leaves.
    # Whether that was enough to send the reports in time is measured.
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    uvloop.run(report_all(parser.parse_args()))


if __name__ == "__main__":
    main()
