"""Commands of other packages, found by entry point."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest
from click.testing import CliRunner

from tailrace.cli.main import main
from tests.waiting import WAIT_S


def _installed(monkeypatch: pytest.MonkeyPatch, **commands: str) -> None:
    points = [EntryPoint(name, value, "tailrace.commands") for name, value in commands.items()]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: points)


def test_help_lists_plugin_commands_after_built_in_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch, zebra="no.such.module:command", simulate="another.module:command")
    lines = [" ".join(line.split()) for line in CliRunner().invoke(main, ["--help"]).output.splitlines()]
    # One with a known help line, and one of which only the entry point is known without importing it.
    assert lines.index("simulate Run one policy on a workload in the simulator.") > next(
        place for place, line in enumerate(lines) if line.startswith("version ")
    )
    assert "zebra no.such.module:command" in lines


def test_a_command_that_is_not_installed_is_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch)
    assert "simulate" not in CliRunner().invoke(main, ["--help"]).output
    result = CliRunner().invoke(main, ["simulate"])
    assert result.exit_code == 2
    assert "No such command 'simulate'" in result.stderr


def test_a_missing_dependency_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch, zebra="no_such_module:command")
    result = CliRunner().invoke(main, ["zebra"])
    assert result.exit_code == 1
    assert result.stderr == (
        "tailrace: zebra: No module named 'no_such_module'; scripts/install.sh installs what is missing\n"
    )


def test_an_entry_point_that_is_not_a_command_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch, zebra="json:dumps")
    result = CliRunner().invoke(main, ["zebra"])
    assert isinstance(result.exception, TypeError)
    assert "json:dumps is not a click command" in str(result.exception)


def test_built_in_commands_cannot_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch, version="no_such_module:command")
    assert CliRunner().invoke(main, ["version", "--help"]).exit_code == 0


def test_help_does_not_import_the_simulator() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from tailrace.cli.main import main;"
        "result = CliRunner().invoke(main, ['--help']); assert 'simulate' in result.output, result.output;"
        "print([name for name in sys.modules if name.partition('.')[0] in ('simulator', 'numpy', 'grpc')])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S)
    assert result.stdout.strip() == "[]", result.stderr
