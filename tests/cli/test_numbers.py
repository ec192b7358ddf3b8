"""Numbers, files and outputs that no command can work with get one line, and no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from tailrace.cli.main import main
from tailrace.numeric import Duration, RealRange, WholeRange
from tailrace.policy.parameters import ParameterError
from tailrace.slo import Slo, changed_slo
from tailrace.store.reading import UnreadableRecord, read_slo

LONG = "9" * 5_000
WRONG = ("nan", "inf", "-inf", "1e300", "-1e300", LONG, "x" * 5_000, "")
_NUMBERS = (type(click.INT), type(click.FLOAT))


def _options(
    command: click.Command, path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], click.Parameter]]:
    """Yield every option and argument with a number, with the words of its command."""
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from _options(found, (*path, name))
    for parameter in command.params:
        kinds = parameter.type.types if isinstance(parameter.type, click.Tuple) else [parameter.type]
        if any(isinstance(kind, _NUMBERS) for kind in kinds):
            yield path, parameter


OPTIONS = list(_options(main, ()))


@pytest.mark.parametrize(
    ("path", "parameter"),
    OPTIONS,
    ids=lambda of: " ".join(of) if isinstance(of, tuple) else of.name,
)
def test_every_number_is_bounded(path: tuple[str, ...], parameter: click.Parameter) -> None:
    kinds = parameter.type.types if isinstance(parameter.type, click.Tuple) else [parameter.type]
    for kind in kinds:
        assert isinstance(kind, (RealRange, WholeRange)), "use tailrace.numeric"
        wrong = [*WRONG, *(["-1"] if parameter.name != "priority" else [])]
        for text in wrong:
            with pytest.raises(click.BadParameter) as raised:
                kind.convert(text, parameter, None)
            assert len(raised.value.format_message()) < 300
    names = getattr(parameter, "opts", [])
    if isinstance(parameter, click.Option) and len(kinds) == 1:
        result = CliRunner().invoke(main, [*path, names[0], LONG])
        assert result.exit_code == 2, result.output
        assert "Traceback" not in result.output and len(result.output) < 2_000


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5", 5.0),
        ("2.5", 2.5),
        ("500ms", 0.5),
        ("90 s", 90.0),
        ("2m", 120.0),
        ("1.5h", 5_400.0),
        ("7d", 604_800.0),
    ],
)
def test_durations_have_units(text: str, seconds: float) -> None:
    assert Duration(min=0).convert(text, None, None) == seconds
    assert Slo(ttft_s=seconds) == changed_slo(Slo(), {"ttft": text})


@pytest.mark.parametrize("text", ["5x", "ms", "1h30m", "-1s", "1e3s", "5 5s", "9" * 5_000 + "s"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is not a duration"):
        Duration(min=0).convert(text, None, None)
    with pytest.raises(ParameterError):
        changed_slo(Slo(), {"ttft": text})


def test_commands_have_numbers() -> None:
    paths = {path for path, _ in OPTIONS}
    assert {("simulate",), ("compare",), ("serve", "worker"), ("up",)} <= paths


@pytest.mark.parametrize(
    "arguments",
    [
        ("alpaca_eval", "--rate", "1e-9"),
        ("alpaca_eval", "--rate", "1e9", "--duration", "1e9"),
        ("alpaca_eval", "--rate", "1", "--slo-ttft", "1e-308"),
        ("azure:/dev/zero",),
        ("mooncake:/dev/zero",),
        ("jsonl:/dev/zero",),
        ("alpaca_eval", "--rate", "1", "--profile", "/dev/zero"),
        ("alpaca_eval", "--rate", "1", "--length-penalty", "/dev/zero"),
    ],
    ids=" ".join,
)
def test_what_cannot_be_simulated_is_a_usage_error(arguments: tuple[str, ...]) -> None:
    result = CliRunner().invoke(main, ["simulate", "least_loaded", *arguments])
    assert result.exit_code == 2, result.output
    assert len(result.stderr.splitlines()) == 1 and len(result.stderr) < 500


def test_a_pipe_without_a_writer_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    result = CliRunner().invoke(main, ["simulate", "least_loaded", f"jsonl:{tmp_path}/pipe"])
    assert result.exit_code == 2
    assert "not a regular file" in result.stderr


@pytest.mark.parametrize("text", ["1e-308", "nan", "inf", "-1", "1e300", LONG])
def test_an_objective_out_of_range_is_refused_everywhere(text: str) -> None:
    result = CliRunner().invoke(main, ["set", "slo", f"ttft={text}"])
    assert result.exit_code == 2
    assert len(result.stderr) < 300
    with pytest.raises(ParameterError):
        changed_slo(Slo(), {"ttft": text})
    with pytest.raises(ParameterError):
        Slo(ttft_s=float(text) if text != LONG else float("inf"))


def test_an_objective_out_of_range_in_etcd_is_unreadable() -> None:
    with pytest.raises(UnreadableRecord, match=r"ttft: -1\.0 is not allowed"):
        read_slo(b'{"ttft_s": -1, "tpot_s": 1, "qoe": null, "pace_s": null, "admit": null}')


def test_long_assignments_are_not_echoed() -> None:
    for words in (["policy", "pascal", "x" * 5_000], ["slo", "x" * 5_000 + "=1"]):
        result = CliRunner().invoke(main, ["set", *words])
        assert result.exit_code == 2
        assert len(result.stderr) < 400


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_output_to_a_full_disk_is_one_line() -> None:
    with open("/dev/full", "wb") as full:
        result = subprocess.run(
            [sys.executable, "-m", "tailrace", "version"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert result.returncode == 1
    assert result.stderr == "tailrace: the output cannot be written: No space left on device\n"
