"""`tailrace config`: check a fleet.yaml, show what it means, and its JSON Schema."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from tailrace.cli.fleet_file import file_option, options_of, plans, read_fleet_file
from tailrace.cli.output import Output, output_option, print_json
from tailrace.cli.up import on_this_machine
from tailrace.fleet.file import json_schema
from tailrace.fleet.hosts import Installation
from tailrace.local.plan import PartSpec, make_plan


@click.group(epilog="Example: tailrace config check -f fleet.yaml")
def config() -> None:
    """Check a fleet.yaml, show what it means, and its JSON Schema."""


@config.command(epilog="Example: tailrace config schema >fleet.schema.json")
def schema() -> None:
    """Print the JSON Schema, with which editors complete and check the file.

    Name it in the file's first line: # yaml-language-server: $schema=fleet.schema.json
    """
    print_json(json_schema())


@config.command(epilog="Example: tailrace config check -f fleet.yaml")
@file_option(required=True)
def check(file: Path) -> None:
    """Check a file; the error names the field. Flags of vLLM's are checked by vLLM, when it starts."""
    parts = [part for each in _parts(file).values() for part in each]
    click.echo(f"{file}: {len(parts)} processes")


@config.command(epilog="Example: tailrace config show -f fleet.yaml")
@file_option(required=True)
@output_option()
def show(file: Path, output: Output) -> None:
    """Show the processes of each host, and their command lines."""
    parts = _parts(file)
    if output is Output.JSON:
        print_json(
            {
                host: [{"name": part.name, "command": [*part.command]} for part in each]
                for host, each in parts.items()
            }
        )
        return
    for host, each in parts.items():
        click.echo(f"{host}:")
        for part in each:
            click.echo(f"  {part.name}: {shlex.join(part.command)}")


def _parts(path: Path) -> dict[str, list[PartSpec]]:
    """Return the parts on each host; of a file without hosts, on ports from 20000."""
    file = read_fleet_file(path)
    options = options_of(file)
    if not file.fleet.hosts:
        here = on_this_machine(options, file.fleet.model.number)
        plan = make_plan(here, lambda count: range(20000, 20000 + count), _etcd, ["tailrace"], ".run/data")
        return {"this machine": [*plan.parts]}
    installed = Installation(["tailrace"], "etcd", "/var/lib/tailrace", "/etc/tailrace/tls")
    return {host: [*plan.parts] for host, plan in plans(file, options, installed).items()}


def _etcd(port: int) -> list[str]:
    return ["etcd", f"--listen-client-urls=http://127.0.0.1:{port}"]
