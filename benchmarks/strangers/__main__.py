"""`make strangers`: a cluster with certificates, and somebody in another network namespace who has none.

Every port of every process is tried with every method: in the clear, with TLS but no certificate, and with
certificates of roles that the methods are not for. Then prompts are sent, and looked for on the links.
Exits 1 if anything was let through. Needs root or user namespaces, iproute2 and util-linux.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from benchmarks.etcd_faults.namespaces import NoNamespaces, inside, inside_command, ip, prepare
from benchmarks.loadgen import completion_request, run_streams
from benchmarks.report import machine, save
from benchmarks.strangers.calls import IN_THE_CLEAR, NO_CERTIFICATE
from benchmarks.strangers.cluster import KEY, exposed_plan, listening
from benchmarks.strangers.sniffer import Sniffer
from tailrace.local.plan import Plan
from tailrace.local.progress import make_progress
from tailrace.local.start import Starter
from tailrace.local.state import RunFolder, RunState
from tailrace.security.access import METHODS
from tailrace.security.roles import Role

_NAMESPACE: Final = "stranger"
_OURS: Final = "10.99.0.1"
_THEIRS: Final = "10.99.0.2"
_SECRET: Final = "sesame opens this very door"
_STREAMS: Final = 20
_REFUSED: Final = frozenset({"UNAVAILABLE", "DEADLINE_EXCEEDED", "PERMISSION_DENIED", "UNIMPLEMENTED"})

Tried = Mapping[str, Mapping[str, Mapping[str, str] | str]]


def make_link() -> None:
    """A link to the stranger's namespace."""
    ip("netns", "add", _NAMESPACE)
    ip("link", "add", "tr0", "type", "veth", "peer", "name", "tr1", "netns", _NAMESPACE)
    ip("address", "add", f"{_OURS}/24", "dev", "tr0")
    ip("link", "set", "tr0", "up")
    ip("-n", _NAMESPACE, "address", "add", f"{_THEIRS}/24", "dev", "tr1")
    ip("-n", _NAMESPACE, "link", "set", "tr1", "up")


def try_all(plan: Plan, ports: Mapping[int, str]) -> Tried:
    """What the stranger gets."""
    folders = [f"{plan.certificates}/issued/{role}/stranger" for role in (Role.TELEMETRY, Role.VIEWER)]
    folders.append(f"{plan.certificates}/issued/worker/worker-0")
    command = ["ip", "netns", "exec", _NAMESPACE, sys.executable, "-m", "benchmarks.strangers.calls"]
    command += [_OURS, ",".join(map(str, ports)), "--authorities", f"{plan.certificates}/ca.crt"]
    command += ["--users-port", plan.http.rpartition(":")[2]]
    for folder in folders:
        command += ["--certificate", folder]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True, timeout=600)
    tried: Tried = json.loads(done.stdout)
    return tried


def let_through(way: str, ends: Mapping[str, str]) -> list[str]:
    """Methods that were answered, though they are not for whoever called."""
    certified = way not in (IN_THE_CLEAR, NO_CERTIFICATE)
    own = {method for method, roles in METHODS.items() if certified and Role(way) in roles}
    allowed = _REFUSED if certified else _REFUSED - {"UNIMPLEMENTED", "PERMISSION_DENIED"}
    return [method for method, end in ends.items() if method not in own and end not in allowed]


async def captured(plan: Plan) -> tuple[int, bool, int]:
    """Bytes on the links while streams run, whether their prompt was in them, and how many failed."""
    port = int(plan.http.rpartition(":")[2])
    requests = [
        completion_request(plan.http, "tiny", _SECRET, 100).replace(
            b"\r\n\r\n", f"\r\nAuthorization: Bearer {KEY}\r\n\r\n".encode(), 1
        )
        for _ in range(_STREAMS)
    ]
    with Sniffer(frozenset({port})) as sniffer:
        results = await run_streams(plan.http, requests)
    failed = sum(bool(result.error) for result in results)
    return len(sniffer.seen), _SECRET.encode() in sniffer.seen, failed


def show(console: Console, ports: Mapping[int, str], tried: Tried) -> int:
    """Print what came of it; how often something was let through."""
    table = Table(title=f"{len(METHODS)} methods on each port, from another network namespace")
    for column in ("port", "part", "way in", "ended with", "let through"):
        table.add_column(column)
    wrong = 0
    for port, ways in tried.items():
        for way, ends in ways.items():
            if isinstance(ends, str):
                table.add_row(port, ports[int(port)], way, ends or "nothing", "")
                wrong += " 200 " in ends
                continue
            counts = collections.Counter(ends.values())
            through = let_through(way, ends)
            wrong += len(through)
            said = ", ".join(f"{count} {end}" for end, count in sorted(counts.items()))
            table.add_row("", "", way, said, ", ".join(through) or "-")
    console.print(table)
    return wrong


async def measure(console: Console, workers: int) -> int:
    """All of it; the exit status."""
    with tempfile.TemporaryDirectory(prefix="tailrace-strangers-") as root:
        folder = RunFolder(Path(root))
        with folder.locked():
            folder.data.mkdir()
            plan = exposed_plan(folder, _OURS, workers)
            with make_progress([part.name for part in plan.parts]) as progress:
                starter = Starter(plan, folder, progress, os.cpu_count() or 1)
                try:
                    state: RunState = await starter.run(None, "tiny")
                    ports = listening(state)
                    tried = await asyncio.to_thread(try_all, plan, ports)
                    size, seen, failed = await captured(plan)
                finally:
                    starter.stop()
    wrong = show(console, ports, tried)
    console.print(f"{len(ports)} ports; let through: {wrong}")
    console.print(
        f"{_STREAMS} streams, {failed} failed; {size:,} bytes captured on the links; the prompt in them: "
        f"{'YES' if seen else 'no'}"
    )
    path = save("strangers", {"ports": len(ports), "let_through": wrong, "tried": tried, "prompt_seen": seen})
    console.print(f"figures: {path}")
    return int(bool(wrong or seen or failed))


def main() -> int:
    """Inside namespaces of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    if not inside():
        command = [sys.executable, "-m", "benchmarks.strangers", *sys.argv[1:]]
        try:
            inner = inside_command(command)
        except NoNamespaces as error:
            print(error, file=sys.stderr)
            return 3
        os.execvp(inner[0], inner)
    prepare()
    make_link()
    console = Console()
    console.print(f"on {machine()}")
    return asyncio.run(measure(console, options.workers))


if __name__ == "__main__":
    sys.exit(main())
