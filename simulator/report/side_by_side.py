"""The report of a comparison (`tailrace compare --report`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

from simulator.comparison import Cell as Entry
from simulator.comparison import Comparison, Group
from simulator.estimate import Best
from simulator.figure_text import FIGURE_FORMATS, describe_instances, half_text, mean_text, setup_rows
from simulator.report.charts import Axis, ChartPoint, Line, line_chart
from simulator.report.lengths import TtftPoint, by_prompt, by_reasoning, distribution
from simulator.report.over_time import kv_use, migrations, pool_membership, stages
from simulator.report.page import (
    Cell,
    cards,
    figure,
    heading,
    line_legend,
    page,
    subheading,
    table,
)

_COLUMNS: Final = (
    *("attainment", "goodput_per_s", "ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s"),
    *("latency_p99_s", "tokens_per_s"),
)
# Figures drawn against the rate: name, label, factor, and end of the axis.
_AGAINST_RATE: Final = (
    ("attainment", "SLO attainment (%)", 100.0, 100.0),
    ("goodput_per_s", "Goodput (requests/s)", 1.0, None),
    ("ttft_p99_s", "TTFT P99 (s)", 1.0, None),
)


def comparison_report(comparison: Comparison) -> str:
    """Return the report as an HTML document."""
    plan = comparison.plan
    count = len(plan.seeds)
    subtitle = (
        f"{', '.join(plan.policies)} · {describe_instances(plan.fleet)} · "
        f"{count} seed{'' if count == 1 else 's'} · SLO: {plan.slo.describe()}"
    )
    body = [_winners(comparison)]
    names = [_groups(comparison, workload)[0].name for workload in plan.workloads]
    for workload in plan.workloads:
        body += _workload(comparison, _groups(comparison, workload))
    body.append(heading("Settings of each policy"))
    settings = [plan.scenario(policy, plan.workloads[0], None, plan.seeds[0]) for policy in plan.policies]
    rows = [setup_rows(scenario)[:6] for scenario in settings]
    body.append(table([name for name, _ in rows[0]], [[Cell(value) for _, value in row] for row in rows]))
    return page(f"Policies on {', '.join(names)}", subtitle, body)


def _winners(comparison: Comparison) -> str:
    """Show the policy with the highest goodput at the highest rate of each workload."""
    rows = []
    for workload in comparison.plan.workloads:
        group = _groups(comparison, workload)[-1]
        best = group.best("goodput_per_s")
        if best is None:
            continue
        alike = f"; not distinguishable: {', '.join(sorted(best.tied))}" if best.tied else ""
        rows.append((f"most goodput on {group.name}{_rate_suffix(group)}{alike}", best.name))
    return cards(rows)


def _workload(comparison: Comparison, groups: Sequence[Group]) -> list[str]:
    last = groups[-1]
    outcomes = last.cells[0].outcomes
    body = [heading(last.name, outcomes[0].source)]
    if len(groups) > 1:
        body += [_against_rate(groups, *figure_) for figure_ in _AGAINST_RATE]
    body += [_table(group) for group in groups]
    points = {cell.policy: [outcome.points for outcome in cell.outcomes] for cell in last.cells}
    body += [subheading(f"Time to first token{_rate_suffix(last)}"), *_lengths(points)]
    seed = comparison.plan.seeds[0]
    for cell in last.cells:
        detail = cell.outcomes[0].detail
        if detail is not None:
            body.append(subheading(f"{cell.policy} over time{_rate_suffix(last)}, seed {seed}"))
            body += [kv_use(detail), pool_membership(detail), stages(detail), migrations(detail)]
    return body


def _lengths(points: dict[str, list[Sequence[TtftPoint]]]) -> list[str]:
    return [by_reasoning(points), by_prompt(points), distribution(points)]


def _against_rate(groups: Sequence[Group], name: str, label: str, factor: float, end: float | None) -> str:
    lines = []
    for series, policy in enumerate(cell.policy for cell in groups[0].cells):
        cells = [next(cell for cell in group.cells if cell.policy == policy) for group in groups]
        drawn = [_point(cell, name, factor) for cell in sorted(cells, key=lambda cell: cell.rate or 0.0)]
        lines.append(Line(policy, series, drawn))
    picture = line_chart(
        f"{label} against rate", Axis("rate (requests/s)", tight=True), Axis(label, end=end), lines
    )
    caption = (
        "Means over the seeds; whiskers are 95% intervals." if len(groups[0].cells[0].outcomes) > 1 else ""
    )
    legend = line_legend([(line.name, line.series) for line in lines])
    return subheading(f"{label.partition(' (')[0]} against rate") + figure(picture, caption, legend)


def _point(cell: Entry, name: str, factor: float) -> ChartPoint:
    value = cell.estimate(name)
    half = None if value.half_width is None else value.half_width * factor
    return ChartPoint(cell.rate or 0.0, value.mean * factor, half)


def _table(group: Group) -> str:
    bests = {name: group.best(name) for name in _COLUMNS}
    rows = []
    for cell in group.cells:
        row = [Cell(cell.policy)]
        for name in _COLUMNS:
            value = cell.estimate(name)
            standing = _highlight(bests[name], cell, len(group.cells))
            row.append(Cell(mean_text(name, value), half_text(name, value), standing))
        row += [Cell(f"{cell.estimate(name).mean:,.0f}") for name in ("migrations", "refused")]
        rows.append(row)
    headings = [
        "policy",
        *(_heading(FIGURE_FORMATS[name].heading) for name in _COLUMNS),
        "migrations",
        "refused",
    ]
    caption = (
        f"{len(group.cells[0].outcomes)} seeds{_rate_suffix(group)}: mean ± half of a 95% interval "
        "(Student's t). Bold: the best mean; coloured: those not distinguishable from it, paired by seed."
    )
    return table(headings, rows, caption)


def _groups(comparison: Comparison, workload: str) -> list[Group]:
    """Return a workload's groups, one per rate."""
    return [group for group in comparison.groups if group.workload == workload]


def _highlight(best: Best | None, cell: Entry, among: int) -> Literal["", "best", "tied"]:
    # Highlight nothing if all policies are tied.
    if best is None or len(best.tied) == among - 1:
        return ""
    return "best" if best.name == cell.policy else "tied" if cell.policy in best.tied else ""


def _heading(heading_text: str) -> str:
    """Format `TTFT P99 S` as `TTFT P99 (s)`."""
    label, _, unit = heading_text.rpartition(" ")
    return f"{label} ({unit.lower()})" if label else heading_text.lower()


def _rate_suffix(group: Group) -> str:
    return "" if group.rate is None else f" at {group.rate:g}/s"
