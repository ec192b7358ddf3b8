"""`tailrace simulate POLICY WORKLOAD`: one run."""

from __future__ import annotations

import csv
import io
from dataclasses import asdict, dataclass
from pathlib import Path

import click
from rich.table import Table

from simulator.cli.options import (
    FleetSettings,
    LoadSettings,
    PolicySettings,
    SloSettings,
    check_policy,
    plain,
    report_option,
    share_bar,
    simulation_errors,
    write_report,
)
from simulator.figure_text import format_parameters, knowledge_line, summary_rows
from simulator.report.run import run_report
from simulator.scenario import Scenario, ScenarioResult, run_scenario
from tailrace.brief_help import BriefCommand
from tailrace.cli.output import Output, note, output_option, print_figures, print_json
from tailrace.cli.plain import JsonValue
from tailrace.numeric import WholeRange
from tailrace.service.settings import setting, settings_options


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateSettings:
    """What is simulated, besides the policy and the workload."""

    load: LoadSettings
    seed: int = setting(0, "Random seed.", type=WholeRange(min=0))
    policy: PolicySettings
    fleet: FleetSettings
    slo: SloSettings


@click.command(
    "simulate",
    cls=BriefCommand,
    epilog="Example: tailrace simulate pascal r1 --rate 10 --profile r1-distill-qwen-32b-h100 "
    "--report run.html",
)
@click.argument("policy")
@click.argument("workload")
@settings_options(SimulateSettings, "settings")
@report_option
@output_option(Output.TABLE, Output.CSV)
def simulate_command(
    policy: str, workload: str, settings: SimulateSettings, report: Path | None, output: Output
) -> None:
    """Run POLICY on WORKLOAD in the simulator.

    POLICY is NAME[+ORDER] with parameters after it, in quotes: pascal, least_loaded+earliest_due,
    "cascade layout=chain". NAME is a policy (docs/policy-parameters.md), or your own module:Class; ORDER is
    a batch order, instead of the one that belongs to the policy. WORKLOAD is a generator (r1, sharegpt, mix,
    ...), azure:FILE, mooncake:FILE, burstgpt:FILE or jsonl:FILE, or several of them, separated by commas.
    """
    check_policy(policy, "POLICY")
    scenario = Scenario(
        policy,
        workload,
        settings.load.options(seed=settings.seed),
        settings.fleet.fleet(),
        settings.slo.slo(),
        settings.fleet.engine.predict,
        settings.policy.parameters([policy])[policy],
    )
    with simulation_errors(), share_bar(f"{policy} on {workload}") as progress:
        outcome = run_scenario(scenario, progress)
    if outcome.refusal:
        note(f"{outcome.figures.refused} requests were refused, the first: {outcome.refusal}")
    match output:
        case Output.JSON:
            print_json(_plain(outcome))
        case Output.CSV:
            click.echo(_csv(outcome), nl=False)
        case _:
            click.echo(f"{_describe(scenario)} on {outcome.source}")
            print_figures(_table(outcome))
            click.echo(knowledge_line(scenario.setup()))
            click.echo(f"SLO: {scenario.slo.describe()}")
    if report is not None:
        write_report(report, run_report(outcome))


def _describe(scenario: Scenario) -> str:
    parameters = format_parameters(scenario.parameters)
    return f"{scenario.policy} ({parameters})" if parameters else scenario.policy


def _table(outcome: ScenarioResult) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in summary_rows(outcome.figures):
        table.add_row(name, value)
    return table


def _plain(outcome: ScenarioResult) -> dict[str, JsonValue]:
    scenario = outcome.scenario
    return {
        "policy": scenario.policy,
        "workload": scenario.workload,
        "source": outcome.source,
        "seed": scenario.options.seed,
        "profile": scenario.fleet.profile,
        "instances": scenario.fleet.instances,
        "parameters": dict(scenario.parameters),
        "slo": {**asdict(scenario.slo)},
        "figures": plain(outcome.figures.as_dict()),
        "tail_ttft_s_by_reasoning_tokens": {str(start): tail for start, tail in outcome.tails.items()},
    }


def _csv(outcome: ScenarioResult) -> str:
    text = io.StringIO()
    figures = plain(outcome.figures.as_dict())
    parameters = format_parameters(outcome.scenario.parameters)
    columns = {
        "policy": outcome.scenario.policy,
        "parameters": parameters,
        "workload": outcome.scenario.workload,
        **figures,
    }
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerow(columns)
    return text.getvalue()
