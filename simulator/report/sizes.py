"""The report of a sizing (`tailrace size --report`)."""

from __future__ import annotations

from typing import Final

from simulator.comparison import Cell as Entry
from simulator.figure_text import FIGURE_FORMATS, describe_instances, half_text, mean_text, setup_rows
from simulator.report.charts import Axis, ChartPoint, Line, line_chart
from simulator.report.page import Cell, cards, figure, heading, line_legend, page, table
from simulator.sizing import Kind, Size, Sizing

_COLUMNS: Final = ("attainment", "ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s", "tokens_per_s")


def sizing_report(sizing: Sizing) -> str:
    """Return the report as an HTML document."""
    plan = sizing.plan
    share = f"{100 * plan.attainment:g}% of the requests"
    first = sizing.sizes[0]
    outcome = first.cells[first.shown[0]].outcomes[0]
    found = [
        (f"under {best.policy}", describe_instances(kind.fleet(best.least, plan.fleet)))
        for kind in plan.kinds
        if (best := sizing.best(kind)) is not None and best.least is not None
    ]
    body = [cards(found or [(f"instances at least keep the SLO for {share}", f"more than {plan.most}")])]
    for kind in plan.kinds:
        sizes = [each for each in sizing.sizes if each.kind == kind]
        body += [heading(str(kind)), _chart(sizing, kind, sizes), _table(sizing, sizes)]
    body.append(heading("Settings of each policy"))
    settings = [
        setup_rows(plan.scenario(policy, plan.kinds[0], 1, plan.seeds[0]))[:6] for policy in plan.policies
    ]
    body.append(
        table([name for name, _ in settings[0]], [[Cell(value) for _, value in row] for row in settings])
    )
    subtitle = f"{sizing.source} · {len(plan.seeds)} seeds · SLO: {plan.slo.describe()}, for {share}"
    return page(f"Instances for {outcome.scenario.workload_name}", subtitle, body)


def _chart(sizing: Sizing, kind: Kind, sizes: list[Size]) -> str:
    lines = [
        Line(each.policy, series, [_point(count, cell) for count, cell in each.cells.items()])
        for series, each in enumerate(sizes)
    ]
    picture = line_chart(
        f"SLO attainment with {kind}",
        Axis(f"instances of {kind.name}", tight=True),
        Axis("SLO attainment (%)", end=100.0),
        lines,
    )
    caption = "Means over the seeds; whiskers are 95% intervals." if len(sizing.plan.seeds) > 1 else ""
    return figure(picture, caption, line_legend([(line.name, line.series) for line in lines]))


def _point(count: int, cell: Entry) -> ChartPoint:
    value = cell.estimate("attainment")
    half = None if value.half_width is None else 100.0 * value.half_width
    return ChartPoint(count, 100.0 * value.mean, half)


def _table(sizing: Sizing, sizes: list[Size]) -> str:
    rows = []
    for each in sizes:
        for count in each.shown:
            cell = each.cells[count]
            row = [Cell(each.policy), Cell(str(count), "", "best" if count == each.least else "")]
            for name in _COLUMNS:
                value = cell.estimate(name)
                row.append(Cell(mean_text(name, value), half_text(name, value)))
            row += [Cell(f"{cell.estimate('refused').mean:,.0f}"), Cell(sizing.plan.verdict(cell).value)]
            rows.append(row)
    headings = ["policy", "instances", *(FIGURE_FORMATS[name].heading.lower() for name in _COLUMNS)]
    caption = "Mean ± half of a 95% interval (Student's t). Bold: the least number that keeps the SLO."
    return table([*headings, "refused", "slo"], rows, caption)
