"""`tailrace replay`: replay a recording with the recorded policy or with another one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tailrace.bounded import open_regular
from tailrace.cli.errors import CliError, UsageProblem, file_errors
from tailrace.cli.output import Output, note, output_option, print_figures, print_json
from tailrace.cli.plain import JsonValue
from tailrace.control.recording import FAILED, InvalidRecordingError, Line, decode, recorded_answer
from tailrace.control.replay import Replay, Replayed, points
from tailrace.control.runner import DecisionPoint
from tailrace.control.shadow import Comparison, Shadow, Verdict
from tailrace.numeric import WholeRange
from tailrace.policy.parameters import ParameterError, read_assignments
from tailrace.policy.registry import UnknownPolicyError, UnusablePolicyError, all_parameters
from tailrace.records import PolicyRecord


class _DifferencePrinter:
    """Print the first `limit` differences."""

    def __init__(self, limit: int) -> None:
        self._left = limit

    def show(self, point: str, request_id: str, then: str, now: str) -> None:
        if self._left > 0:
            self._left -= 1
            about = f" {request_id}" if request_id else ""
            note(f"{point}{about}: {then}\n    now: {now}")


_LARGEST_BYTES = 1 << 40


@click.command(epilog="Example: tailrace replay run.jsonl --policy pascal --set quantum_tokens=250")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--policy", metavar="NAME", help="Policy to call; by default the recorded one.")
@click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="KEY=VALUE",
    help="A parameter of that policy; can be repeated.",
)
@click.option(
    "--show",
    type=WholeRange(min=0),
    default=10,
    show_default=True,
    metavar="N",
    help="Print the first N differences, to stderr.",
)
@output_option()
def replay(file: Path, policy: str | None, assignments: tuple[str, ...], show: int, output: Output) -> None:
    """Feed the recording FILE to the scheduler's cluster model again and compare every decision.

    The recorded policy must make identical decisions; otherwise the exit code is 1. Another policy (--policy)
    shows what it would have done in each state, not what would have followed.
    """
    if policy is None and assignments:
        raise UsageProblem("--set requires --policy")
    record = None if policy is None else _policy(policy, assignments)
    printer = _DifferencePrinter(show)
    unusable = (UnknownPolicyError, UnusablePolicyError, ParameterError)
    with (
        file_errors(InvalidRecordingError, *unusable, path=file),
        open_regular(file, _LARGEST_BYTES) as lines,
    ):
        events = decode(lines)
        run, different = (
            _replay_recorded(events, printer) if record is None else _replay_other(events, record, printer)
        )
    total = sum(different.values())
    if output is Output.JSON:
        print_json(_plain(run, record, different))
    else:
        print_figures(_table(run, record, different))
    if run.ends_early:
        note(f"{file}: the recording ends early: {run.ends_early}")
    if not run.decisions:
        note(f"{file}: no decision was recorded")
    elif not run.decisions[DecisionPoint.PLACE.value]:
        note(f"{file}: no request was placed while it was recorded, so the policy was not asked to place one")
    if record is None and total:
        raise CliError(f"{total} of {run.decisions.total()} decisions differ")


def _policy(name: str, assignments: Sequence[str]) -> PolicyRecord:
    try:
        parameters = read_assignments(assignments)
        values = all_parameters(name, parameters)
    except (ParameterError, UnknownPolicyError, UnusablePolicyError) as error:
        raise UsageProblem(str(error)) from error
    return PolicyRecord(name=name, parameters={key: values[key] for key in parameters})


def _replay_recorded(events: Iterator[Line], printer: _DifferencePrinter) -> tuple[Replay, Counter[str]]:
    """Replay with the recorded policy; return the replay and the differences by decision point."""

    def on_replayed(replayed: Replayed) -> None:
        if not replayed.same:
            recorded, now = _text(replayed.recorded), _text(replayed.replayed)
            printer.show(replayed.point, replayed.request_id, recorded, now)

    run = Replay(events, on_replayed)
    run.run()
    return run, run.different


def _replay_other(
    events: Iterator[Line], record: PolicyRecord, printer: _DifferencePrinter
) -> tuple[Replay, Counter[str]]:
    """Replay with another policy as the shadow of the recorded one; return as `_replay_recorded` does."""
    different: Counter[str] = Counter()

    def on_compared(compared: Comparison) -> None:
        if compared.verdict is not Verdict.SAME:
            point = compared.point.value
            different[point] += 1
            then, now = recorded_answer(compared.decided), recorded_answer(compared.shadow)
            printer.show(point, compared.request_id, _text(then), _text(now))

    run = Replay(events, lambda replayed: None)
    run.watch(Shadow(record, run.control.active.slo, on_compared))
    run.run()
    return run, different


def _text(answer: msgspec.Raw | None) -> str:
    if answer is None:
        return "not called"
    return "failed" if answer == FAILED else bytes(answer).decode()


def _plain(run: Replay, record: PolicyRecord | None, different: Counter[str]) -> dict[str, JsonValue]:
    return {
        "recorded": run.policies,
        "policy": run.policies if record is None else record.name,
        "seconds": run.seconds,
        "ends_early": run.ends_early or None,
        "points": {
            point: {
                "decisions": run.decisions[point],
                "with_actions": run.acting[point],
                "different": different[point],
            }
            for point in points(run.decisions)
        },
    }


def _table(run: Replay, record: PolicyRecord | None, different: Counter[str]) -> RenderableType:
    called = "the recorded policy" if record is None else record.name
    # Not the table's own title, which would be wrapped to the table's width.
    title = Text(f"{run.policies or 'no policy'}, {run.seconds:.1f} s; replayed with: {called}")
    table = Table(box=None)
    table.add_column("decision point")
    for heading in ("decisions", "with actions", "different"):
        table.add_column(heading, justify="right")
    for point in points(run.decisions):
        counts = run.decisions[point], run.acting[point], different[point]
        table.add_row(point, *map(str, counts))
    table.add_row("all", *(str(c.total()) for c in (run.decisions, run.acting, different)))
    return Group(title, table)
