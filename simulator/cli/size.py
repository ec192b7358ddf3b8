"""Implement `tailrace size WORKLOAD`: how many instances of which, under which policy."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import click
from rich.table import Table

from simulator.cli.options import (
    DEFAULT_PROFILE,
    INSTANCES_MAX,
    EngineSettings,
    FleetSettings,
    LoadSettings,
    PolicySettings,
    SloSettings,
    check_policy,
    plain,
    processes_option,
    report_option,
    simulation_errors,
    task_bar,
    write_report,
)
from simulator.figure_text import FIGURE_FORMATS, describe_instances, half_text, knowledge_line, mean_text
from simulator.report.sizes import sizing_report
from simulator.sizing import Kind, Size, SizePlan, Sizing, size_fleets
from tailrace.brief_help import BriefCommand
from tailrace.cli.errors import CliError, UsageProblem
from tailrace.cli.output import Output, note, output_option, print_figures, print_json
from tailrace.cli.plain import JsonValue
from tailrace.numeric import RealRange, WholeRange
from tailrace.service.settings import setting, settings_options

POLICIES: Final = ("tailrace", "least_loaded")
FIGURES: Final = ("attainment", "ttft_p99_s", "tpot_p99_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeSettings:
    """Which fleets are tried, and what they have to keep."""

    policies: tuple[str, ...] = setting(
        POLICIES,
        "NAME[+ORDER] with parameters, as tailrace simulate takes it; can be repeated.",
        "--policy",
        multiple=True,
    )
    profiles: tuple[str, ...] = setting(
        (DEFAULT_PROFILE,),
        "Model and GPU: name of a built-in profile, or a JSON file; can be repeated. NAME:COUNT,NAME: so "
        "many of the first, and as many as needed of the last.",
        "--profile",
        multiple=True,
    )
    attainment: float = setting(
        99.0,
        "Percentage of the requests that must meet the SLO.",
        type=RealRange(min=0.0, max=100.0, min_open=True),
    )
    most: int = setting(256, "Largest number of instances to try.", type=WholeRange(1, INSTANCES_MAX))
    load: LoadSettings
    seeds: int = setting(5, "Number of seeds.", type=WholeRange(1, 1000))
    seed: int = setting(0, "First seed.", type=WholeRange(min=0))
    policy: PolicySettings
    engine: EngineSettings
    slo: SloSettings


@click.command(
    "size",
    cls=BriefCommand,
    epilog="Example: tailrace size jsonl:load.jsonl --profile llama-3.1-8b-h100 --profile llama-3.1-8b-l40s "
    "--slo-ttft 1 --slo-tpot 0.05 --report size.html",
)
@click.argument("workload")
@settings_options(SizeSettings, "settings")
@processes_option
@report_option
@output_option()
def size_command(
    workload: str, settings: SizeSettings, processes: int | None, report: Path | None, output: Output
) -> None:
    """Find the least number of instances with which WORKLOAD meets the SLO.

    WORKLOAD is as for tailrace simulate; tailrace record --arrivals writes one of a live cluster. The number
    found is the least with which, in the mean over the seeds, --attainment of the requests meet the SLO. A
    number is kept or missed if the whole 95% interval (Student's t) is at or above that, or below, else
    unsure. Seed 0 is a trace as it is; the others pair its arrivals and lengths anew.
    """
    policies, profiles = tuple(dict.fromkeys(settings.policies)), tuple(dict.fromkeys(settings.profiles))
    for name in policies:
        check_policy(name, "--policy")
    try:
        kinds = [Kind.of(profile) for profile in profiles]
    except ValueError as error:
        raise UsageProblem(f"--profile: {error}") from error
    fleets = [FleetSettings(kind.profile(1), engine=settings.engine).fleet() for kind in kinds]
    plan = SizePlan(
        policies,
        kinds,
        workload,
        range(settings.seed, settings.seed + settings.seeds),
        settings.load.options(shuffle=True),
        fleets[0],
        settings.slo.slo(),
        settings.attainment / 100.0,
        settings.most,
        settings.engine.predict,
        settings.policy.parameters(policies),
    )
    with simulation_errors(), task_bar("sizing") as progress:
        sizing = size_fleets(plan, processes=processes, progress=progress)
    if output is Output.JSON:
        print_json(_plain(sizing))
    else:
        click.echo(sizing.source)
        print_figures(_table(sizing))
        for line in _recommendations(sizing):
            click.echo(line)
        for policy in policies:
            click.echo(knowledge_line(plan.scenario(policy, kinds[0], 1, settings.seed).setup()))
        click.echo(
            f"SLO: {plan.slo.describe()}, for {settings.attainment:g}%; seeds: {settings.seeds}; ± half of a "
            "95% interval"
        )
    _note_exceptions(sizing)
    if report is not None:
        write_report(report, sizing_report(sizing))
    if all(each.least is None for each in sizing.sizes):
        raise CliError(f"no policy keeps the SLO for {settings.attainment:g}% with --most {settings.most}")


def _recommendations(sizing: Sizing) -> list[str]:
    """Return for each kind of instance the smallest fleet that keeps the SLO, in a line."""
    return [
        f"needed: {describe_instances(kind.fleet(best.least, sizing.plan.fleet))}, under {best.policy}"
        for kind in sizing.plan.kinds
        if (best := sizing.best(kind)) is not None and best.least is not None
    ]


def _table(sizing: Sizing) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("POLICY")
    table.add_column("PROFILE")
    for heading in ("INSTANCES", *(FIGURE_FORMATS[name].heading for name in FIGURES)):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("SLO")
    for each in sizing.sizes:
        for count in each.shown:
            cell = each.cells[count]
            values = [(name, cell.estimate(name)) for name in FIGURES]
            figures = [f"{mean_text(*value)} {half_text(*value)}".rstrip() for value in values]
            verdict = sizing.plan.verdict(cell).value
            table.add_row(each.policy, str(each.kind), str(count), *figures, verdict)
    return table


def _note_exceptions(sizing: Sizing) -> None:
    for each in sizing.sizes:
        cell = each.cells[each.shown[0]]
        refused = [outcome for outcome in cell.outcomes if outcome.refusal]
        if refused:
            count = sum(outcome.figures.refused for outcome in refused)
            note(f"{each.policy} with {each.kind}: {count} refused, the first: {refused[0].refusal}")
        if each.least is None:
            fleet = describe_instances(each.kind.fleet(max(each.cells), sizing.plan.fleet))
            reached = mean_text("attainment", cell.estimate("attainment"))
            note(f"{fleet} under {each.policy} are too few: {reached}% of the requests meet the SLO")
    for each in sizing.uneven():
        note(f"{each.policy} with {each.kind}: fewer instances can be better; see the table")


def _plain(sizing: Sizing) -> dict[str, JsonValue]:
    plan = sizing.plan
    return {
        "workload": plan.workload,
        "source": sizing.source,
        "seeds": list(plan.seeds),
        "interval": "95%, Student's t over the seeds",
        "slo": {**asdict(plan.slo)},
        "attainment": plan.attainment,
        "recommended": [
            {"profile": str(kind), "policy": best.policy, "instances": best.least}
            for kind in plan.kinds
            if (best := sizing.best(kind)) is not None
        ],
        "sizes": [_plain_size(plan, each) for each in sizing.sizes],
    }


def _plain_size(plan: SizePlan, each: Size) -> dict[str, JsonValue]:
    counts: list[JsonValue] = []
    for count, cell in each.cells.items():
        values = {name: cell.estimate(name) for name in cell.outcomes[0].figures.as_dict()}
        halves = {name: value.half_width for name, value in values.items() if name in FIGURES}
        counts.append(
            {
                "instances": count,
                "slo": plan.verdict(cell).value,
                "mean": plain({name: value.mean for name, value in values.items()}),
                "half_width": plain({name: half for name, half in halves.items() if half is not None}),
            }
        )
    return {
        "policy": each.policy,
        "parameters": dict(plan.parameters.get(each.policy, ())),
        "profile": str(each.kind),
        "instances": each.least,
        "counts": counts,
    }
