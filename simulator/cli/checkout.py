"""Commands whose code is in `experiments`: a checkout of the repository has it, and no wheel."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import click

from tailrace.cli.errors import CliError

_ROOT = Path(__file__).resolve().parents[2]


def experiment(name: str, location: str) -> click.Command:
    """Import the command `tailrace NAME` from `module:attribute`. Raise CliError if there are no
    experiments."""
    # An editable installation finds only the wheel's packages.
    if find_spec("experiments") is None and (_ROOT / "experiments" / "__init__.py").is_file():
        sys.path.append(str(_ROOT))
    if find_spec("experiments") is None:
        raise CliError(
            f"{name}: its code, experiments/, is not installed with Tailrace; in a checkout of Tailrace's "
            f"repository, `make install` and then `.venv/bin/tailrace {name}` run it"
        )
    module, _, attribute = location.partition(":")
    command: click.Command = getattr(import_module(module), attribute)
    return command
