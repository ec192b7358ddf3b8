"""The report of one run (`tailrace simulate --report`)."""

from __future__ import annotations

from simulator.figure_text import describe_fleet, setup_rows, summary_rows
from simulator.report.lengths import by_prompt, by_reasoning, distribution
from simulator.report.over_time import kv_use, migrations, pool_membership, stages
from simulator.report.page import Cell, cards, heading, page, table
from simulator.scenario import ScenarioResult


def run_report(outcome: ScenarioResult) -> str:
    """Return the report as an HTML document."""
    scenario = outcome.scenario
    rows = summary_rows(outcome.figures)
    shown = {
        "SLO attainment": "SLO attainment",
        "Goodput": "requests/s of goodput",
        "TTFT P50": "TTFT P50",
        "TTFT P99": "TTFT P99",
        "TPOT P99": "TPOT P99",
        "Throughput": "tokens/s",
    }
    points = {scenario.policy: [outcome.points]}
    body = [
        cards([(shown[label], _without_unit(value)) for label, value in rows if label in shown]),
        heading("Time to first token"),
        by_reasoning(points),
        by_prompt(points),
        distribution(points),
    ]
    detail = outcome.detail
    if detail is not None:
        body += [heading("KV memory"), kv_use(detail)]
        for title, part in (
            ("Pools", pool_membership(detail)),
            ("Length stages", stages(detail)),
            ("Migrations", migrations(detail)),
        ):
            if part:
                body += [heading(title), part]
    body += [
        heading("All figures"),
        table(
            ["figure", "value"],
            [[Cell(name), Cell(value)] for name, value in rows],
            f"SLO: {scenario.slo.describe()}",
        ),
        heading("What was simulated"),
        table(["setting", "value"], [[Cell(name), Cell(value)] for name, value in setup_rows(scenario)]),
    ]
    return page(
        f"{scenario.policy} on {scenario.workload_name}", f"{outcome.source} {describe_fleet(scenario)}", body
    )


def _without_unit(value: str) -> str:
    """Remove the unit of a rate, which the card shows below."""
    return value.removesuffix(" requests/s").removesuffix(" tokens/s")
