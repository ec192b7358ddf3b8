"""`python -m benchmarks.control.reporters`: synthetic workers that report to a real monitor.

One process plays all instances, each with a report stream of its own. Placements arrive on standard input, a
line `INSTANCE REQUEST` each; every second a line with the lateness of the steady reports, in seconds, goes to
standard output. It ends when standard input does.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import time
from typing import Final

import grpc
import uvloop

from benchmarks.control.population import Population

_METHOD: Final = "/tailrace.v1.Monitor/Report"
# Connections that the streams share; a real fleet has one for each worker.
_CHANNELS: Final = 16
_NICENESS: Final = 5
# Phase changes within this time are sent together, as by workers.
_GATHER_S: Final = 0.005


class Reporter:
    """One instance's report stream."""

    def __init__(self, population: Population, interval_s: float, lateness: list[float]) -> None:
        """`lateness`: receives by how many seconds each steady report was late."""
        self.population = population
        self.wakeup = asyncio.Event()
        self._interval_s = interval_s
        self._lateness = lateness

    async def run(self, channel: grpc.aio.Channel, first_s: float) -> None:
        """Report until cancelled; the first steady report is due at `first_s`."""
        call: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream(_METHOD)()
        acknowledgements = asyncio.create_task(_read(call))
        try:
            due_s = first_s
            while not acknowledgements.done():
                await self._wait(min(due_s, self.population.next_due_s + _GATHER_S))
                now_s = time.monotonic()
                events = self.population.take_events(now_s)
                if now_s >= due_s:
                    self._lateness.append(now_s - due_s)
                    due_s = max(due_s + self._interval_s, now_s)
                    await call.write(self.population.steady(events, now_s, time.time()))
                elif events:
                    await call.write(self.population.changes(events, time.time()))
            await acknowledgements
        finally:
            acknowledgements.cancel()
            call.cancel()

    async def _wait(self, until_s: float) -> None:
        """Wait until the time or until a placement arrives."""
        self.wakeup.clear()
        left_s = max(0.0, until_s - time.monotonic())
        timer = asyncio.get_running_loop().call_later(left_s, self.wakeup.set)
        try:
            await self.wakeup.wait()
        finally:
            timer.cancel()


async def _read(call: grpc.aio.StreamStreamCall[bytes, bytes]) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass
    raise RuntimeError("the monitor has closed the stream of reports")


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
    generator = random.Random(1)
    channels = [
        grpc.aio.insecure_channel(options.monitor, options=[("grpc.use_local_subchannel_pool", 1)])
        for _ in range(_CHANNELS)
    ]
    start_s = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(
                reporter.run(channels[number % _CHANNELS], start_s + generator.random() * options.interval)
            )
            for number, reporter in enumerate(reporters.values())
        ]
        running.append(tasks.create_task(_print_lateness(lateness)))
        await _read_placements(reporters)
        for task in running:
            task.cancel()
    for channel in channels:
        await channel.close()


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


async def _print_lateness(lateness: list[float]) -> None:
    while True:
        await asyncio.sleep(1)
        late, lateness[:] = sorted(lateness), []
        worst = late[int(0.99 * (len(late) - 1))] if late else 0.0
        print(f"{len(late)} {worst:.4f}", flush=True)


def main() -> None:
    """Run the reporters."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--monitor", required=True, metavar="HOST:PORT")
    parser.add_argument("--prefix", required=True, help="instance ids are PREFIX0, PREFIX1, ...")
    parser.add_argument("--incarnation", required=True)
    parser.add_argument("--instances", type=int, required=True)
    parser.add_argument("--requests", type=int, required=True, help="on each instance at the start")
    parser.add_argument("--mean-tokens", type=int, required=True, help="of an output")
    parser.add_argument("--interval", type=float, required=True, help="seconds between steady reports")
    # In a real fleet they are other machines: what they take must not come before the control plane's own.
    os.nice(_NICENESS)
    uvloop.run(report_all(parser.parse_args()))


if __name__ == "__main__":
    main()
