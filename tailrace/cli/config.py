"""`tailrace config`: check a fleet.yaml, show what it means, and its JSON Schema."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import click

from tailrace.address import parse_address
from tailrace.brief_help import WholeGroup
from tailrace.cli.errors import UsageProblem
from tailrace.cli.fleet_file import FleetFile, file_option, options_of, plans, read_fleet_file
from tailrace.cli.line_check import needs_vllm, refusal
from tailrace.cli.output import Output, note, output_option, print_json
from tailrace.cli.up import on_this_machine
from tailrace.fleet.file import json_schema
from tailrace.fleet.hosts import Installation
from tailrace.local.options import ClusterOptions
from tailrace.local.plan import PartSpec, make_plan
from tailrace.local.requirements import vllm_version
from tailrace.model_folder import ModelFolderError, require_files
from tailrace.security.options import exposed
from tailrace.tiny import MODEL_PATH


@click.group(cls=WholeGroup, epilog="Example: tailrace config check -f fleet.yaml")
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
    """Check a file; the error names the field. Where vLLM is installed, it checks its flags."""
    fleet = read_fleet_file(file)
    parts = _parts(fleet)
    if len(fleet.fleet.hosts) > 1:
        field, http = fleet.fleet.users[0]
        if not exposed([http]):
            port = parse_address(http)[1]
            note(
                f"{file}: {field}: {http} is reached from its own host alone, as by a proxy there; "
                f"0.0.0.0:{port} from everywhere"
            )
    for number, options in enumerate(options_of(fleet).models):
        _check_model(fleet, number, options)
    click.echo(f"{file}: {sum(map(len, parts.values()))} processes")


def _check_model(file: FleetFile, number: int, options: ClusterOptions) -> None:
    """Raise UsageProblem if its folder holds no model, or its workers and front ends would not start."""
    field = f"{file.path}: models[{number}]"
    try:
        require_files(options.model, options.line.flags)
    except ModelFolderError as error:
        if not file.fleet.hosts:
            raise UsageProblem(f"{field}.model: {error}") from error
        note(f"{field}.model: {error} on this machine; it must be on each host with workers or front ends")
        options = replace(options, model=str(MODEL_PATH))
    if not options.line.arguments:
        return
    if needs_vllm(options):
        note("config check: checking the flags, for which vLLM is loaded")
    elif not vllm_version():
        note(f"{field}.flags: not checked, because vLLM is not installed here")
    # Of users' addresses and keys the file has been checked as a whole.
    options = replace(options, frontend_arguments=(*options.frontend_arguments, "--insecure"))
    if problem := refusal(options):
        raise UsageProblem(f"{field}.flags: {problem}")


@config.command(epilog="Example: tailrace config show -f fleet.yaml")
@file_option(required=True)
@output_option()
def show(file: Path, output: Output) -> None:
    """Show the processes of each host, and their command lines."""
    parts = _parts(read_fleet_file(file))
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


def _parts(file: FleetFile) -> dict[str, list[PartSpec]]:
    """Return the parts on each host; of a file without hosts, on ports from 20000."""
    options = options_of(file)
    if not file.fleet.hosts:
        here = on_this_machine(options, file.fleet.model.number, lambda text: note(f"{file.path}: {text}"))
        plan = make_plan(here, lambda count: range(20000, 20000 + count), _etcd, ["tailrace"], ".run/data")
        return {"this machine": [*plan.parts]}
    installed = Installation(["tailrace"], "etcd", "/var/lib/tailrace", "/etc/tailrace/tls")
    return {host: [*plan.parts] for host, plan in plans(file, options, installed).items()}


def _etcd(port: int) -> list[str]:
    return ["etcd", f"--listen-client-urls=http://127.0.0.1:{port}"]
