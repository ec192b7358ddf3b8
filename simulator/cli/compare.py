"""Implement `tailrace compare POLICY... --workload W`: several policies side by side."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import click
from rich.table import Table

from simulator.cli.options import (
    FleetSettings,
    PolicySettings,
    SloSettings,
    check_policy,
    crossed,
    plain,
    processes_option,
    report_option,
    simulation_errors,
    task_bar,
    write_report,
)
from simulator.comparison import BETTER, Cell, Comparison, Group, Plan, compare, section_starts_s
from simulator.estimate import Best
from simulator.figure_text import FIGURE_FORMATS, format_parameters, half_text, knowledge_line, mean_text
from simulator.report.side_by_side import comparison_report
from simulator.workloads.resolve import WorkloadOptions, resolve_workload
from tailrace.brief_help import BriefCommand
from tailrace.cli.errors import UsageProblem
from tailrace.cli.output import Output, console, note, output_option, print_figures, print_json
from tailrace.cli.plain import JsonValue
from tailrace.numeric import RealRange, WholeRange
from tailrace.service.settings import setting, settings_options


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareSettings:
    """What is compared, besides the policies."""

    workloads: tuple[str, ...] = setting((), "Can be repeated.", "--workload", multiple=True, required=True)
    rates: tuple[float, ...] = setting(
        (),
        "Mean requests per second; can be repeated.",
        "--rate",
        multiple=True,
        type=RealRange(min=0.0, min_open=True),
    )
    seeds: int = setting(3, "Number of seeds.", type=WholeRange(1, 1000))
    seed: int = setting(0, "First seed.", type=WholeRange(min=0))
    workload: WorkloadOptions
    cross: bool = setting(
        False, "Give every policy each of the batch orders that the policies have.", is_flag=True
    )
    policy: PolicySettings
    fleet: FleetSettings
    slo: SloSettings


@click.command(
    "compare",
    cls=BriefCommand,
    epilog="Example: tailrace compare pascal least_loaded+pascal --workload alpaca_eval --rate 8 --rate 12 "
    "--profile r1-distill-qwen-32b-h100 --report compare.html",
)
@click.argument("policies", metavar="POLICY...", nargs=-1, required=True)
@settings_options(CompareSettings, "settings")
@processes_option
@report_option
@output_option(Output.TABLE, Output.CSV)
def compare_command(
    policies: tuple[str, ...],
    settings: CompareSettings,
    processes: int | None,
    report: Path | None,
    output: Output,
) -> None:
    """Run several policies on the same requests and compare them.

    POLICY is NAME[+ORDER] with parameters after it, in quotes: pascal, least_loaded+earliest_due,
    "cascade layout=chain". NAME is a policy (docs/policy-parameters.md), or your own module:Class; ORDER is
    a batch order, instead of the one that belongs to the policy. Values are means over the seeds with 95%
    intervals (Student's t). In each column * marks the best mean, and = those whose difference from it,
    paired by seed, is not significant. With --count, each seed uses another stretch of a trace; without it,
    all seeds use the whole trace, and almost nothing is random. Ctrl-C ends with the tables of the seeds that
    all policies have finished.
    """
    for name in policies:
        check_policy(name, "POLICY")
    if settings.cross:
        policies = crossed(policies)
    _distinct("POLICY", policies)
    _distinct("--workload", settings.workloads)
    _distinct("--rate", settings.rates)
    plan = Plan(
        policies,
        settings.workloads,
        settings.rates or (None,),
        range(settings.seed, settings.seed + settings.seeds),
        settings.workload,
        settings.fleet.fleet(),
        settings.slo.slo(),
        settings.fleet.engine.predict,
        parameters=settings.policy.parameters(policies),
    )
    with simulation_errors():
        # Report unusable workloads before anything runs.
        for workload in plan.workloads:
            first = replace(plan.options, rate_per_s=plan.rates[0], seed=settings.seed)
            resolve_workload(workload, first)
        plan = replace(plan, starts_s=_section_starts(plan))
        with task_bar("comparing") as progress:
            comparison = compare(plan, processes=processes, progress=progress)
    _note_refusals(comparison)
    if comparison.interrupted:
        if output is Output.TABLE:
            _print_groups(comparison)
        raise click.Abort
    match output:
        case Output.JSON:
            print_json(_plain(comparison))
        case Output.CSV:
            click.echo(_csv(comparison), nl=False)
        case _:
            _print_groups(comparison)
            for setup in plan.setups():
                click.echo(knowledge_line(setup))
            if len({setup.intra_name for setup in plan.setups()}) > 1 and not settings.cross:
                note("batch orders differ, and may make the difference: --cross gives each one to all")
            click.echo(
                f"SLO: {plan.slo.describe()}; seeds: {settings.seeds}; ± half of a 95% interval (Student's t)"
            )
            click.echo("*: the best mean; =: not distinguishable from it, paired by seed")
    if report is not None:
        write_report(report, comparison_report(comparison))


def _print_groups(comparison: Comparison) -> None:
    for group in comparison.groups:
        outcomes = group.cells[0].outcomes
        source, seeds = outcomes[0].source, [outcome.scenario.options.seed for outcome in outcomes]
        if len(seeds) > 1:
            are_in_row = seeds[-1] - seeds[0] + 1 == len(seeds)
            named = f"{seeds[0]} to {seeds[-1]}" if are_in_row else ", ".join(map(str, seeds))
            source = source.replace(f"seed {seeds[0]}", f"seeds {named}")
        planned = len(comparison.plan.seeds)
        click.echo(f"{source}; {len(seeds)} of {planned} seeds" if len(seeds) < planned else source)
        table, left_out = group_table(group, console().width)
        print_figures(table)
        if left_out:
            note(f"no room for {', '.join(left_out)}; -o csv and --report have all")
        click.echo()


def _section_starts(plan: Plan) -> dict[str, list[float]]:
    """Return the section starts of each trace that `--count` shortens, unless the user chose a window."""
    options, seeds = plan.options, len(plan.seeds)
    if options.count is None or options.start_s or options.duration_s is not None or seeds == 1:
        return {}
    traces = [workload for workload in plan.workloads if ":" in workload and "," not in workload]
    whole = WorkloadOptions()
    return {name: section_starts_s(resolve_workload(name, whole), options.count, seeds) for name in traces}


def _distinct(option: str, values: Iterable[object]) -> None:
    seen: set[object] = set()
    for value in values:
        if value in seen:
            raise UsageProblem(f"{option}: {value} is given twice")
        seen.add(value)


def _note_refusals(comparison: Comparison) -> None:
    for group in comparison.groups:
        for cell in group.cells:
            refused = [outcome for outcome in cell.outcomes if outcome.refusal]
            if refused:
                count = sum(outcome.figures.refused for outcome in refused)
                note(f"{cell.policy} on {cell.workload}: {count} refused, the first: {refused[0].refusal}")


def _plain(comparison: Comparison) -> dict[str, JsonValue]:
    plan = comparison.plan
    return {
        "profile": plan.fleet.profile,
        "instances": plan.fleet.instances,
        "seeds": list(plan.seeds),
        "interval": "95%, Student's t over the seeds",
        "slo": {**asdict(plan.slo)},
        "groups": [_plain_group(group) for group in comparison.groups],
    }


def _plain_group(group: Group) -> dict[str, JsonValue]:
    bests = {figure: group.best(figure) for figure in BETTER}
    return {
        "workload": group.workload,
        "source": group.cells[0].outcomes[0].source,
        "rate_per_s": group.rate,
        "best": {name: None if best is None else best.name for name, best in bests.items()},
        "tied": {name: [] if best is None else list(sorted(best.tied)) for name, best in bests.items()},
        "policies": [_plain_cell(cell) for cell in group.cells],
    }


def _plain_cell(cell: Cell) -> dict[str, JsonValue]:
    means: dict[str, int | float] = {}
    for figure in cell.outcomes[0].figures.as_dict():
        means[figure] = cell.estimate(figure).mean
    halves = {figure: cell.estimate(figure).half_width for figure in BETTER}
    return {
        "policy": cell.policy,
        "order": cell.outcomes[0].scenario.setup().intra_name,
        "parameters": dict(cell.outcomes[0].scenario.parameters),
        "mean": plain(means),
        "half_width": plain({name: half for name, half in halves.items() if half is not None}),
        "runs": [plain(outcome.figures.as_dict()) for outcome in cell.outcomes],
        "tail_ttft_s_by_reasoning_tokens": [
            {str(start): tail for start, tail in outcome.tails.items()} for outcome in cell.outcomes
        ],
    }


def _csv(comparison: Comparison) -> str:
    """Format a line per run."""
    rows = [
        {
            "workload": group.workload,
            "asked_rate_per_s": group.rate,
            "policy": cell.policy,
            "parameters": format_parameters(cell.outcomes[0].scenario.parameters),
            "seed": seed,
            **plain(outcome.figures.as_dict()),
        }
        for group in comparison.groups
        for cell in group.cells
        for seed, outcome in zip(comparison.plan.seeds, cell.outcomes, strict=True)
    ]
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


# In the order of display; _DROP_ORDER is the order in which columns are dropped if there is no room.
FIGURES: Final = (
    *("attainment", "goodput_per_s", "ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s", "latency_p99_s"),
    "tokens_per_s",
)
_MIGRATIONS: Final = "migrations"
_DROP_ORDER: Final = ("tpot_p50_s", "latency_p99_s", _MIGRATIONS, "tokens_per_s", "ttft_p50_s", "tpot_p99_s")
# Spaces between columns.
_GAP: Final = 2


@dataclass(frozen=True, slots=True)
class _Column:
    name: str
    heading: str
    cells: list[str]

    @property
    def width(self) -> int:
        lines = [line for text in (self.heading, *self.cells) for line in text.split("\n")]
        return max(len(line) for line in lines)


def group_table(group: Group, width: int) -> tuple[Table, list[str]]:
    """Return a table of at most `width` characters with a row per policy, and the headings that were dropped.

    A mean and its interval are side by side, or one below the other if that is too wide.
    """
    for between in (" ", "\n"):
        columns = _columns(group, between)
        if _fits(columns, width):
            return _table(columns), []
    left_out = []
    for name in _DROP_ORDER:
        dropped = next(column for column in columns if column.name == name)
        columns.remove(dropped)
        left_out.append(dropped.heading.replace("\n", " "))
        if _fits(columns, width):
            break
    return _table(columns), left_out


def _columns(group: Group, between: str) -> list[_Column]:
    columns = [_Column("", "POLICY", [cell.policy for cell in group.cells])]
    for name in FIGURES:
        best = group.best(name)
        means = {cell.policy: cell.estimate(name).mean for cell in group.cells}
        if best is not None and any(means[tied] == means[best.name] for tied in best.tied):
            # None is the best of several that are equal.
            best = Best("", best.tied | {best.name})
        cells = [_text(name, cell, best, between) for cell in group.cells]
        columns.append(_Column(name, _heading(FIGURE_FORMATS[name].heading, between), cells))
    counts = [f"{cell.estimate('migrations').mean:,.0f}" for cell in group.cells]
    columns.append(_Column(_MIGRATIONS, "MIGRATIONS", counts))
    return columns


def _fits(columns: list[_Column], width: int) -> bool:
    return sum(column.width for column in columns) + _GAP * (len(columns) - 1) <= width


def _table(columns: list[_Column]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column.heading, justify="right" if column.name else "left", no_wrap=True)
    for row in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*row)
    return table


def _text(name: str, cell: Cell, best: Best | None, between: str) -> str:
    value = cell.estimate(name)
    mean, half, mark = mean_text(name, value), half_text(name, value), _mark(best, cell)
    if between == " ":
        return f"{mean} {half}".rstrip() + mark
    # The mark next to the mean, the interval below it.
    return f"{mean}{mark}\n{half}{' ' * len(mark)}" if half else mean + mark


def _mark(best: Best | None, cell: Cell) -> str:
    if best is None:
        return "  "
    return " *" if best.name == cell.policy else " =" if cell.policy in best.tied else "  "


def _heading(text: str, between: str) -> str:
    """Split a heading where its cells are split: `TTFT` above `P99 S`."""
    return text if between == " " else text.replace(" ", "\n", 1)
