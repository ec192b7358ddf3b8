"""The examples of docs/scaling.md parse, follow the metric, and give a worker the time to stop."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
import yaml

from tailrace.cli.drain import drain
from tests.deploy.compose import DEPLOY
from tests.deploy.services import longest_s, parse_serve

PAGE = (DEPLOY.parent / "docs" / "scaling.md").read_text()
EXAMPLES: list[dict[str, Any]] = [
    yaml.safe_load(block) for block in re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
]
DEPLOYMENT, SCALED, RULES, AUTOSCALER = EXAMPLES
POD = DEPLOYMENT["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]


def test_the_worker_of_the_example_parses() -> None:
    program, serve, *arguments = CONTAINER["args"]
    assert (program, serve) == ("tailrace", "serve")
    parse_serve(arguments)


def test_a_pod_is_not_killed_while_it_drains() -> None:
    shell, _, line = CONTAINER["lifecycle"]["preStop"]["exec"]["command"]
    assert shell == "sh"
    program, command, *words = shlex.split(line)
    assert (program, command) == ("tailrace", "drain")
    # The folder has to exist.
    parsed = drain.make_context("drain", ["." if word.startswith("/") else word for word in words])
    assert POD["terminationGracePeriodSeconds"] > parsed.params["timeout_s"] + longest_s("worker")


@pytest.mark.parametrize(
    "query",
    [SCALED["spec"]["triggers"][0]["metadata"]["query"], RULES["externalRules"][0]["metricsQuery"]],
)
def test_what_scales_follows_the_model_of_the_workers(query: str) -> None:
    (model,) = (word.removeprefix("--model=") for word in CONTAINER["args"] if word.startswith("--model="))
    assert query == f'max(tailrace_desired_instances{{model="{model}"}})'


def test_what_scales_is_the_deployment() -> None:
    name = DEPLOYMENT["metadata"]["name"]
    assert SCALED["spec"]["scaleTargetRef"]["name"] == AUTOSCALER["spec"]["scaleTargetRef"]["name"] == name
    (metric,) = AUTOSCALER["spec"]["metrics"]
    assert metric["external"]["metric"]["name"] == RULES["externalRules"][0]["name"]["as"]
    # One instance per unit of the metric.
    (trigger,) = SCALED["spec"]["triggers"]
    assert trigger["metricType"] == metric["external"]["target"]["type"] == "AverageValue"
    assert trigger["metadata"]["threshold"] == metric["external"]["target"]["averageValue"] == "1"
