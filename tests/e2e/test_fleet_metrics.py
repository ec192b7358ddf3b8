"""What alerts and dashboards ask for is exported before the first request, and the desired number of
instances follows the load."""

from __future__ import annotations

import json
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tailrace.tiny import MODEL_PATH
from tests.e2e.conftest import RUST_FRONT
from tests.harness.chats import Chats
from tests.harness.fleet import Fleet
from tests.harness.processes import wait_until
from tests.waiting import WAIT_S

pytestmark = pytest.mark.fleet

SCHEDULERS: Final = ("scheduler-0", "scheduler-1")
DEPLOY: Final = Path(__file__).parents[2] / "deploy"
# Labels that prometheus.yml gives each target; of a fleet with several clusters, also which it is in.
OF_TARGETS: Final = {"member", "job", "cluster"}
_NAMED: Final = re.compile(r"\b(tailrace_\w+)(?:\{([^}]*)\})?")
_CHOICE: Final = re.compile(r"(\w+)\s*(=~|!~|!=|=)\s*\"([^\"]*)\"")
_GROUPED: Final = re.compile(r"\bby\s*\(([^)]*)\)")
# Of clusters with certificates, and of edges and front ends with keys (tests/security, tests/tenancy).
ELSEWHERE: Final = {
    "tailrace_certificate_expiry_timestamp_seconds",
    "tailrace_api_keys_unusable",
}


def _expressions(node: object) -> Iterator[str]:
    """Yield the queries of alert rules or of a dashboard's panels."""
    if isinstance(node, dict):
        if isinstance(node.get("expr"), str):
            yield node["expr"]
        for value in node.values():
            yield from _expressions(value)
    elif isinstance(node, list):
        for value in node:
            yield from _expressions(value)


@dataclass(frozen=True, slots=True)
class Selector:
    """A metric as a query names it: what its labels must be, by PromQL's operators."""

    metric: str
    choices: tuple[tuple[str, str, str], ...]
    # Labels by which the query groups it.
    grouped: tuple[str, ...]

    def selects(self, labels: Mapping[str, str]) -> bool:
        """Return whether a series with these labels has what the query asks for."""
        grouped = all(label in labels for label in self.grouped if label not in OF_TARGETS)
        return grouped and all(
            (re.fullmatch(value if "~" in operator else re.escape(value), labels.get(label, "")) is None)
            is operator.startswith("!")
            for label, operator, value in self.choices
            # A variable of the dashboard is any value.
            if label not in OF_TARGETS and "$" not in value
        )


def _selectors() -> set[Selector]:
    """Return what all alert rules and panels ask for."""
    rules = yaml.safe_load((DEPLOY.parent / "tailrace/fleet/alerts.yml").read_text())
    dashboards = [json.loads(path.read_text()) for path in (DEPLOY / "grafana/dashboards").glob("*.json")]
    return {
        Selector(name, tuple(_CHOICE.findall(chosen)), tuple(_grouped_by(expression)))
        for expression in _expressions([rules, *dashboards])
        for name, chosen in _NAMED.findall(expression)
    }


def _grouped_by(expression: str) -> list[str]:
    return [label.strip() for labels in _GROUPED.findall(expression) for label in labels.split(",")]


def _page(fleet: Fleet, name: str) -> str:
    return httpx.get(f"http://127.0.0.1:{fleet.metrics_ports[name]}/metrics", timeout=WAIT_S).text


def _exported(fleet: Fleet) -> dict[str, list[Mapping[str, str]]]:
    """Return the labels of all series of all processes, by metric."""
    exported: dict[str, list[Mapping[str, str]]] = defaultdict(list)
    for name in fleet.metrics_ports:
        for family in text_string_to_metric_families(_page(fleet, name)):
            for sample in family.samples:
                exported[sample.name].append(sample.labels)
    return exported


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A fleet that has served no request; its desired number of instances follows within seconds."""
    fleet = Fleet(tmp_path_factory.mktemp("metrics"), "simulated")
    quick = [
        "--desired-window",
        "4",
        "--desired-up-delay",
        "1",
        "--desired-cooldown",
        "4",
        "--desired-max",
        "5",
    ]
    try:
        fleet.start_control(schedulers=2, options=quick)
        # Twenty times as slow as its profile.
        fleet.start_worker("w0", ["--sim", "speed=0.05"], wait=False)
        fleet.start_frontend("rust" if RUST_FRONT.exists() else "python")
        fleet.wait_instances(["w0"])
        yield fleet
    finally:
        fleet.close()


def _desired(fleet: Fleet) -> float:
    """Return the desired number of instances, which only the leader exports; 0 while nobody leads."""
    series = ("tailrace_desired_instances", f'model="{MODEL_PATH}"')
    return max(fleet.metric(scheduler, *series) for scheduler in SCHEDULERS)


def test_what_alerts_and_dashboards_ask_for_is_exported_from_the_start(fleet: Fleet) -> None:
    fleet.wait_leader()
    # The first sample comes within a second.
    wait_until(lambda: _desired(fleet) > 0, "a desired number of instances")
    exported, selectors = _exported(fleet), _selectors()
    missing = {each for each in selectors if not any(map(each.selects, exported[each.metric]))}
    assert {each.metric for each in missing} == ELSEWHERE


def test_the_desired_number_of_instances_follows_the_load(fleet: Fleet) -> None:
    fleet.wait_leader()
    wait_until(lambda: _desired(fleet) == 1, "one instance to be desired")
    chats = Chats(fleet.http)
    seen: list[float] = []

    def more_are_desired() -> bool:
        seen.append(_desired(fleet))
        return seen[-1] > 1

    try:
        streams = [
            chats.start(f"Prompt {n} of many. " * 80, max_tokens=60, extra_body={"min_tokens": 60})
            for n in range(24)
        ]
        wait_until(more_are_desired, "more instances to be desired")
        wait_until(lambda: _only_the_leader_exports(fleet), "one scheduler to lead for long enough")
        # Before the last one ended, however late this process sees that.
        idle_s = time.monotonic()
        while not all(stream.done() for stream in streams):
            idle_s = time.monotonic()
            more_are_desired()
            time.sleep(0.05)
        for stream in streams:
            stream.result(timeout=WAIT_S)
    finally:
        chats.close()
    assert 1 < max(seen) <= 5
    wait_until(lambda: _desired(fleet) == 1, "one instance to be desired")
    # The cool-down began when the last request needed more, a moment before it ended.
    assert time.monotonic() - idle_s > 1


def _only_the_leader_exports(fleet: Fleet) -> bool:
    """Check that the standby knows the load, but only one number counts; return whether it was the standby
    all the time."""
    leader = fleet.leader()
    (standby,) = set(SCHEDULERS) - {leader}
    active = fleet.metric(leader, "tailrace_active_instances")
    page = _page(fleet, standby)
    if fleet.leader() != leader:
        return False
    assert active == 1
    assert "tailrace_desired_instances{" not in page
    return True
