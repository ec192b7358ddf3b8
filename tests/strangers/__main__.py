"""`make strangers`: a cluster with certificates, attacked from another network namespace without one.

First all methods of etcd's services are called as each role and as nobody, on an etcd of its own with the
roles applied. Then every route of vLLM's API servers is requested without a key, with wrong and revoked keys
and with those of tenants (`--http-only`: nothing else, and no namespaces are needed). Then every method of
ours is called on every port of every process: without TLS, with TLS but no certificate, and with certificates
of roles that may not call it. Then prompts are sent, and searched for in the captured traffic.
Exits with 1 if anything was improperly answered or leaked. Needs root or user namespaces, iproute2 and
util-linux.
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from tailrace.local.plan import Plan
from tailrace.local.progress import make_progress
from tailrace.local.state import RunFolder
from tailrace.security.access import METHODS
from tailrace.security.roles import Role
from tests.harness.loadgen import completion_request, run_streams
from tests.harness.namespaces import (
    NamespacesUnavailable,
    command_in_namespaces,
    ip,
    is_inside,
    prepare,
)
from tests.harness.plans import started
from tests.harness.report import machine, save
from tests.strangers.calls import IN_THE_CLEAR, NO_CERTIFICATE
from tests.strangers.cluster import EVERY_ROLE, KEY, edge_of, exposed_plan, listening_ports
from tests.strangers.edge import open_to_others
from tests.strangers.etcd import print_etcd, try_etcd
from tests.strangers.http_port import print_http, try_http
from tests.strangers.sniffer import Sniffer

_NAMESPACE: Final = "stranger"
_CLUSTER_ADDRESS: Final = "10.99.0.1"
_STRANGER_ADDRESS: Final = "10.99.0.2"
_SECRET: Final = "sesame opens this very door"
_STREAMS: Final = 20
_CALLERS: Final = (Role.TELEMETRY, Role.VIEWER, Role.WORKER, Role.EDGE)
# UNAUTHENTICATED: the edge's answer to a request without a key, 401.
_REFUSED: Final = frozenset(
    {"UNAVAILABLE", "DEADLINE_EXCEEDED", "PERMISSION_DENIED", "UNIMPLEMENTED", "UNAUTHENTICATED"}
)

Replies = Mapping[str, Mapping[str, Mapping[str, str] | str]]


def make_link() -> None:
    """Create a link to the stranger's namespace."""
    ip("netns", "add", _NAMESPACE)
    ip("link", "add", "tr0", "type", "veth", "peer", "name", "tr1", "netns", _NAMESPACE)
    ip("address", "add", f"{_CLUSTER_ADDRESS}/24", "dev", "tr0")
    ip("link", "set", "tr0", "up")
    ip("-n", _NAMESPACE, "address", "add", f"{_STRANGER_ADDRESS}/24", "dev", "tr1")
    ip("-n", _NAMESPACE, "link", "set", "tr1", "up")


def call_all_ports(plan: Plan, ports: Mapping[int, str], roles: Sequence[Role]) -> Replies:
    """Call every method on these ports from the stranger's namespace; return the replies."""
    folders = [f"{plan.certificates}/issued/{role}/stranger" for role in roles]
    command = ["ip", "netns", "exec", _NAMESPACE, sys.executable, "-m", "tests.strangers.calls"]
    command += [_CLUSTER_ADDRESS, ",".join(map(str, ports)), "--authorities", f"{plan.certificates}/ca.crt"]
    for port in users_ports(plan):
        command += ["--users-port", str(port)]
    for folder in folders:
        command += ["--certificate", folder]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True, timeout=600)
    replies: Replies = json.loads(done.stdout)
    return replies


def improperly_answered(way: str, ends: Mapping[str, str]) -> list[str]:
    """Return the methods that were answered although the caller may not call them."""
    certified = way not in (IN_THE_CLEAR, NO_CERTIFICATE)
    permitted = {method for method, roles in METHODS.items() if certified and Role(way) in roles}
    refusals = _REFUSED if certified else _REFUSED - {"UNIMPLEMENTED", "PERMISSION_DENIED"}
    return [method for method, end in ends.items() if method not in permitted and end not in refusals]


def users_ports(plan: Plan) -> list[int]:
    """Return the ports of users' API, of the front end and of the edge."""
    return [int(url.rpartition(":")[2]) for url in (plan.http, edge_of(plan).http)]


async def capture_streams(plan: Plan) -> tuple[int, bool, int]:
    """Run streams, to the front end and through the edge; return the bytes captured on the links, whether the
    prompt was among them, and how many streams failed."""
    failed = 0
    with Sniffer(frozenset(users_ports(plan))) as sniffer:
        for url in (plan.http, edge_of(plan).http):
            requests = [
                completion_request(url, "tiny", _SECRET, 100).replace(
                    b"\r\n\r\n", f"\r\nAuthorization: Bearer {KEY}\r\n\r\n".encode(), 1
                )
                for _ in range(_STREAMS // 2)
            ]
            failed += sum(bool(result.error) for result in await run_streams(url, requests))
    return len(sniffer.captured_bytes), _SECRET.encode() in sniffer.captured_bytes, failed


def print_results(console: Console, ports: Mapping[int, str], replies: Replies) -> int:
    """Print the replies; return how many calls were improperly answered."""
    table = Table(title=f"{len(METHODS)} methods on each port, from another network namespace")
    for column in ("port", "part", "credentials", "status", "improperly answered"):
        table.add_column(column)
    violations = 0
    for port, ways in replies.items():
        for way, ends in ways.items():
            if isinstance(ends, str):
                table.add_row(port, ports[int(port)], way, ends or "no reply", "")
                violations += " 200 " in ends
                continue
            counts = collections.Counter(ends.values())
            answered = improperly_answered(way, ends)
            violations += len(answered)
            summary = ", ".join(f"{count} {end}" for end, count in sorted(counts.items()))
            table.add_row("", "", way, summary, ", ".join(answered) or "-")
    console.print(table)
    return violations


async def measure(console: Console, workers: int) -> int:
    """Run everything; return the exit status."""
    with tempfile.TemporaryDirectory(prefix="tailrace-strangers-") as root:
        folder = RunFolder(Path(root))
        with folder.locked():
            folder.data.mkdir()
            etcd = await try_etcd(folder.data)
            print_etcd(console, etcd)
            http = await asyncio.to_thread(try_http, folder.data)
            print_http(console, http)
            plan = exposed_plan(folder, _CLUSTER_ADDRESS, workers)
            progress = make_progress([part.name for part in plan.parts])
            async with started(plan, folder, progress, cores=os.cpu_count() or 1) as state:
                ports = listening_ports(state)
                others = {port: part for port, part in ports.items() if part != "edge"}
                edges = {port: part for port, part in ports.items() if part == "edge"}
                # The port of the edge has no method that a role could call.
                replies = {
                    **await asyncio.to_thread(call_all_ports, plan, others, _CALLERS),
                    **await asyncio.to_thread(call_all_ports, plan, edges, EVERY_ROLE),
                }
                reached = open_to_others(users_ports(plan)[1])
                size, leaked, failed = await capture_streams(plan)
    violations = print_results(console, ports, replies)
    console.print(f"{len(ports)} ports; improperly answered: {violations}")
    console.print(f"files and sockets of the edge that other users reach: {', '.join(reached) or 'none'}")
    console.print(
        f"{_STREAMS} streams, {failed} failed; {size:,} bytes captured on the links; the prompt in them: "
        f"{'YES' if leaked else 'no'}"
    )
    path = save(
        "strangers",
        {
            "etcd": etcd.figures(),
            "http": http.figures(),
            "ports": len(ports),
            "let_through": violations + etcd.violations + http.violations,
            "tried": replies,
            "prompt_seen": leaked,
            "edge_open_to_others": reached,
        },
    )
    console.print(f"figures: {path}")
    return int(bool(violations or etcd.violations or http.violations or leaked or failed or reached))


def measure_http(console: Console) -> int:
    """Try the HTTP ports alone; return the exit status."""
    console.print(f"on {machine()}")
    with tempfile.TemporaryDirectory(prefix="tailrace-strangers-") as root:
        tried = try_http(Path(root))
    print_http(console, tried)
    path = save("strangers-http", tried.figures())
    console.print(f"figures: {path}")
    return int(bool(tried.violations))


def main() -> int:
    """Run inside new namespaces; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--http-only", action="store_true", help="try only the HTTP ports of front ends")
    options = parser.parse_args()
    if options.http_only:
        return measure_http(Console())
    if not is_inside():
        command = [sys.executable, "-m", "tests.strangers", *sys.argv[1:]]
        try:
            inner = command_in_namespaces(command)
        except NamespacesUnavailable as error:
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
