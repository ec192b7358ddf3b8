"""`python -m tests.etcd_faults`: measure the effects of one faulty etcd member of three.

Three real members, each with its own network namespace and disk. One at a time is stopped, partitioned, or
has its disk filled, while candidates, watchers and a writer observe what services would see, and streams run
through real services with simulated engines. Needs root or user namespaces, iproute2 and util-linux.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
import os
import sys
import tempfile
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tailrace.service.tasks import cancel
from tests.etcd_faults.faults import DEFAULT, FAULTS
from tests.etcd_faults.fleet import Fleet, Streams, fleet
from tests.etcd_faults.observe import Observed, observe
from tests.harness.etcd_members import FaultyCluster
from tests.harness.namespaces import (
    UNSUPPORTED,
    NamespacesUnavailable,
    command_in_namespaces,
    is_inside,
    prepare,
    run,
)
from tests.harness.report import machine, save

QUIET = "none"


@dataclass(frozen=True, slots=True)
class Row:
    """Figures of one fault. `member`: the one that failed, etcd's leader or a follower."""

    fault: str
    member: str
    seen: Observed
    streams: Streams | None


@dataclass(frozen=True, slots=True)
class Options:
    """Command-line options; times in seconds."""

    faults: list[str]
    members: list[str]
    before_s: float
    lasts_s: float
    after_s: float
    with_streams: bool
    output: str


async def measure(options: Options, console: Console) -> list[Row]:
    """Inject every fault, one at a time, into one cluster."""
    rows: list[Row] = []
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tailrace-etcd-")))
        run("mount", "-t", "tmpfs", "tmpfs", str(folder))
        stack.callback(run, "umount", "--recursive", str(folder))
        etcd = FaultyCluster(folder, hanging="hung-disk" in options.faults)
        stack.callback(etcd.kill)
        await etcd.start()
        streams = None
        if options.with_streams:
            streams = await stack.enter_async_context(fleet(etcd.endpoints, folder))
        runs = list(itertools.product(options.faults, options.members))
        if streams is not None:
            # Without a fault, before and after: the machine's own effect on streams.
            runs = [(QUIET, ""), *runs, (QUIET, "")]
        rows += [await one(*turn, etcd, streams, options, console) for turn in runs]
    return rows


async def one(
    fault: str, role: str, etcd: FaultyCluster, streams: Fleet | None, options: Options, console: Console
) -> Row:
    """Measure one fault: before it, while it lasts, and after it is undone."""
    # New connections for each fault: clients do not return to a member that failed.
    async with observe(etcd.endpoints) as observer:
        leader = await etcd.leader()
        member = leader if role == "leader" else next(m for m in etcd.members if m is not leader)
        console.print(f"{fault}: {member.name}{f', {role}' if role else ''}", style="dim")
        seconds = options.before_s + options.lasts_s + options.after_s
        replay = None if streams is None else asyncio.create_task(streams.streams(seconds))
        try:
            await asyncio.sleep(options.before_s)
            seen = observer.start_recording()
            if fault != QUIET:
                FAULTS[fault].inject(etcd, member)
            try:
                await asyncio.sleep(options.lasts_s)
            finally:
                if fault != QUIET:
                    FAULTS[fault].undo(etcd, member)
            await etcd.wait_healthy()
            await asyncio.sleep(options.after_s)
            return Row(fault, role, seen, None if replay is None else await replay)
        finally:
            if replay is not None:
                await cancel(replay)


def print_rows(rows: list[Row], console: Console) -> None:
    """Print a table and the meaning of its faults."""
    table = Table(title="one etcd member of three fails")
    of_etcd = ("fault", "member", "no leader s", "two s", "views stale s", "behind 1 s", "write gap s")
    for column in (*of_etcd, "whole", "gap s", "TTFT s"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        seen, streams = row.seen, row.streams
        table.add_row(
            row.fault,
            row.member,
            f"{seen.without_leader_s:.1f}",
            f"{seen.two_leaders_s:.1f}",
            f"{seen.view_stale_max_s:.1f}",
            str(seen.views_behind),
            f"{seen.write_gap_max_s:.1f}",
            "" if streams is None else f"{streams.whole}/{streams.streams}",
            "" if streams is None else f"{streams.gap_max_s:.2f}",
            "" if streams is None else f"{streams.ttft_max_s:.2f}",
        )
    console.print(table)
    for name in {row.fault for row in rows} & FAULTS.keys():
        console.print(f"  {name}: {FAULTS[name].description}", style="dim")


def read_options() -> Options:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--fault", nargs="+", choices=sorted(FAULTS), default=list(DEFAULT))
    parser.add_argument("--member", nargs="+", choices=["leader", "follower"], default=["leader", "follower"])
    parser.add_argument("--before", type=float, default=3.0, metavar="SECONDS")
    parser.add_argument("--lasts", type=float, default=15.0, metavar="SECONDS")
    parser.add_argument("--after", type=float, default=5.0, metavar="SECONDS")
    parser.add_argument("--no-streams", action="store_true", help="only etcd and its use by services")
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")
    given = parser.parse_args()
    return Options(
        given.fault, given.member, given.before, given.lasts, given.after, not given.no_streams, given.output
    )


def main() -> int:
    """Measure inside new namespaces; return exit status 1 if a limit was exceeded."""
    options = read_options()
    if not is_inside():
        try:
            command = command_in_namespaces([sys.executable, "-m", "tests.etcd_faults", *sys.argv[1:]])
        except NamespacesUnavailable as error:
            print(error, file=sys.stderr)
            return UNSUPPORTED
        os.execvp(command[0], command)
    prepare()
    # Errors about failed members are expected.
    logging.getLogger("tailrace").setLevel(logging.ERROR)
    logging.getLogger("grpc").setLevel(logging.CRITICAL)
    console = Console(stderr=options.output == "json", width=130)
    console.print(f"on {machine()}")
    rows = asyncio.run(measure(options, console))
    print_rows(rows, console)
    figures: dict[str, object] = {"rows": [asdict(row) for row in rows]}
    if options.output == "json":
        print(json.dumps(figures))
    if options.with_streams:
        console.print(f"figures: {save('etcd_faults', figures)}")
    return 0 if all(meets_limits(row) for row in rows) else 1


def meets_limits(row: Row) -> bool:
    """Return whether there were at most 10 s without a leader, no view staler than 10 s, and every stream
    complete."""
    whole = row.streams is None or row.streams.whole == row.streams.streams
    if row.fault in FAULTS and FAULTS[row.fault].whole_cluster:
        return whole
    return whole and row.seen.without_leader_s <= 10.0 and row.seen.view_stale_max_s <= 10.0


if __name__ == "__main__":
    sys.exit(main())
