"""`make fuzz`: send a cluster input that no client of ours sends.

Starts a local cluster with simulated engines, without TLS. Writes to etcd, at every kind of key that members
read, noise, damaged records, and records of a wrong structure or a later version. Then it calls every gRPC
method of every process, and the message streams of the workers, with random and damaged messages and noise.
It is a bug if a server replies INTERNAL or UNKNOWN, exits, logs a traceback or keeps memory, if a request is
not answered, or if a process does not count what it skips. Exits with 1 if one was found.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Final

import grpc
import psutil
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tailrace.local.plan import Plan
from tailrace.local.progress import make_progress
from tailrace.local.state import Part, RunFolder, RunState
from tests.fuzz.calls import METHODS, Finding, fuzz_method, is_served
from tests.fuzz.record_inputs import Way
from tests.fuzz.records import RecordFuzz, RecordTally
from tests.fuzz.streams import fuzz_stream, stream_addresses
from tests.harness.loadgen import completion_request, run_streams
from tests.harness.plans import simulated_plan, started
from tests.harness.report import machine, save
from tests.waiting import WAIT_S

_WORKERS: Final = 3
_STREAMS: Final = 10
_MIB: Final = 1 << 20
# A process whose memory has grown by more than this keeps what clients sent.
_MAX_GROWTH_MIB: Final = 64.0


def fuzz_calls(
    console: Console, parts: Sequence[Part], inputs: int, seed: int, names: Sequence[str]
) -> tuple[Mapping[str, Counter[str]], list[Finding]]:
    """Call every method that a part serves; return the statuses by method, and the findings."""
    statuses: dict[str, Counter[str]] = {}
    findings: list[Finding] = []
    for part in parts:
        with grpc.insecure_channel(part.spec.address) as channel:
            for method in METHODS:
                if not is_served(channel, method):
                    continue
                # Inputs do not depend on the methods called before.
                random = Random(f"{seed} {part.name} {method.path}")
                tally = fuzz_method(channel, method, inputs, random, names)
                statuses.setdefault(method.path, Counter()).update(tally.statuses)
                findings += tally.findings
                ends = ", ".join(f"{count} {status}" for status, count in sorted(tally.statuses.items()))
                console.print(f"{part.name:14} {method.path:40} {ends}")
    return statuses, findings


def tracebacks(parts: Sequence[Part]) -> dict[str, int]:
    """Return the number of tracebacks in the log of each part that has any."""
    found = {part.name: Path(part.log).read_text(errors="replace").count("Traceback (most") for part in parts}
    return {name: count for name, count in found.items() if count}


def resident_mib(parts: Sequence[Part]) -> dict[str, float]:
    """Return the resident memory of each part's processes."""
    return {part.name: _tree_mib(part.identity.pid) for part in parts if part.identity.alive()}


def _tree_mib(pid: int) -> float:
    process = psutil.Process(pid)
    return sum(p.memory_info().rss for p in [process, *process.children(recursive=True)]) / _MIB


async def count_answered(plan: Plan) -> int:
    """Run some normal requests; return how many succeed."""
    requests = [completion_request(plan.http, "tiny", "hello", 20) for _ in range(_STREAMS)]
    return sum(not result.error for result in await run_streams(plan.http, requests))


async def one_answered(plan: Plan) -> str:
    """Run a normal request; return why it failed, or an empty text."""
    try:
        async with asyncio.timeout(WAIT_S):
            (result,) = await run_streams(plan.http, [completion_request(plan.http, "tiny", "hello", 2)])
    except TimeoutError:
        return f"no answer within {WAIT_S:.0f} s"
    return result.error


async def fuzz(console: Console, inputs: int, seed: int, plan: Plan, state: RunState) -> int:
    """Fuzz a running cluster; return the exit status."""
    served = [part for part in state.parts if part.name != "etcd"]
    workers = [part for part in served if part.name.startswith("worker")]
    names = [*(part.name for part in served), "tailrace", "pascal", "tiny"]
    await count_answered(plan)
    before = resident_mib(served)
    records = RecordFuzz(state.etcd, served, lambda: one_answered(plan), Random(seed))
    await records.run(inputs)
    _print_records(console, records.tally)
    statuses, findings = await asyncio.to_thread(fuzz_calls, console, served, inputs, seed, names)
    sent = 0
    for number, address in enumerate(await stream_addresses(state.etcd, [part.name for part in workers])):
        sent += await asyncio.to_thread(fuzz_stream, address, 10 * inputs, Random(seed + number), names)
    console.print(f"message streams: {10 * inputs * len(workers)} connections, {sent} messages")
    after = resident_mib(served)
    kept = {name: round(after[name] - before[name], 1) for name in after}
    ended = sorted({part.name for part in served} - set(after))
    logged = tracebacks(served)
    answered_after = await count_answered(plan)
    _print_findings(console, statuses, findings)
    console.print(f"memory growth, MiB: {kept}")
    console.print(
        f"exited: {ended or 'none'}; tracebacks: {logged or 'none'}; "
        f"answered afterwards: {answered_after} of {_STREAMS}"
    )
    figures: dict[str, object] = {
        "seed": seed,
        "inputs_per_method": inputs,
        "records": {
            "inputs": {f"{area}: {way}": count for (area, way), count in records.tally.inputs.items()},
            "unreadable": dict(records.tally.unreadable),
            "counted": dict(records.tally.counted),
            "refused_by_slo": records.tally.refused_by_slo,
            "requests": records.tally.requests,
            "findings": records.tally.findings,
        },
        "statuses": {method: dict(counts) for method, counts in statuses.items()},
        "findings": [asdict(finding) for finding in findings],
        "stream_messages": sent,
        "kept_mib": kept,
        "ended": ended,
        "tracebacks": logged,
        "answered": answered_after,
    }
    console.print(f"figures: {save('fuzz', figures)}")
    leaked = any(mib > _MAX_GROWTH_MIB for mib in kept.values())
    failed = records.tally.findings or findings or ended or logged or leaked or answered_after < _STREAMS
    return int(bool(failed))


def _print_records(console: Console, tally: RecordTally) -> None:
    """Print what was written to etcd, and what came of it."""
    total = tally.inputs.total()
    table = Table(title=f"{total} records and keys in etcd; {tally.requests} requests placed meanwhile")
    for column in ("record", *(way.name.lower() for way in Way), "unreadable", "counted"):
        table.add_column(column, no_wrap=True)
    for area in dict.fromkeys(area for area, _ in tally.inputs):
        counted = tally.counted["key in etcd" if area == "key" else f"{area} record"]
        tried = [str(tally.inputs[area, way]) for way in Way]
        table.add_row(area, *tried, str(tally.unreadable[area]), str(counted))
    console.print(table)
    console.print("unreadable: inputs that must be skipped; counted: by how many, over all processes")
    console.print(f"requests refused under SLOs that could be read: {tally.refused_by_slo}")
    for finding in tally.findings:
        console.print(f"[red]record[/red] {escape(finding)}", soft_wrap=True)
    console.print(f"records in etcd: {len(tally.findings)} findings")


def _print_findings(
    console: Console, statuses: Mapping[str, Counter[str]], findings: Sequence[Finding]
) -> None:
    table = Table(title=f"{sum(map(Counter.total, statuses.values()))} calls of {len(statuses)} methods")
    for column in ("status", "calls"):
        table.add_column(column)
    total: Counter[str] = Counter()
    for counts in statuses.values():
        total.update(counts)
    for status, count in total.most_common():
        table.add_row(status, str(count))
    console.print(table)
    for finding in {(f.method, f.details[:200]): f for f in findings}.values():
        console.print(f"[red]{finding.status}[/red] {finding.method}: {finding.details}")
        console.print(f"    {finding.requests[0][:200]}")
    console.print(f"server errors: {len(findings)}")


async def run(console: Console, inputs: int, seed: int, keep: Path | None) -> int:
    """Fuzz a new cluster; return the exit status."""
    with tempfile.TemporaryDirectory(prefix="tailrace-fuzz-") as root:
        folder = RunFolder(keep or Path(root))
        with folder.locked():
            folder.data.mkdir(exist_ok=True)
            plan = simulated_plan(folder, _WORKERS)
            async with started(plan, folder, make_progress([part.name for part in plan.parts])) as state:
                return await fuzz(console, inputs, seed, plan, state)


def main() -> int:
    """Parse the command line and run; return the exit status."""
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=50, help="per method and process (default 50)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="folder for the cluster's logs")
    options = parser.parse_args()
    # Stop the cluster on SIGTERM, as on Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    console = Console()
    console.print(f"on {machine()}, seed {options.seed}")
    return asyncio.run(run(console, options.inputs, options.seed, options.keep))


if __name__ == "__main__":
    sys.exit(main())
