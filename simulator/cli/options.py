"""Options that the simulator's commands share, and their errors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from simulator.parallel import TaskError
from simulator.scenario import Fleet
from simulator.setups import PREDICTIONS, UnknownSetupError, setup_for
from simulator.simulation import SimulationError
from simulator.workloads.base import WorkloadError
from tailrace.cli.errors import CliError, UsageProblem
from tailrace.perf.length_penalty import LengthPenaltyError, load_length_penalty
from tailrace.profiles import ProfileError, load_profile
from tailrace.slo import Slo

F = TypeVar("F", bound=Callable[..., Any])

DEFAULT_PROFILE: Final = "llama-3.1-8b-h100"
_POSITIVE: Final = click.FloatRange(min=0.0, min_open=True)


def fleet_options(function: F) -> F:
    """--profile, --instances, --length-penalty, --prefill-instances, --prefix-caching, --predict."""
    for option in reversed(
        (
            click.option(
                "--profile",
                default=DEFAULT_PROFILE,
                show_default=True,
                help="Model and GPU: name of a built-in profile, or a JSON file.",
            ),
            click.option(
                "--instances", type=click.IntRange(min=1), default=8, show_default=True, help="How many."
            ),
            click.option(
                "--length-penalty",
                default="none",
                show_default=True,
                help="What unequal lengths in a batch cost: name or JSON file.",
            ),
            click.option(
                "--prefill-instances",
                type=click.IntRange(min=1),
                help="For policies with pools: so many prefill at the start. [default: the policy's share]",
            ),
            click.option(
                "--prefix-caching",
                is_flag=True,
                help="Instances keep KV of prefixes and find it, where the workload names blocks (mooncake).",
            ),
            click.option(
                "--predict",
                type=click.Choice(PREDICTIONS),
                help="What workers predict of output lengths. [default: what the policy needs]",
            ),
        )
    ):
        function = option(function)
    return function


def workload_options(function: F) -> F:
    """--speed, --count, --start, --duration, --max-model-len."""
    for option in reversed(
        (
            click.option("--speed", type=_POSITIVE, help="A trace's time runs so many times as fast."),
            click.option(
                "--count", type=click.IntRange(min=1), help="Requests. [default: all; generated: 1000]"
            ),
            click.option(
                "--start", type=click.FloatRange(min=0.0), default=0.0, help="Seconds of a trace to skip."
            ),
            click.option("--duration", type=_POSITIVE, help="Seconds of the workload's own time."),
            click.option(
                "--max-model-len",
                type=click.IntRange(min=2),
                help="Cut prompts so that prompt and output fit into so many tokens.",
            ),
        )
    ):
        function = option(function)
    return function


def slo_options(function: F) -> F:
    """--slo-ttft, --slo-tpot, --slo-qoe, --slo-pace. 0 asks for nothing."""
    least = click.FloatRange(min=0.0)
    for option in reversed(
        (
            click.option(
                "--slo-ttft",
                type=least,
                default=2.0,
                show_default=True,
                help="Seconds to the first answering token; a request that reasons has --slo-tpot more for "
                "each reasoning token. 0: none asked for.",
            ),
            click.option(
                "--slo-tpot",
                type=least,
                default=0.15,
                show_default=True,
                help="Seconds between answering tokens, on average. 0: none asked for.",
            ),
            click.option(
                "--slo-qoe",
                type=click.FloatRange(min=0.0, max=1.0),
                default=0.0,
                help="Least QoE of an answer; PASCAL asks for 0.95. [default: none asked for]",
            ),
            click.option(
                "--slo-pace",
                type=least,
                default=0.0,
                help="Seconds a token at which users read, for QoE. [default: 0.1, or --slo-tpot if less]",
            ),
        )
    ):
        function = option(function)
    return function


def slo_of(ttft_s: float, tpot_s: float, qoe: float, pace_s: float) -> Slo:
    """From the options, where 0 stands for nothing asked for."""
    return Slo(ttft_s or None, tpot_s or None, qoe or None, pace_s or None)


def fleet_of(
    profile: str, instances: int, penalty: str, prefill_instances: int | None, prefix_caching: bool
) -> Fleet:
    """From the options. Raises UsageProblem that names the option."""
    try:
        load_profile(profile)
    except ProfileError as error:
        raise UsageProblem(f"--profile: {error}") from error
    try:
        load_length_penalty(penalty)
    except LengthPenaltyError as error:
        raise UsageProblem(f"--length-penalty: {error}") from error
    if prefill_instances is not None and prefill_instances >= instances:
        raise UsageProblem(f"--prefill-instances: {prefill_instances} of {instances} leaves nobody to decode")
    return Fleet(profile, instances, penalty, prefill_instances, prefix_caching)


def check_policy(name: str, option: str) -> None:
    """Raises UsageProblem with the known names when there is no such policy.

    A `module:Class` may lie in the working directory, after everything that is installed; processes that are
    started later look there too.
    """
    here = str(Path.cwd())
    if ":" in name and here not in sys.path:
        sys.path.append(here)
    try:
        setup_for(name)
    except UnknownSetupError as error:
        raise UsageProblem(f"{option}: {error}") from error


@contextmanager
def simulation_errors() -> Iterator[None]:
    """Errors of the block as one line: of the workload wrong usage, of a run a failure."""
    try:
        yield
    except WorkloadError as error:
        raise UsageProblem(f"workload: {error}") from error
    except (SimulationError, TaskError) as error:
        raise CliError(str(error)) from error
