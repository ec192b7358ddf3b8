"""`tailrace serve` with invalid arguments prints one line and starts nothing."""

from __future__ import annotations

from importlib.metadata import entry_points

import pytest
from click.testing import CliRunner

from tailrace.cli.main import main


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        # Zero or less would report continuously.
        ("worker --engine simulated --report-interval 0", "--report-interval"),
        ("worker --engine simulated --count 2 --stream-port 7000", "--stream-port"),
        ("worker --engine simulated --sim what", "NAME=VALUE"),
        ("worker --profile no-such-profile", "no-such-profile"),
        ("frontend --front rust a/model no-flag", "no-flag"),
        ("frontend --http nowhere", "--http"),
        ("frontend --model /nowhere/at-all", "no folder /nowhere/at-all"),
        # Shorter than a client takes to reconnect.
        ("frontend --keep-answers 0.1", "--keep-answers"),
        ("frontend --keep-answers nan", "--keep-answers"),
        ("frontend --front rust --keep-answers 60", "not supported by vllm-rs"),
        ("scheduler --policy none_such", "least_loaded"),
        ("monitor --etcd nowhere", "HOST:PORT"),
        ("migration --cluster a/b", "--cluster"),
        ("monitor --listen ::1:7102", "[::1]:7102"),
        ("monitor --advertise host:7102", "without a port"),
        ("monitor --advertise http://host", "without a port"),
    ],
)
def test_usage_errors(arguments: str, message: str) -> None:
    result = CliRunner().invoke(main, ["serve", *arguments.split()])
    assert result.exit_code == 2
    assert message in result.stderr
    assert isinstance(result.exception, SystemExit)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("--policy none_such", "none_such"),
        ("--policy 'cascade layout=flat'", "'flat'"),
        ("'unclosed", "TAILRACE_SERVE_ARGS"),
    ],
)
def test_arguments_from_the_environment_are_added(
    extra: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TAILRACE_SERVE_ARGS", extra)
    result = CliRunner().invoke(main, ["serve", "scheduler"])
    assert result.exit_code == 2
    assert message in result.stderr


def test_help_lists_each_service_with_its_summary() -> None:
    listed = " ".join(CliRunner().invoke(main, ["serve", "--help"]).output.split())
    points = entry_points(group="tailrace.services")
    assert {point.name for point in points} >= {"frontend", "migration", "monitor", "scheduler", "worker"}
    for point in points:
        command = point.load()
        first = " ".join((command.help or "").split("\n\n")[0].split())
        assert f"{point.name} {first}" in listed


def test_an_invalid_log_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAILRACE_LOG_LEVEL", "loud")
    result = CliRunner().invoke(main, ["serve", "monitor"])
    assert isinstance(result.exception, SystemExit)
    # Python writes the message to stderr and exits with code 1.
    assert "'LOUD' is none of" in str(result.exception.code)
