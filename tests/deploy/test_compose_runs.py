"""The commands and health checks of the compose file, run as local processes."""

from __future__ import annotations

import json
import re
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.deploy.compose import DEPLOY, LocalCompose, LocalService, load_compose, rust_front_end
from tests.harness.processes import Process, tailrace
from tests.ports import free_port
from tests.waiting import WAIT_S

pytestmark = pytest.mark.fleet

ORDER = ("etcd", "monitor", "migration", "scheduler", "scheduler-standby", "worker-0", "worker-1", "frontend")
# The API server in Python loads vLLM.
FRONT = "rust" if rust_front_end() else "python"
# Between two health checks of a service.
CHECK_S = 0.5


def _healthy(service: LocalService) -> bool:
    return subprocess.run(service.health, capture_output=True, timeout=WAIT_S, check=False).returncode == 0


def _output(command: Sequence[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False).stdout


class Cluster:
    """The services of the compose file, started in the order of its `depends_on`."""

    def __init__(self, folder: Path) -> None:
        settings = {"TAILRACE_ENGINE": "simulated", "TAILRACE_FRONT": FRONT}
        self.compose = LocalCompose(folder, free_port, settings)
        self.services = {name: self.compose.service(name) for name in ORDER}
        self.processes: dict[str, Process] = {}
        self._folder = folder
        # A health check is a process that takes half a second of CPU time.
        self._have_been_healthy: set[str] = set()

    def start(self) -> None:
        """Start all services, each after its dependencies are healthy. Raise RuntimeError, TimeoutError."""
        for name, service in self.services.items():
            for other, condition in service.depends_on.items():
                if condition == "service_healthy" and other not in self._have_been_healthy:
                    self.wait_healthy(other)
            log = self._folder / f"{name}.log"
            self.processes[name] = Process.launch(name, service.command, log, service.environment)
        for name in self.services.keys() - self._have_been_healthy:
            self.wait_healthy(name)

    def wait_healthy(self, name: str) -> None:
        """Wait until the health check of the service succeeds."""
        process = self.processes[name]
        deadline = time.monotonic() + WAIT_S
        while not _healthy(self.services[name]):
            if not process.alive or time.monotonic() > deadline:
                raise RuntimeError(f"{name} did not become healthy:\n{process.text()[-3000:]}")
            time.sleep(CHECK_S)
        self._have_been_healthy.add(name)

    def stop(self) -> dict[str, int]:
        """Send SIGTERM to all services, dependents first; return the exit codes."""
        return {name: process.stop() for name, process in reversed(self.processes.items())}

    def scrape(self) -> str:
        """Return the /metrics of all services."""
        texts = []
        for name, service in self.services.items():
            for word in service.command:
                if word.startswith("--metrics="):
                    with urllib.request.urlopen(
                        f"http://{word.partition('=')[2]}/metrics", timeout=WAIT_S
                    ) as reply:
                        texts.append(f"# {name}\n{reply.read().decode()}")
        return "\n".join(texts)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("compose"))
    try:
        cluster.start()
        yield cluster
    finally:
        codes = cluster.stop()
    # Every Tailrace service exits cleanly on SIGTERM.
    assert {name: code for name, code in codes.items() if name != "etcd" and code != 0} == {}


def test_every_service_becomes_healthy(cluster: Cluster) -> None:
    services = load_compose()["services"]
    assert isinstance(services, dict)
    ours = {name for name, about in services.items() if "build" in about}
    # The fixture has waited for the health check of each.
    assert ours | {"etcd"} == set(cluster.services)


def test_requests_are_answered_and_traced(cluster: Cluster) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
    request = urllib.request.Request(
        f"http://127.0.0.1:{cluster.compose.port('frontend', 8000)}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=WAIT_S) as reply:
        answer = json.load(reply)
    assert answer["usage"]["completion_tokens"] == 8
    admin = f"127.0.0.1:{cluster.compose.port('scheduler', 7101)}"
    command = tailrace("trace", answer["id"], "--admin", admin)
    deadline = time.monotonic() + WAIT_S
    # Spans arrive within seconds, the front end's root span among the last.
    wanted, found = {"request", "placement", "prefill"}, set[str]()
    while not wanted <= found:
        text = _output(command)
        assert time.monotonic() < deadline, text
        found = {line.lstrip("│├└─ ").split(" ")[0] for line in text.splitlines()}


def test_the_dashboard_uses_existing_metrics(cluster: Cluster) -> None:
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", cluster.scrape(), re.MULTILINE))
    exported = set(kinds)
    for name, kind in kinds.items():
        if kind == "histogram":
            exported |= {f"{name}_bucket", f"{name}_sum", f"{name}_count"}
    dashboard = json.loads((DEPLOY / "grafana/dashboards/tailrace.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    used = {name for text in expressions for name in re.findall(r"\b(?:tailrace|process)_\w+", text)}
    assert used
    assert used - exported == set()


def test_the_manual_s_table_of_metrics_is_complete(cluster: Cluster) -> None:
    exported = set(re.findall(r"^# TYPE (tailrace_\w+) ", cluster.scrape(), re.MULTILINE))
    # prometheus_client adds a creation time to histograms, which is not documented.
    exported = {name for name in exported if not name.endswith("_created")}
    manual = (DEPLOY.parent / "docs" / "monitoring.md").read_text()
    documented = set(re.findall(r"`(tailrace_\w+)(?:\{[^`]*\})?`", manual))
    assert exported - documented == set()


def test_a_dead_service_is_unhealthy(cluster: Cluster) -> None:
    cluster.processes["scheduler-standby"].stop()
    assert not _healthy(cluster.services["scheduler-standby"])
