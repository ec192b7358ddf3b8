"""`tailrace version`."""

from __future__ import annotations

import platform

import click

from tailrace import __version__
from tailrace.cli.output import Output, output_option, print_json
from tailrace.cli.plain import JsonValue
from tailrace.local.requirements import ucxx_version, vllm_version


@click.command(epilog="Example: tailrace version -o json")
@output_option()
def version(output: Output) -> None:
    """Print the versions of Tailrace and its main dependencies."""
    versions: dict[str, JsonValue] = {
        "tailrace": __version__,
        "python": platform.python_version(),
        "vllm": vllm_version() or None,
        "ucxx": ucxx_version() or None,
    }
    if output is Output.JSON:
        print_json(versions)
        return
    for name, value in versions.items():
        click.echo(f"{name:10} {value or 'not installed'}")
