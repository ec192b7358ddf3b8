"""Implement `tailrace claims`: the papers' numbers next to ours."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import click
from rich.table import Table

from simulator.claims.base import QUICK, WHOLE, Claim, Figures, Verdict
from simulator.claims.catalogue import CheckedClaim, UnknownClaimError, check, claims_of, experiments, select
from simulator.cli.options import report_option, simulation_errors, task_bar, write_report
from simulator.report.claims import claims_report
from tailrace.cli.errors import CliError, UsageProblem
from tailrace.cli.output import Output, note, output_option, print_figures, print_json
from tailrace.cli.plain import JsonValue

_STYLES = {
    Verdict.HOLDS: "green",
    Verdict.DIRECTION: "yellow",
    Verdict.DOES_NOT_HOLD: "red",
    Verdict.NOT_REPRODUCIBLE: "dim",
}


@click.command("claims", epilog="Example: tailrace claims pascal R5 R7")
@click.argument("wanted", metavar="[ID|PAPER]...", nargs=-1)
@click.option("--list", "listed", is_flag=True, help="Only list the claims.")
@click.option(
    "--quick",
    is_flag=True,
    help="Fewer seeds and requests: minutes instead of half an hour, wider intervals.",
)
@click.option(
    "--processes", type=click.IntRange(min=1), help="Number of parallel processes. [default: one per core]"
)
@click.option(
    "--traces",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    envvar="TAILRACE_TRACES",
    help="Folder with the public traces that Arrow's rows need: azure_llm_2023/*.csv, mooncake/*.jsonl. "
    "[env: TAILRACE_TRACES]",
)
@click.option(
    "--save", type=click.Path(dir_okay=False, path_type=Path), help="Also write the JSON to this file."
)
@report_option
@output_option()
def claims_command(
    wanted: tuple[str, ...],
    listed: bool,
    quick: bool,
    processes: int | None,
    traces: Path | None,
    save: Path | None,
    report: Path | None,
    output: Output,
) -> None:
    """Reproduce claims of the four papers in the simulator: the paper's number, ours, and the reason.

    Holds: same direction, within a third of the paper's effect. Direction only: a different size. After ±:
    half of the 95% interval over seeds.
    """
    effort = QUICK if quick else WHOLE
    everything = experiments(traces, effort)
    try:
        needed, ids = select(everything, wanted)
    except UnknownClaimError as error:
        raise UsageProblem(str(error)) from error
    if listed:
        _list([claim for claim in claims_of(needed) if claim.claim_id in ids], output)
        return
    if save is not None and not save.parent.is_dir():
        raise UsageProblem(f"--save: there is no folder {save.parent}")
    began = time.monotonic()
    with simulation_errors(), task_bar("checking") as progress:
        checked = [
            checked_claim
            for checked_claim in check(needed, processes=processes, progress=progress)
            if checked_claim.claim.claim_id in ids
        ]
    result: dict[str, JsonValue] = {
        "claims": [_plain(checked_claim) for checked_claim in checked],
        "verdicts": dict(_count(checked)),
        "effort": effort.name,
        "seconds": round(time.monotonic() - began, 1),
    }
    if save is not None:
        _save(save, result)
    if report is not None:
        write_report(report, claims_report(checked))
    if output is Output.JSON:
        print_json(result)
        return
    print_figures(_table(checked))
    click.echo(", ".join(f"{count} {verdict}" for verdict, count in _count(checked).items()))


def _list(claims: Sequence[Claim], output: Output) -> None:
    if output is Output.JSON:
        print_json({"claims": [_plain_claim(claim) for claim in claims]})
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("ID", "PAPER", "WHERE", "NUMBER", "CLAIM"):
        table.add_column(heading)
    for claim in claims:
        table.add_row(claim.claim_id, claim.paper, claim.where, claim.number, claim.statement)
    print_figures(table)


def _table(checked: Sequence[CheckedClaim]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("ID", "CLAIM", "PAPER'S", "OURS", "VERDICT", "WHY"):
        table.add_column(heading)
    for checked_claim in checked:
        verdict = checked_claim.finding.verdict
        cell = f"[{_STYLES[verdict]}]{verdict.value}[/]"
        table.add_row(
            checked_claim.claim.claim_id,
            checked_claim.claim.statement,
            checked_claim.claim.number,
            checked_claim.finding.ours,
            cell,
            checked_claim.finding.why,
        )
    return table


def _count(checked: Sequence[CheckedClaim]) -> dict[str, int]:
    counts = Counter(checked_claim.finding.verdict for checked_claim in checked)
    return {verdict.value: counts[verdict] for verdict in Verdict if counts[verdict]}


def _plain(checked_claim: CheckedClaim) -> dict[str, JsonValue]:
    finding = checked_claim.finding
    return {
        **_plain_claim(checked_claim.claim),
        "ours": finding.ours,
        "verdict": finding.verdict.value,
        "why": finding.why,
        "figures": _plain_figures(finding.figures),
        "spreads": dict(finding.spreads),
    }


def _plain_claim(claim: Claim) -> dict[str, JsonValue]:
    return {
        "id": claim.claim_id,
        "paper": claim.paper,
        "where": claim.where,
        "claim": claim.statement,
        "number": claim.number,
    }


def _plain_figures(figures: Figures) -> dict[str, JsonValue]:
    return {
        name: float(value) if isinstance(value, int | float) else [float(element) for element in value]
        for name, value in figures.items()
    }


def _save(path: Path, result: dict[str, JsonValue]) -> None:
    try:
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise CliError(f"--save: {path}: {error.strerror}") from error
    note(f"saved: {path}")
