"""`tailrace predictor collect | train | evaluate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.table import Table

from tailrace.cli.output import Output, note, output_option, print_figures, print_json
from tailrace.numeric import RealRange, WholeRange
from tailrace.predictor.samples import SamplesError, read_samples, write_samples
from tailrace.service.vllm_line import VllmCommand, read_line
from tailrace.tiny import MODEL_PATH, PREDICTOR_PATH
from worker_agent.predictor.collect import CollectOptions, PromptsError, collect, read_prompts, tiny_prompts

if TYPE_CHECKING:
    from tailrace.predictor.evaluate import ErrorRow, Evaluation
    from tailrace.predictor.train import Epoch

_FILE = click.Path(dir_okay=False, path_type=Path)
_REPORT_EVERY = 20
_TINY = "tailrace-tiny"


def _writable(_context: click.Context, _parameter: click.Parameter, value: Path) -> Path:
    """Check that the file's folder exists before minutes of work."""
    if not value.parent.is_dir():
        raise click.BadParameter(f"there is no folder {value.parent}")
    return value


@click.group("predictor")
def predictor_command() -> None:
    """Predict the remaining output tokens of running requests (docs/predictor.md)."""


@predictor_command.command("collect", cls=VllmCommand)
@click.option("--model", help="Model; by default the tiny one that ships with Tailrace.")
@click.option(
    "--prompts",
    type=_FILE,
    help="JSON lines with `prompt` or `messages`; default: tasks of the tiny model.",
)
@click.option("-n", "limit", type=WholeRange(10), default=200, show_default=True, help="Number of prompts.")
@click.option(
    "--interval",
    type=WholeRange(1),
    default=20,
    show_default=True,
    help="Output tokens between two samples of a request.",
)
@click.option("--max-tokens", type=WholeRange(1), default=32_768, show_default=True)
@click.option("--temperature", type=RealRange(0), help="Default: the model's own.")
@click.option(
    "--seed", type=WholeRange(0), default=0, show_default=True, help="Seed for prompts and sampling."
)
@click.option("--out", type=_FILE, required=True, callback=_writable, help="Samples file to write.")
@output_option()
def collect_command(
    model: str | None,
    prompts: Path | None,
    limit: int,
    interval: int,
    max_tokens: int,
    temperature: float | None,
    seed: int,
    out: Path,
    output: Output,
    arguments: Sequence[str],
) -> None:
    """Run prompts through vLLM and store hidden states with the number of tokens that followed.

    Takes any flag of `vllm serve` that is the engine's.
    """
    line = read_line(arguments, model)
    model = model or line.model or None
    if model is not None and prompts is None:
        raise click.UsageError("--prompts is needed for a model that is not the tiny one")
    from tailrace.wire.serve_flags import FlagRefused, read_engine_flags

    try:
        read = read_engine_flags(line.arguments).arguments
        options = CollectOptions(
            model=model or str(MODEL_PATH),
            interval=interval,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            name=model or _TINY,
            engine_args=read if model else {"dtype": "float32"} | read,
        )
    except FlagRefused as error:
        raise click.UsageError(str(error)) from error

    def report(done: int) -> None:
        if done % _REPORT_EVERY == 0:
            note(f"{done} of {len(chosen)} requests")

    try:
        chosen = tiny_prompts(limit, seed) if prompts is None else read_prompts(prompts, limit, seed)
        samples = collect(chosen, options, report)
        write_samples(samples, out)
    except (PromptsError, RuntimeError, ValueError, OSError) as error:
        raise click.ClickException(str(error)) from error
    first = samples.first()
    requests, cut_off = len(first), int((~first.ended).sum())
    note(f"{len(samples)} samples of {requests} requests, of which {cut_off} were truncated, in {out}")
    if output is Output.JSON:
        print_json({"samples": len(samples), "requests": requests, "cut_off": cut_off, "file": str(out)})


@predictor_command.command("train")
@click.argument("samples_file", metavar="SAMPLES", type=_FILE)
@click.option("--out", type=_FILE, required=True, callback=_writable, help="Predictor file to write.")
@click.option("--epochs", type=WholeRange(1), default=100, show_default=True, help="At most.")
@click.option(
    "--patience",
    type=WholeRange(1),
    default=10,
    show_default=True,
    help="Epochs without a lower validation loss before training stops.",
)
@click.option("--rate", type=RealRange(0, min_open=True), default=1e-3, show_default=True)
@click.option("--batch", type=WholeRange(1), default=128, show_default=True)
@click.option(
    "--widths",
    type=(WholeRange(1), WholeRange(1), WholeRange(1)),
    help="Widths of the inner layers; default: the paper's, in proportion to the hidden size.",
)
@click.option(
    "--seed",
    type=WholeRange(0),
    default=0,
    show_default=True,
    help="Seed for the split and the initial weights.",
)
@output_option()
def train_command(
    samples_file: Path,
    out: Path,
    epochs: int,
    patience: int,
    rate: float,
    batch: int,
    widths: tuple[int, int, int] | None,
    seed: int,
    output: Output,
) -> None:
    """Train a predictor on 70% of the requests, with early stopping on another 15%."""
    from tailrace.predictor.file import save_predictor
    from tailrace.predictor.train import TrainingOptions, train

    def report(epoch: Epoch) -> None:
        note(
            f"epoch {epoch.number}: loss {epoch.training_loss:.4f}, validation {epoch.validation_loss:.4f} "
            f"(MAE {epoch.validation_mae:.1f} tokens)"
        )

    options = TrainingOptions(epochs, patience, rate, batch, seed, widths)
    try:
        trained = train(read_samples(samples_file), options, report)
        save_predictor(trained.predictor, out)
    except (SamplesError, ValueError, OSError) as error:
        raise click.ClickException(str(error)) from error
    best = trained.best
    note(
        f"epoch {best.number} is best: validation loss {best.validation_loss:.4f}, "
        f"MAE {best.validation_mae:.1f} tokens; in {out}"
    )
    if output is Output.JSON:
        print_json({"best": asdict(best), "file": str(out)})


@predictor_command.command("evaluate")
@click.argument("samples_file", metavar="SAMPLES", type=_FILE)
@click.option(
    "--predictor",
    "predictor_file",
    type=_FILE,
    default=PREDICTOR_PATH,
    help="Predictor file; default: the tiny model's.",
)
@output_option()
def evaluate_command(samples_file: Path, predictor_file: Path, output: Output) -> None:
    """Report errors by tokens generated so far on unseen requests, quantiles, and the cost.

    SAMPLES must be the file that the predictor was trained on: its seed determines which requests are unseen.
    """
    from tailrace.predictor.evaluate import evaluate
    from tailrace.predictor.file import PredictorFileError, load_predictor
    from tailrace.predictor.samples import split_by_request

    try:
        predictor = load_predictor(predictor_file)
        samples = read_samples(samples_file)
        if samples.hidden_size != predictor.description.hidden_size:
            raise click.ClickException(
                f"{samples_file}: hidden: states have {samples.hidden_size} dimensions, "
                f"the predictor expects {predictor.description.hidden_size}"
            )
        evaluation = evaluate(predictor, split_by_request(samples, predictor.description.split_seed))
    except (PredictorFileError, SamplesError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    if output is Output.JSON:
        print_json({**asdict(evaluation), "cost_share": evaluation.cost.share})
    else:
        _print(evaluation)


def _print(evaluation: Evaluation) -> None:
    total = f"{evaluation.test_requests} test requests: mean absolute error in tokens"
    print_figures(_table(total, [*evaluation.by_generated, evaluation.total]))
    longest = f"the longest quarter, {evaluation.longest_length} tokens or more"
    print_figures(_table(longest, evaluation.same_requests))
    print_figures(_coverage(evaluation))
    cost = evaluation.cost
    print_figures(
        f"{evaluation.parameters} parameters; {cost.call_s * 1e3:.3f} ms for {cost.batch} requests every "
        f"{cost.interval_steps} steps of {cost.step_s * 1e3:.1f} ms: {cost.share:.3%} of step time"
    )


def _table(title: str, rows: list[ErrorRow]) -> Table:
    table = Table(title=title)
    for heading in (
        "generated",
        "samples",
        "requests",
        "truncated",
        "mean remaining",
        "predictor",
        "prompt only",
        "lengths only",
    ):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            _range(row),
            str(row.samples),
            str(row.requests),
            str(row.cut_off),
            *(f"{v:.0f}" for v in (row.mean_remaining, row.predictor, row.prompt_only, row.lengths_alone)),
        )
    return table


def _coverage(evaluation: Evaluation) -> Table:
    table = Table(title="share of samples whose remaining tokens are within the predicted quantile")
    table.add_column("quantile", justify="right")
    table.add_column("share", justify="right")
    for row in evaluation.coverage:
        table.add_row(f"{row.level:.0%}", f"{row.share:.1%}")
    return table


def _range(row: ErrorRow) -> str:
    last = row.generated_to - 1
    return "none" if last == 0 else f"{row.generated_from} to {last}"
