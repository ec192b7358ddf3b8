"""Try every route of the HTTP port of each kind of front end, and print what was refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from tailrace.local.ports import LOOPBACK, free_ports
from tailrace.tiny import MODEL_PATH
from tests.harness.servers import MODEL, TailraceCluster, wait_until_up
from tests.strangers.cluster import KEY
from tests.strangers.edge import open_to_others
from tests.strangers.http_calls import (
    EDGE,
    ONE_KEY,
    ONE_KEY_RUST,
    TENANTS,
    HttpOutcome,
    HttpRequest,
    Kind,
    Reply,
    Rules,
    Visitor,
    call_http,
    declared_requests,
    http_outcome,
    http_requests,
)
from tests.strangers.routes import DEVELOPMENT, Route, app_routes

_WRONG: Final = (HttpOutcome.IMPROPER, HttpOutcome.MISSING)
_START_S: Final = 180.0
# Front ends look for changes of the keys once a second.
_REVOKED_S: Final = 30.0
_POLL_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class HttpTried:
    """How one caller's requests to one front end ended."""

    front: str
    caller: str
    replies: Mapping[HttpRequest, Reply]
    outcomes: Mapping[HttpRequest, HttpOutcome]

    def requests(self, outcome: HttpOutcome) -> list[HttpRequest]:
        """Return the requests that ended so."""
        return [request for request, found in self.outcomes.items() if found is outcome]


@dataclass(frozen=True, slots=True)
class AllHttpTried:
    """How all requests ended."""

    routes: int
    tried: list[HttpTried]

    @property
    def violations(self) -> int:
        """Return the number of requests that did not end as they must."""
        return sum(len(each.requests(end)) for each in self.tried for end in _WRONG)

    def figures(self) -> dict[str, object]:
        """Return what is saved."""
        return {
            "routes": self.routes,
            "by_caller": {
                f"{each.front}, {each.caller}": {
                    **{end.value: len(each.requests(end)) for end in HttpOutcome if end not in _WRONG},
                    **{
                        end.value: [f"{request}: {each.replies[request].status}" for request in requests]
                        for end in _WRONG
                        if (requests := each.requests(end))
                    },
                }
                for each in self.tried
            },
        }


def try_http(folder: Path) -> AllHttpTried:
    """Start a cluster and its front ends, one after the other, and make every request as everybody."""
    routes = app_routes()
    tried: list[HttpTried] = []
    with TailraceCluster("HTTP", ["--engine", "simulated", "--workers", "1"], front="rust") as cluster:
        keys = folder / "keys.json"
        made = {
            tenant: _keys(keys, "make", tenant, "--models", models).split()[-1]
            for tenant, models in (("a", ""), ("b", "another-model"), ("gone", ""))
        }
        with (
            _front_end(cluster, folder, "python", DEVELOPMENT, "--api-keys", str(keys)) as port,
            _edge(cluster, folder, keys) as edge,
        ):
            _revoke(keys, "gone", port, made)
            visitors = [
                *_strangers(made["a"]),
                Visitor("a revoked key", Kind.STRANGER, f"Bearer {made['gone']}"),
                Visitor("a tenant", Kind.TENANT, f"Bearer {made['a']}"),
                Visitor("a tenant of another model", Kind.TENANT_OF_ANOTHER_MODEL, f"Bearer {made['b']}"),
            ]
            tried += _try("Python, keys of tenants", port, TENANTS, visitors, routes)
            # Before this one, and the cluster's own with vLLM's Rust API server, which has no key.
            tried += _try("edge, keys of tenants", edge, EDGE, visitors, routes)
        visitors = [*_strangers(KEY), Visitor("the key", Kind.USER, f"Bearer {KEY}")]
        one_key = {"VLLM_API_KEY": KEY}
        with _front_end(cluster, folder, "python", one_key | DEVELOPMENT) as port:
            tried += _try("Python, one key", port, ONE_KEY, visitors, routes)
        # Its development mode is open (docs/api-servers.md).
        with _front_end(cluster, folder, "rust", one_key) as port:
            tried += _try("vllm-rs, one key", port, ONE_KEY_RUST, visitors, routes)
    return AllHttpTried(len(routes), tried)


def _strangers(key: str) -> list[Visitor]:
    return [
        Visitor("no key", Kind.STRANGER),
        Visitor("a wrong key", Kind.STRANGER, "Bearer sk-of-nobody"),
        Visitor("an empty key", Kind.STRANGER, "Bearer "),
        Visitor("a part of a key", Kind.STRANGER, f"Bearer {key[:-1]}"),
        Visitor("a key in another scheme", Kind.STRANGER, f"Basic {key}"),
    ]


def _try(
    front: str, port: int, rules: Rules, visitors: Sequence[Visitor], routes: Sequence[Route]
) -> Iterator[HttpTried]:
    for visitor in visitors:
        # The key of all users may do everything: that shows that the others were refused for their keys.
        requests = declared_requests(routes) if visitor.kind is Kind.USER else http_requests(routes)
        replies = dict(zip(requests, call_http(LOOPBACK, port, visitor, requests), strict=True))
        outcomes = {
            request: http_outcome(rules, visitor, request, reply) for request, reply in replies.items()
        }
        yield HttpTried(front, visitor.name, replies, outcomes)


@contextmanager
def _front_end(
    cluster: TailraceCluster, folder: Path, front: str, environment: Mapping[str, str], *options: str
) -> Iterator[int]:
    """Run a front end for the block; its value is the HTTP port."""
    options = ("--front", front, "--model", str(MODEL_PATH), "--served-model-name", MODEL, *options)
    with _served(cluster, folder, "frontend", environment, *options) as port:
        yield port


@contextmanager
def _edge(cluster: TailraceCluster, folder: Path, keys: Path) -> Iterator[int]:
    """Run an edge for the block, whose files are its user's only; its value is the HTTP port."""
    with _served(cluster, folder, "edge", {}, "--api-keys", str(keys)) as port:
        if found := open_to_others(port):
            raise RuntimeError(f"other users reach {', '.join(found)}")
        yield port


@contextmanager
def _served(
    cluster: TailraceCluster, folder: Path, kind: str, environment: Mapping[str, str], *options: str
) -> Iterator[int]:
    """Run a service for the block; its value is the HTTP port."""
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "tailrace", "serve", kind, "--etcd", cluster.etcd]
    command += ["--http", f"{LOOPBACK}:{port}", *options]
    command += ["--listen", f"{LOOPBACK}:0", "--metrics", f"{LOOPBACK}:0"]
    log_path = folder / f"{kind}-{port}.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, **environment}
        )
        try:
            if not wait_until_up(f"http://{LOOPBACK}:{port}/health", process, _START_S):
                end = log_path.read_text(errors="replace")[-3000:]
                raise RuntimeError(f"the {kind} did not start:\n{end}")
            yield port
        finally:
            process.terminate()
            process.wait(timeout=60)


def _keys(file: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "tailrace", "keys", *arguments, "--file", str(file)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def _revoke(file: Path, tenant: str, port: int, made: Mapping[str, str]) -> None:
    """Revoke the tenant's key, which must have been good, and wait until the front end knows."""
    visitor = Visitor(tenant, Kind.TENANT, f"Bearer {made[tenant]}")
    models = HttpRequest("GET", "/v1/models", "/v1/models")
    (before,) = call_http(LOOPBACK, port, visitor, [models])
    if before.status != 200:
        raise RuntimeError(f"the key to be revoked gets {before.status}, not 200")
    listed = json.loads(_keys(file, "list", "-o", "json"))["keys"]
    (key_id,) = (key["key_id"] for key in listed if key["tenant"] == tenant)
    _keys(file, "revoke", key_id)
    # If it stays good, that is found by trying.
    deadline_s = time.monotonic() + _REVOKED_S
    while time.monotonic() < deadline_s:
        (reply,) = call_http(LOOPBACK, port, visitor, [models])
        if reply.status == 401:
            return
        time.sleep(_POLL_S)


def print_http(console: Console, tried: AllHttpTried) -> None:
    """Print what was refused by front end and caller, and what was not."""
    table = Table(title=f"HTTP: {tried.routes} routes of vLLM's app, by every method")
    for column in ("front end", "caller"):
        table.add_column(column)
    shown = [end for end in HttpOutcome if end not in _WRONG]
    for column in ("requests", *shown, "improper"):
        table.add_column(column, justify="right")
    for each in tried.tried:
        counts = Counter(each.outcomes.values())
        wrong = sum(counts[end] for end in _WRONG)
        figures = (len(each.outcomes), *(counts[end] for end in shown), wrong)
        table.add_row(each.front, each.caller, *map(str, figures))
    console.print(table)
    for front in dict.fromkeys(each.front for each in tried.tried):
        found = {
            str(request)
            for each in tried.tried
            if each.front == front
            for request in each.requests(HttpOutcome.OPEN)
            if request.target == request.path and request.method in ("GET", "POST")
        }
        console.print(f"{front}: open by design: {', '.join(sorted(found))}")
    for each in tried.tried:
        for end in _WRONG:
            for request in each.requests(end):
                status = each.replies[request].status or "no reply"
                console.print(f"[red]{end}[/red] {each.front}, {each.caller}: {request}: {status}")
    console.print(f"HTTP: {tried.violations} improper")
