"""What alerts and dashboards ask for is exported by a cluster, with the labels that they choose by."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.harness.fleet import Fleet
from tests.waiting import WAIT_S

pytestmark = pytest.mark.fleet

DEPLOY: Final = Path(__file__).parents[2] / "deploy"
_NAMED: Final = re.compile(r"\b(tailrace_\w+)(?:\{([^}]*)\})?")
_LABEL: Final = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")
# Of clusters with certificates, and of front ends with keys (tests/security, tests/frontend).
ELSEWHERE: Final = {
    "tailrace_certificate_expiry_timestamp_seconds",
    "tailrace_frontend_api_keys_unusable",
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


def _asked_for() -> dict[str, set[str]]:
    """Return the metrics by name, with the labels by which they are chosen."""
    rules = yaml.safe_load((DEPLOY.parent / "tailrace/fleet/alerts.yml").read_text())
    dashboards = [json.loads(path.read_text()) for path in (DEPLOY / "grafana/dashboards").glob("*.json")]
    asked: dict[str, set[str]] = defaultdict(set)
    for expression in _expressions([rules, *dashboards]):
        for name, chosen in _NAMED.findall(expression):
            asked[name].update(_LABEL.findall(chosen))
    return asked


def test_what_alerts_and_dashboards_ask_for_is_exported(simulated_fleet: Fleet) -> None:
    exported: dict[str, set[str]] = defaultdict(set)
    for port in simulated_fleet.metrics_ports.values():
        page = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=WAIT_S).text
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                exported[sample.name].update(sample.labels)
    asked = _asked_for()
    assert asked.keys() - exported.keys() == ELSEWHERE
    # prometheus.yml gives each target its member's id.
    missing = {name: labels - exported[name] - {"member"} for name, labels in asked.items()}
    assert {name: labels for name, labels in missing.items() if labels} == {}
