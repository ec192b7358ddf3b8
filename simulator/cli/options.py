"""What the simulator's commands share: options, progress bars, figures as JSON, and writing a report."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import click
from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from simulator.parallel import Progress, TaskError
from simulator.scenario import HOST_KV_GIB, INSTANCES, Fleet, kinds_of
from simulator.setups import PREDICTIONS, UnknownSetupError, setup_for
from simulator.simulation import SimulationError
from simulator.workloads.base import WorkloadError
from simulator.workloads.resolve import COUNT_MAX
from tailrace.brief_help import Rare
from tailrace.cli.errors import CliError, UsageProblem
from tailrace.cli.output import note
from tailrace.cli.plain import JsonValue
from tailrace.numeric import RealRange, WholeRange
from tailrace.perf.length_penalty import LengthPenaltyError, load_length_penalty
from tailrace.policy.parameters import ParameterError, Value, read_assignments
from tailrace.policy.registry import MOVES, parts_of
from tailrace.profiles import ProfileError, load_profile
from tailrace.slo import Slo, SloError

F = TypeVar("F", bound=Callable[..., Any])

DEFAULT_PROFILE: Final = "llama-3.1-8b-h100"
_POSITIVE: Final = RealRange(min=0.0, min_open=True)
INSTANCES_MAX: Final = 20_000


def fleet_options(function: F) -> F:
    """Add --profile, --instances and --prefill-instances, and what `engine_options` adds."""
    for option in reversed(
        (
            click.option(
                "--profile",
                default=DEFAULT_PROFILE,
                show_default=True,
                help="Model and GPU: name of a built-in profile, or a JSON file; NAME:COUNT,NAME:COUNT for "
                "a fleet of unequal instances.",
            ),
            click.option(
                "--instances",
                type=WholeRange(1, INSTANCES_MAX),
                help=f"How many. [default: {INSTANCES}, or as many as --profile has]",
            ),
            click.option(
                "--prefill-instances",
                cls=Rare,
                type=WholeRange(min=1),
                help="For policies with pools: initial number of prefill instances. [default: the "
                "policy's share]",
            ),
            engine_options,
        )
    ):
        function = option(function)
    return function


def engine_options(function: F) -> F:
    """Add --length-penalty, --prefix-caching, --host-kv, --host-caching and --predict."""
    for option in reversed(
        (
            click.option(
                "--length-penalty",
                cls=Rare,
                default="none",
                show_default=True,
                help="Cost of unequal lengths in a batch: name or JSON file.",
            ),
            click.option(
                "--prefix-caching",
                is_flag=True,
                help="Give instances a prefix cache, for workloads whose prompts share prefixes.",
            ),
            click.option(
                "--host-kv",
                "host_kv_gib",
                cls=Rare,
                type=RealRange(0.0, 1e6),
                default=HOST_KV_GIB,
                show_default=True,
                help="Host memory per instance for KV, in GiB; preempted requests take precedence. 0: they "
                "are recomputed.",
            ),
            click.option(
                "--host-caching",
                cls=Rare,
                is_flag=True,
                help="With --prefix-caching: keep evicted blocks in host memory, and load them back.",
            ),
            click.option(
                "--predict",
                cls=Rare,
                type=click.Choice(PREDICTIONS),
                help="Workers' predictions of output lengths. [default: what the policy needs]",
            ),
        )
    ):
        function = option(function)
    return function


def workload_options(function: F) -> F:
    """Add --speed, --count, --start, --duration and --max-model-len."""
    for option in reversed(
        (
            click.option("--speed", cls=Rare, type=_POSITIVE, help="Factor by which a trace is sped up."),
            click.option(
                "--count", type=WholeRange(1, COUNT_MAX), help="Requests. [default: all; generated: 1000]"
            ),
            click.option(
                "--start", cls=Rare, type=RealRange(min=0.0), default=0.0, help="Seconds of a trace to skip."
            ),
            click.option("--duration", cls=Rare, type=_POSITIVE, help="Seconds of the workload's own time."),
            click.option(
                "--max-model-len",
                cls=Rare,
                type=WholeRange(min=2),
                help="Truncate prompts so that prompt and output fit into this many tokens.",
            ),
        )
    ):
        function = option(function)
    return function


def slo_options(function: F) -> F:
    """Add --slo-ttft, --slo-tpot, --slo-qoe, --slo-pace and --slo-admit; 0 sets no objective."""
    non_negative = RealRange(min=0.0)
    for option in reversed(
        (
            click.option(
                "--slo-ttft",
                type=non_negative,
                default=2.0,
                show_default=True,
                help="Seconds to the first answering token; a request that reasons gets --slo-tpot more "
                "for each reasoning token. 0: no objective.",
            ),
            click.option(
                "--slo-tpot",
                type=non_negative,
                default=0.15,
                show_default=True,
                help="Mean seconds between answering tokens. 0: no objective.",
            ),
            click.option(
                "--slo-qoe",
                cls=Rare,
                type=RealRange(min=0.0, max=1.0),
                default=0.0,
                help="Minimum QoE of an answer; PASCAL uses 0.95. [default: no objective]",
            ),
            click.option(
                "--slo-pace",
                cls=Rare,
                type=non_negative,
                default=0.0,
                help="Seconds per token at which users read, for QoE. [default: 0.1, or --slo-tpot if less]",
            ),
            click.option(
                "--slo-admit",
                cls=Rare,
                type=non_negative,
                default=0.0,
                help="Refuse a request whose predicted TTFT exceeds this multiple of --slo-ttft. "
                "[default: never]",
            ),
        )
    ):
        function = option(function)
    return function


def slo_of(ttft_s: float, tpot_s: float, qoe: float, pace_s: float, admit: float) -> Slo:
    """Make the SLO from options, where 0 sets no objective. Raise UsageProblem."""
    try:
        return Slo(ttft_s or None, tpot_s or None, qoe or None, pace_s or None, admit or None)
    except SloError as error:
        raise UsageProblem(f"--slo-{error}") from error


def fleet_of(
    profile: str,
    instances: int | None,
    penalty: str,
    prefill_instances: int | None,
    prefix_caching: bool,
    host_kv_gib: float,
    host_caching: bool,
) -> Fleet:
    """Make the fleet from options. Raise UsageProblem that names the option."""
    try:
        counts = kinds_of(profile, instances)
        kinds = [load_profile(name) for name, _ in counts]
    except (ProfileError, ValueError) as error:
        raise UsageProblem(f"--profile: {error}") from error
    if len({kind.kv_bytes_per_token for kind in kinds}) > 1:
        raise UsageProblem(f"--profile: {profile}: KV of different sizes per token, so of different models")
    instances = sum(count for _, count in counts)
    if instances > INSTANCES_MAX:
        raise UsageProblem(f"--profile: {instances} instances; at most {INSTANCES_MAX} are possible")
    try:
        load_length_penalty(penalty)
    except LengthPenaltyError as error:
        raise UsageProblem(f"--length-penalty: {error}") from error
    if prefill_instances is not None and prefill_instances >= instances:
        raise UsageProblem(
            f"--prefill-instances: {prefill_instances} of {instances} leaves no instance to decode"
        )
    if host_caching and not prefix_caching:
        raise UsageProblem("--host-caching requires --prefix-caching")
    return Fleet(profile, instances, penalty, prefill_instances, prefix_caching, host_kv_gib, host_caching)


def check_policy(name: str, option: str) -> None:
    """Raise UsageProblem with the known names if there is no such policy.

    A `module:Class` may be in the working directory, which is searched after everything that is installed;
    worker processes search it too.
    """
    folder = str(Path.cwd())
    if ":" in name and folder not in sys.path:
        sys.path.append(folder)
    try:
        setup_for(name)
    except (ParameterError, UnknownSetupError) as error:
        raise UsageProblem(f"{option}: {error}") from error


@contextmanager
def simulation_errors() -> Iterator[None]:
    """Convert a workload's errors to usage errors and a run's errors to failures, each with a one-line
    message."""
    try:
        yield
    except WorkloadError as error:
        raise UsageProblem(f"workload: {error}") from error
    except (SimulationError, TaskError) as error:
        raise CliError(str(error)) from error


set_option = click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="[POLICY:]KEY=VALUE",
    help="A parameter of the policy, or of all that have it; can be repeated.",
)


moves_option = click.option(
    "--moves",
    type=click.Choice(("on", "off")),
    default="on",
    show_default=True,
    help="off: no policy moves a request once it is placed, which is moves=false of each.",
)


rate_option = click.option("--rate", type=_POSITIVE, help="Mean requests per second.")


processes_option = click.option(
    "--processes", type=WholeRange(1, 1024), help="Number of parallel processes. [default: one per core]"
)


def crossed(policies: Sequence[str]) -> tuple[str, ...]:
    """Return each of these policies with each of the batch orders that they have. Raise UsageProblem."""
    try:
        orders = dict.fromkeys(setup_for(policy).intra_name for policy in policies)
    except (ParameterError, UnknownSetupError) as error:
        raise UsageProblem(f"POLICY: {error}") from error
    named = [(name, assignments) for name, _, assignments in map(parts_of, policies)]
    all_crossed = (
        " ".join((f"{name}+{order}", *assignments)) for name, assignments in named for order in orders
    )
    return tuple(dict.fromkeys(all_crossed))


def parameters_of(
    assignments: Iterable[str], policies: Sequence[str], moves: str = "on"
) -> dict[str, tuple[tuple[str, Value], ...]]:
    """Return the parameters of each policy, checked. Raise UsageProblem."""
    try:
        assigned = _assign(read_assignments(assignments), policies)
        for policy in policies:
            if moves == "off" and any(p.name == MOVES.name for p in setup_for(policy).parameters()):
                assigned[policy][MOVES.name] = False
        setups = {policy: setup_for(policy).with_parameters(assigned[policy]) for policy in policies}
    except (ParameterError, UnknownSetupError) as error:
        raise UsageProblem(f"--set: {error}") from error
    return {policy: tuple(setup.assigned.items()) for policy, setup in setups.items()}


def _assign(assigned: dict[str, str], policies: Sequence[str]) -> dict[str, dict[str, Value]]:
    """Assign options to policies. Raise ParameterError or UnknownSetupError."""
    by_policy: dict[str, dict[str, Value]] = {policy: {} for policy in policies}
    known = {policy: {p.name for p in setup_for(policy).parameters()} for policy in policies}
    # Options for one policy override options for all.
    for key, value in sorted(assigned.items(), key=lambda entry: ":" in entry[0]):
        policy, colon, name = key.rpartition(":")
        if colon and policy not in by_policy:
            raise ParameterError(f"{key}: {policy!r} is not one of {', '.join(policies)}")
        targets = [policy] if colon else [p for p in policies if name in known[p]] or list(policies)
        for target in targets:
            by_policy[target][name] = value
    return by_policy


@contextmanager
def share_bar(label: str) -> Iterator[Callable[[float], None]]:
    """Show a progress bar that is updated with the share done, from 0 to 1."""
    with _bars() as bars:
        bar = bars.add_task(label, total=1.0)
        yield lambda share: bars.update(bar, completed=share)


@contextmanager
def task_bar(label: str) -> Iterator[Callable[[Progress], None]]:
    """Show a progress bar of tasks, with the name of the task that ended last; without a terminal, a line for
    each tenth."""
    tenths = 0
    with _bars() as bars:
        bar = bars.add_task(label, total=1.0)

        def advance(progress: Progress) -> None:
            status = f"{label} {progress.done}/{progress.total} {progress.name}"
            bars.update(bar, completed=progress.share, description=status)
            nonlocal tenths
            if bars.disable and int(10 * progress.share) > tenths:
                tenths = int(10 * progress.share)
                note(status)

        yield advance


def _bars() -> Bars:
    console = Console(stderr=True)
    columns = (BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    return Bars(*columns, console=console, transient=True, disable=not console.is_terminal)


def report_option(function: F) -> F:
    """Add --report, whose directory must exist before anything is simulated."""

    def checked(_context: click.Context, _parameter: click.Parameter, value: Path | None) -> Path | None:
        if value is not None and not value.parent.is_dir():
            raise click.BadParameter(f"there is no folder {value.parent}")
        return value

    return click.option(
        "--report",
        type=click.Path(dir_okay=False, path_type=Path),
        callback=checked,
        help="Write a report with plots, as one HTML file.",
    )(function)


def write_report(path: Path, html: str) -> None:
    """Write the page and print its path. Raise CliError."""
    try:
        path.write_text(html, encoding="utf-8")
    except OSError as error:
        raise CliError(f"--report: {path}: {error.strerror}") from error
    note(f"report: {path}")


def plain(figures: Mapping[str, int | float]) -> dict[str, JsonValue]:
    """Convert figures to JSON, which has no NaN: it becomes null."""
    return {name: value if math.isfinite(value) else None for name, value in figures.items()}
