"""A scripted admin API, and `tailrace` run against it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from click.testing import CliRunner, Result

from tailrace.cli.main import main
from tests.cli.scripted_admin import Script, serving, small_fleet

Run = Callable[..., Result]


@pytest.fixture
def script() -> Script:
    """Return a small fleet; a test may change it before or between commands."""
    return small_fleet()


@pytest.fixture
def run(script: Script) -> Iterator[Run]:
    """Yield a function that runs a command line against the script."""
    with serving(script) as address:

        def invoke(*arguments: str, stdin: str | None = None) -> Result:
            return CliRunner().invoke(main, [*arguments, "--admin", address], input=stdin)

        yield invoke
