"""What the simulator's commands share: settings, progress bars, figures as JSON, and writing a report."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar

import click
from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from simulator.parallel import TaskError, TaskProgress
from simulator.scenario import HOST_KV_GIB, INSTANCES, SimulatedFleet, kinds_of
from simulator.setups import PREDICTIONS, UnknownSetupError, setup_for
from simulator.simulation import SimulationError
from simulator.workloads.base import WorkloadError
from simulator.workloads.resolve import WorkloadOptions
from tailrace.cli.errors import CliError, UsageProblem
from tailrace.cli.output import note
from tailrace.cli.plain import JsonValue
from tailrace.numeric import RealRange, WholeRange
from tailrace.perf.length_penalty import LengthPenaltyError, load_length_penalty
from tailrace.policy.parameters import ParameterError, Value, read_assignments
from tailrace.policy.registry import MOVES, parts_of
from tailrace.profiles import ProfileError, load_profile
from tailrace.service.settings import setting
from tailrace.slo import Slo, SloError

F = TypeVar("F", bound=Callable[..., Any])

DEFAULT_PROFILE: Final = "llama-3.1-8b-h100"
INSTANCES_MAX: Final = 20_000


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What each instance of a fleet has besides its profile."""

    length_penalty: str = setting("none", "Cost of unequal lengths in a batch: name or JSON file.", rare=True)
    prefix_caching: bool = setting(
        False, "Give instances a prefix cache, for workloads whose prompts share prefixes.", is_flag=True
    )
    host_kv_gib: float = setting(
        HOST_KV_GIB,
        "Host memory per instance for KV, in GiB; preempted requests take precedence. 0: they are "
        "recomputed.",
        "--host-kv",
        type=RealRange(0.0, 1e6),
        rare=True,
    )
    host_caching: bool = setting(
        False,
        "With --prefix-caching: keep evicted blocks in host memory, and load them back.",
        is_flag=True,
        rare=True,
    )
    predict: str | None = setting(
        None,
        "Workers' predictions of output lengths. [default: what the policy needs]",
        type=click.Choice(PREDICTIONS),
        rare=True,
    )


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """The fleet to simulate."""

    profile: str = setting(
        DEFAULT_PROFILE,
        "Model and GPU: name of a built-in profile, or a JSON file; NAME:COUNT,NAME:COUNT for a fleet of "
        "unequal instances.",
    )
    instances: int | None = setting(
        None,
        f"How many. [default: {INSTANCES}, or as many as --profile has]",
        type=WholeRange(1, INSTANCES_MAX),
    )
    prefill_instances: int | None = setting(
        None,
        "For policies with pools: initial number of prefill instances. [default: the policy's share]",
        type=WholeRange(min=1),
        rare=True,
    )
    engine: EngineSettings = EngineSettings()

    def fleet(self) -> SimulatedFleet:
        """Return the fleet. Raise UsageProblem that names the option."""
        engine = self.engine
        try:
            counts = kinds_of(self.profile, self.instances)
            kinds = [load_profile(name) for name, _ in counts]
        except (ProfileError, ValueError) as error:
            raise UsageProblem(f"--profile: {error}") from error
        if len({kind.kv_bytes_per_token for kind in kinds}) > 1:
            raise UsageProblem(
                f"--profile: {self.profile}: KV of different sizes per token, so of different models"
            )
        instances = sum(count for _, count in counts)
        if instances > INSTANCES_MAX:
            raise UsageProblem(f"--profile: {instances} instances; at most {INSTANCES_MAX} are possible")
        try:
            load_length_penalty(engine.length_penalty)
        except LengthPenaltyError as error:
            raise UsageProblem(f"--length-penalty: {error}") from error
        if self.prefill_instances is not None and self.prefill_instances >= instances:
            raise UsageProblem(
                f"--prefill-instances: {self.prefill_instances} of {instances} leaves no instance to decode"
            )
        if engine.host_caching and not engine.prefix_caching:
            raise UsageProblem("--host-caching requires --prefix-caching")
        return SimulatedFleet(
            self.profile,
            instances,
            engine.length_penalty,
            self.prefill_instances,
            engine.prefix_caching,
            engine.host_kv_gib,
            engine.host_caching,
        )


@dataclass(frozen=True, slots=True)
class SloSettings:
    """Service-level objectives; 0 sets none."""

    slo_ttft: float = setting(
        2.0,
        "Seconds to the first answering token; a request that reasons gets --slo-tpot more for each "
        "reasoning token. 0: no objective.",
        type=RealRange(min=0.0),
    )
    slo_tpot: float = setting(
        0.15, "Mean seconds between answering tokens. 0: no objective.", type=RealRange(min=0.0)
    )
    slo_qoe: float = setting(
        0.0,
        "Minimum QoE of an answer; PASCAL uses 0.95. [default: no objective]",
        type=RealRange(min=0.0, max=1.0),
        show_default=False,
        rare=True,
    )
    slo_pace: float = setting(
        0.0,
        "Seconds per token at which users read, for QoE. [default: 0.1, or --slo-tpot if less]",
        type=RealRange(min=0.0),
        show_default=False,
        rare=True,
    )
    slo_admit: float = setting(
        0.0,
        "Refuse a request whose predicted TTFT exceeds this multiple of --slo-ttft. [default: never]",
        type=RealRange(min=0.0),
        show_default=False,
        rare=True,
    )

    def slo(self) -> Slo:
        """Return the SLO. Raise UsageProblem."""
        given = (self.slo_ttft, self.slo_tpot, self.slo_qoe, self.slo_pace, self.slo_admit)
        try:
            return Slo(*(value or None for value in given))
        except SloError as error:
            raise UsageProblem(f"--slo-{error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSettings:
    """A workload at one rate."""

    rate: float | None = setting(None, "Mean requests per second.", type=RealRange(min=0.0, min_open=True))
    workload: WorkloadOptions

    def options(self, **others: Any) -> WorkloadOptions:
        """Return the workload's options at this rate, and with these others."""
        return replace(self.workload, rate_per_s=self.rate, **others)


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """How the policies are to decide."""

    moves: str = setting(
        "on",
        "off: no policy moves a request once it is placed, which is moves=false of each.",
        type=click.Choice(("on", "off")),
    )
    assignments: tuple[str, ...] = setting(
        (),
        "A parameter of the policy, or of all that have it; can be repeated.",
        "--set",
        multiple=True,
        metavar="[POLICY:]KEY=VALUE",
    )

    def parameters(self, policies: Sequence[str]) -> dict[str, tuple[tuple[str, Value], ...]]:
        """Return the parameters of each policy, checked. Raise UsageProblem."""
        try:
            assigned = _assign(read_assignments(self.assignments), policies)
            for policy in policies:
                if self.moves == "off" and any(p.name == MOVES.name for p in setup_for(policy).parameters()):
                    assigned[policy][MOVES.name] = False
            setups = {policy: setup_for(policy).with_parameters(assigned[policy]) for policy in policies}
        except (ParameterError, UnknownSetupError) as error:
            raise UsageProblem(f"--set: {error}") from error
        return {policy: tuple(setup.assigned.items()) for policy, setup in setups.items()}


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
    except (ParameterError, UnknownSetupError) as error:
        # A policy that needs SLOs is made with them when a run begins.
        raise UsageProblem(f"POLICY: {error}") from error
    except (SimulationError, TaskError) as error:
        raise CliError(str(error)) from error


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
def task_bar(label: str) -> Iterator[Callable[[TaskProgress], None]]:
    """Show a progress bar of tasks, with the name of the task that ended last; without a terminal, a line for
    each tenth."""
    tenths = 0
    with _bars() as bars:
        bar = bars.add_task(label, total=1.0)

        def advance(progress: TaskProgress) -> None:
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
    """Add --report, a file that must be writable before anything is simulated."""

    def checked(_context: click.Context, _parameter: click.Parameter, value: Path | None) -> Path | None:
        if value is not None and not value.parent.is_dir():
            raise click.BadParameter(f"there is no folder {value.parent}")
        if value is not None:
            try:
                _check_writable(value)
            except OSError as error:
                raise click.BadParameter(f"{value}: {error.strerror}; give a file to write") from error
        return value

    return click.option(
        "--report",
        type=click.Path(dir_okay=False, path_type=Path),
        callback=checked,
        help="Write a report with plots, as one HTML file.",
    )(function)


def _check_writable(path: Path) -> None:
    """Raise OSError if the file cannot be written; leave it as it is."""
    # Of a link to nothing yet, the link stays.
    path = path.resolve()
    new = not path.exists()
    # Opening a pipe would wait for its reader.
    if new or path.is_file() or path.is_dir():
        path.open("ab").close()
    if new:
        path.unlink()


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
