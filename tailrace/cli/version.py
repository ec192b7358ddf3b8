"""`tailrace version`."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed

import click

from tailrace import __version__
from tailrace.cli.output import Output, output_option, print_json
from tailrace.cli.plain import JsonValue


@click.command(epilog="Example: tailrace version -o json")
@output_option()
def version(output: Output) -> None:
    """Print the versions of Tailrace and its main dependencies."""
    versions: dict[str, JsonValue] = {
        "tailrace": __version__,
        "python": platform.python_version(),
        "vllm": _version_of("vllm"),
        "ucxx": _version_of("ucxx-cu13") or _version_of("ucxx-cu12"),
    }
    if output is Output.JSON:
        print_json(versions)
        return
    for name, value in versions.items():
        click.echo(f"{name:10} {value or 'not installed'}")


def _version_of(distribution: str) -> str | None:
    try:
        return installed(distribution)
    except PackageNotFoundError:
        return None
