"""Alert rules name metrics that exist, and each has a section in the runbook."""

from __future__ import annotations

import re
from typing import TypedDict

import pytest
import yaml

from tests.deploy.compose import DEPLOY

DOCS = DEPLOY.parent / "docs"


class Rule(TypedDict):
    alert: str
    expr: str
    labels: dict[str, str]
    annotations: dict[str, str]


def _rules() -> list[Rule]:
    loaded = yaml.safe_load((DEPLOY.parent / "tailrace/fleet/alerts.yml").read_text())
    return [rule for group in loaded["groups"] for rule in group["rules"]]


RULES = _rules()


def test_prometheus_loads_the_rules() -> None:
    loaded = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    assert loaded["rule_files"] == ["alerts.yml"]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_rules_use_existing_metrics(rule: Rule) -> None:
    known = set(re.findall(r"`(tailrace_\w+)`", (DOCS / "monitoring.md").read_text()))
    named = set(re.findall(r"\btailrace_\w+", rule["expr"]))
    assert named <= known
    assert named or rule["expr"].startswith("up{")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_the_runbook_has_a_section(rule: Rule) -> None:
    assert rule["labels"]["severity"] in ("page", "ticket")
    assert rule["annotations"]["runbook"] == f"docs/runbook.md#{rule['alert'].lower()}"
    assert f"## {rule['alert']}\n" in (DOCS / "runbook.md").read_text()


def test_the_runbook_has_no_other_sections() -> None:
    sections = re.findall(r"^## (\w+)$", (DOCS / "runbook.md").read_text(), re.MULTILINE)
    assert sections == [rule["alert"] for rule in RULES]
