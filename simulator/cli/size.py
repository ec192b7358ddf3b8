"""Implement `tailrace size WORKLOAD`: how many instances of which, under which policy."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Final

import click
from rich.table import Table

from simulator.cli.options import (
    DEFAULT_PROFILE,
    INSTANCES_MAX,
    check_policy,
    engine_options,
    fleet_of,
    moves_option,
    parameters_of,
    plain,
    processes_option,
    rate_option,
    report_option,
    set_option,
    simulation_errors,
    slo_of,
    slo_options,
    task_bar,
    workload_options,
    write_report,
)
from simulator.figure_text import FIGURE_FORMATS, describe_instances, half_text, knowledge_line, mean_text
from simulator.report.sizes import sizing_report
from simulator.sizing import Kind, Size, SizePlan, Sizing, size_fleets
from simulator.workloads.resolve import WorkloadOptions
from tailrace.brief_help import BriefCommand
from tailrace.cli.errors import CliError, UsageProblem
from tailrace.cli.output import Output, note, output_option, print_figures, print_json
from tailrace.cli.plain import JsonValue
from tailrace.numeric import RealRange, WholeRange

POLICIES: Final = ("tailrace", "least_loaded")
FIGURES: Final = ("attainment", "ttft_p99_s", "tpot_p99_s")


@click.command(
    "size",
    cls=BriefCommand,
    epilog="Example: tailrace size jsonl:load.jsonl --profile llama-3.1-8b-h100 --profile llama-3.1-8b-l40s "
    "--slo-ttft 1 --slo-tpot 0.05 --report size.html",
)
@click.argument("workload")
@click.option(
    "--policy",
    "policies",
    multiple=True,
    default=POLICIES,
    show_default=True,
    help="NAME[+ORDER] with parameters, as tailrace simulate takes it; can be repeated.",
)
@click.option(
    "--profile",
    "profiles",
    multiple=True,
    default=(DEFAULT_PROFILE,),
    show_default=True,
    help="Model and GPU: name of a built-in profile, or a JSON file; can be repeated. NAME:COUNT,NAME: so "
    "many of the first, and as many as needed of the last.",
)
@click.option(
    "--attainment",
    type=RealRange(min=0.0, max=100.0, min_open=True),
    default=99.0,
    show_default=True,
    help="Percentage of the requests that must meet the SLO.",
)
@click.option(
    "--most",
    type=WholeRange(1, INSTANCES_MAX),
    default=256,
    show_default=True,
    help="Largest number of instances to try.",
)
@rate_option
@workload_options
@click.option("--seeds", type=WholeRange(1, 1000), default=5, show_default=True, help="Number of seeds.")
@click.option("--seed", type=WholeRange(min=0), default=0, show_default=True, help="First seed.")
@moves_option
@engine_options
@set_option
@slo_options
@processes_option
@report_option
@output_option()
def size_command(
    workload: str,
    policies: tuple[str, ...],
    profiles: tuple[str, ...],
    attainment: float,
    most: int,
    rate: float | None,
    speed: float | None,
    count: int | None,
    start: float,
    duration: float | None,
    max_model_len: int | None,
    seeds: int,
    seed: int,
    moves: str,
    length_penalty: str,
    prefix_caching: bool,
    host_kv_gib: float,
    host_caching: bool,
    predict: str | None,
    assignments: tuple[str, ...],
    slo_ttft: float,
    slo_tpot: float,
    slo_qoe: float,
    slo_pace: float,
    slo_admit: float,
    processes: int | None,
    report: Path | None,
    output: Output,
) -> None:
    """Find the least number of instances with which WORKLOAD meets the SLO.

    WORKLOAD is as for tailrace simulate; tailrace record --arrivals writes one of a live cluster. The number
    found is the least with which, in the mean over the seeds, --attainment of the requests meet the SLO. A
    number is kept or missed if the whole 95% interval (Student's t) is at or above that, or below, else
    unsure. Seed 0 is a trace as it is; the others pair its arrivals and lengths anew.
    """
    policies, profiles = tuple(dict.fromkeys(policies)), tuple(dict.fromkeys(profiles))
    for name in policies:
        check_policy(name, "--policy")
    try:
        kinds = [Kind.of(profile) for profile in profiles]
    except ValueError as error:
        raise UsageProblem(f"--profile: {error}") from error
    fleets = [
        fleet_of(kind.profile(1), None, length_penalty, None, prefix_caching, host_kv_gib, host_caching)
        for kind in kinds
    ]
    plan = SizePlan(
        policies,
        kinds,
        workload,
        range(seed, seed + seeds),
        WorkloadOptions(
            rate_per_s=rate,
            speed=speed,
            count=count,
            start_s=start,
            duration_s=duration,
            max_model_len=max_model_len,
            shuffle=True,
        ),
        fleets[0],
        slo_of(slo_ttft, slo_tpot, slo_qoe, slo_pace, slo_admit),
        attainment / 100.0,
        most,
        predict,
        parameters_of(assignments, policies, moves),
    )
    with simulation_errors(), task_bar("sizing") as progress:
        sizing = size_fleets(plan, processes=processes, progress=progress)
    if report is not None:
        write_report(report, sizing_report(sizing))
    if output is Output.JSON:
        print_json(_plain(sizing))
    else:
        click.echo(sizing.source)
        print_figures(_table(sizing))
        for line in _recommendations(sizing):
            click.echo(line)
        for policy in policies:
            click.echo(knowledge_line(plan.scenario(policy, kinds[0], 1, seed).setup()))
        click.echo(
            f"SLO: {plan.slo.describe()}, for {attainment:g}%; seeds: {seeds}; ± half of a 95% interval"
        )
    _note_exceptions(sizing)
    if all(each.least is None for each in sizing.sizes):
        raise CliError(f"no policy keeps the SLO for {attainment:g}% with --most {most}")


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
