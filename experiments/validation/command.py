"""`tailrace validate`: a recorded run of a real engine, replayed in the simulator."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click
from rich.table import Table

from experiments.validation.errors import MetricError
from experiments.validation.recorded import RecordedRunError, read_run
from experiments.validation.replay import ReplayError, Validation, validate
from tailrace.cli.output import Output, output_option, print_figures, print_json
from tailrace.cli.plain import JsonValue
from tailrace.perf.length_penalty import LengthPenaltyError, load_length_penalty
from tailrace.profiles import ProfileError, load_profile


@click.command("validate")
@click.argument("run_folder", metavar="RUN", type=click.Path(path_type=Path))
@click.option(
    "--profile", "profile_name", default="llama-3.1-8b-rtx4090", show_default=True, help="Name or JSON file."
)
@click.option(
    "--length-penalty",
    default="none",
    show_default=True,
    help="Cost of unequal lengths: name or JSON file.",
)
@output_option()
def validate_command(run_folder: Path, profile_name: str, length_penalty: str, output: Output) -> None:
    """Measure the simulator's error against a real vLLM run.

    RUN is a folder with meta.json and requests.jsonl in the format of LLMServingSim's benchmark.
    """
    try:
        profile = load_profile(profile_name)
        penalty = load_length_penalty(length_penalty)
        validation = validate(read_run(run_folder), profile, penalty)
    except (RecordedRunError, ReplayError, ProfileError, LengthPenaltyError) as error:
        raise click.ClickException(str(error)) from error
    if output is Output.JSON:
        print_json(_plain(validation))
    else:
        print_figures(validation_table(validation))


def _plain(validation: Validation) -> dict[str, JsonValue]:
    run = validation.run
    return {
        "run": run.name,
        "model": run.model,
        "gpu": run.gpu,
        "vllm_version": run.vllm_version,
        "profile": validation.profile,
        "preemptions": validation.preemptions,
        "errors": asdict(validation.errors),
        "requests": [asdict(request) for request in validation.requests],
    }


def validation_table(validation: Validation) -> Table:
    run = validation.run
    engine = f"{run.model}, {run.gpu}, vLLM {run.vllm_version}"
    table = Table(
        title=f"{run.name}: {len(validation.requests)} requests, {engine}",
        caption=f"profile {validation.profile}; errors are of each request unless they say of what",
    )
    for heading in ("metric", "mean", "simulated", "error of mean", "MAPE", "P50", "P90", "error of P99"):
        table.add_column(heading, justify="left" if heading == "metric" else "right")
    table.add_row("TTFT", *_cells(validation.errors.ttft))
    table.add_row("TPOT", *_cells(validation.errors.tpot))
    table.add_row("latency", *_cells(validation.errors.latency))
    return table


def _cells(error: MetricError) -> list[str]:
    return [
        _duration(error.mean_s),
        _duration(error.simulated_mean_s),
        f"{error.mean_error:+.2%}",
        f"{error.mape:.2%}",
        f"{error.p50_error:.2%}",
        f"{error.p90_error:.2%}",
        f"{error.p99_of_metric_error:+.2%}",
    ]


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1.0 else f"{seconds * 1e3:.2f} ms"
