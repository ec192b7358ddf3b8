"""Implement `tailrace claims`: the papers' numbers next to ours."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import click
from rich.table import Table

from experiments.claims.base import QUICK, WHOLE, Claim, Experiment, Figures, Run, Verdict, plain_figures
from experiments.claims.catalogue import (
    CheckedClaim,
    UnknownClaimError,
    check,
    claims_of,
    experiments,
    runs_of,
    select,
)
from experiments.claims.kept import KeptFigures, code_version, default_file
from experiments.claims.report import claims_report
from simulator.cli.options import report_option, simulation_errors, task_bar, write_report
from tailrace.cli.errors import CliError, UsageProblem
from tailrace.cli.output import Output, note, output_option, print_figures, print_json
from tailrace.cli.plain import JsonValue
from tailrace.numeric import WholeRange

_STYLES = {
    Verdict.HOLDS: "green",
    Verdict.EXCEEDS: "green",
    Verdict.DIRECTION: "yellow",
    Verdict.DOES_NOT_HOLD: "red",
    Verdict.INPUT: "dim",
    Verdict.NEEDS_GPU: "dim",
    Verdict.NOT_REPRODUCIBLE: "dim",
    Verdict.NOT_JUDGED: "red",
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
    "--processes", type=WholeRange(1, 1024), help="Number of parallel processes. [default: one per core]"
)
@click.option(
    "--traces",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    envvar="TAILRACE_TRACES",
    help="Folder with the public traces that Arrow's rows need: azure_llm_2023/*.csv, mooncake/*.jsonl. "
    "[env: TAILRACE_TRACES]",
)
@click.option(
    "--fresh",
    is_flag=True,
    help="Compute everything again.",
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
    fresh: bool,
    save: Path | None,
    report: Path | None,
    output: Output,
) -> None:
    """Reproduce claims of the four papers in the simulator: the paper's number, ours, and the reason.

    Holds: same direction, within a third of the paper's effect. Exceeds: more than that. Direction only:
    less, or an ordering that holds in most cases. Input: the row's own number went into the set-up; a row
    marked "from the paper" has another of the paper's results in it. After ±: half of the 95% interval over
    seeds.

    Finished runs are kept (~/.cache/tailrace/claims.jsonl) until code or traces change; the next call goes on
    from there. Exit code 1: a row could not be judged.
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
        with _keeping(needed, traces, fresh) as (known, keep):
            everything_checked = check(
                needed, processes=processes, progress=progress, known=known, measured=keep
            )
        checked = [one for one in everything_checked if one.claim.claim_id in ids]
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
    else:
        print_figures(_table(checked))
        click.echo(", ".join(f"{count} {verdict}" for verdict, count in _count(checked).items()))
        good = [one for one in checked if one.finding.verdict in (Verdict.HOLDS, Verdict.EXCEEDS)]
        free = sum(not one.claim.inputs for one in good)
        if good:
            words = "has no result of its paper" if free == 1 else "have no result of their paper"
            click.echo(f"of the {len(good)} that hold or exceed, {free} {words} in the set-up")
    if not_judged := [one.claim.claim_id for one in checked if one.finding.verdict is Verdict.NOT_JUDGED]:
        raise CliError(f"could not be judged: {', '.join(not_judged)}")


@contextmanager
def _keeping(
    needed: Sequence[Experiment], traces: Path | None, fresh: bool
) -> Iterator[tuple[dict[str, Figures], Callable[[Run, Figures], None]]]:
    """Yield the figures that an earlier call kept, and what keeps those of a run; a file that cannot be
    written costs no more than the keeping."""
    runs = runs_of(needed)
    path = default_file()
    try:
        kept = KeptFigures(path, code_version(), traces, fresh=fresh)
    except OSError as error:
        note(f"figures are not kept: {path}: {error.strerror}")
        yield {}, lambda _run, _figures: None
        return
    with closing(kept):
        known = {name: figures for name, run in runs.items() if (figures := kept.get(run)) is not None}
        if kept.dropped:
            note(f"kept figures of another version of the code are not used: {path}")
        if known:
            note(
                f"{len(known)} of {len(runs)} runs are kept from an earlier call: {path} "
                "(--fresh: compute them again)"
            )
        made = 0
        writable = True

        def keep(run: Run, figures: Figures) -> None:
            nonlocal made, writable
            if not writable:
                return
            try:
                kept.add(run, figures)
                made += 1
            except OSError as error:
                writable = False
                note(f"figures are no longer kept: {path}: {error.strerror}")

        try:
            yield known, keep
        except BaseException:
            note(f"{len(known) + made} of {len(runs)} runs are kept; the same command goes on from there")
            raise


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
        verdict, inputs = checked_claim.finding.verdict, checked_claim.claim.inputs
        cell = f"[{_STYLES[verdict]}]{verdict.value}[/]"
        why = checked_claim.finding.why
        table.add_row(
            checked_claim.claim.claim_id,
            checked_claim.claim.statement,
            checked_claim.claim.number,
            checked_claim.finding.ours,
            cell,
            f"from the paper: {inputs}; {why}" if inputs else why,
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
        "figures": {
            name: value if isinstance(value, float) else [*value]
            for name, value in plain_figures(finding.figures).items()
        },
        "spreads": dict(finding.spreads),
    }


def _plain_claim(claim: Claim) -> dict[str, JsonValue]:
    return {
        "id": claim.claim_id,
        "paper": claim.paper,
        "where": claim.where,
        "claim": claim.statement,
        "number": claim.number,
        "inputs": claim.inputs,
    }


def _save(path: Path, result: dict[str, JsonValue]) -> None:
    try:
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise CliError(f"--save: {path}: {error.strerror}") from error
    note(f"saved: {path}")
