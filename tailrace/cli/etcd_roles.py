"""`tailrace etcd-roles`: show or set up the services' rights in etcd."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click
from rich.table import Table

from tailrace.address import parse_endpoints
from tailrace.cli.errors import CliError, UsageProblem
from tailrace.cli.output import Output, note, output_option, print_figures, print_json
from tailrace.cli.plain import JsonValue
from tailrace.security.options import open_transport, tls_option
from tailrace.security.roles import Role, etcd_user
from tailrace.security.transport import Transport
from tailrace.store.client import EtcdClient, Rejected, StoreUnavailable
from tailrace.store.etcd_roles import Rights, apply_rights, etcd_rights, role_name


@click.command(
    "etcd-roles",
    epilog="Example: tailrace etcd-roles --apply --etcd etcd-0:2379 --tls certs/issued/etcd-root/me",
)
@click.option(
    "--apply", "set_up", is_flag=True, help="Create users and roles in etcd, and enable authentication."
)
@click.option(
    "--etcd",
    envvar="TAILRACE_ETCD",
    default="127.0.0.1:2379",
    show_default=True,
    metavar="HOST:PORT[,..]",
    help="etcd endpoints.",
)
@click.option("--cluster", envvar="TAILRACE_CLUSTER", default="default", show_default=True, help="Its name.")
@tls_option
@output_option()
def etcd_roles(set_up: bool, etcd: str, cluster: str, tls: Path | None, output: Output) -> None:
    """Show the minimum rights that each service needs in etcd; with --apply, set them up.

    A service's etcd user is its certificate's common name. --apply requires a certificate of role etcd-root.
    """
    rights = etcd_rights(cluster)
    if set_up:
        try:
            endpoints = [*map(str, parse_endpoints(part.strip() for part in etcd.split(",")))]
        except ValueError as error:
            raise UsageProblem(str(error)) from error
        if tls is None:
            raise UsageProblem("--apply requires --tls with a certificate of role etcd-root")
        transport = open_transport(tls, frozenset({Role.ETCD_ROOT}))
        try:
            changes = asyncio.run(_apply(endpoints, transport, rights, cluster))
        except (StoreUnavailable, Rejected) as error:
            raise CliError(str(error)) from error
        for change in changes or ["nothing to change"]:
            note(change)
    if output is Output.JSON:
        print_json({"rights": [_plain(role_rights, cluster) for role_rights in rights]})
        return
    table = Table("USER", "ROLE", "READS", "READS AND WRITES", box=None)
    for role_rights in rights:
        table.add_row(
            etcd_user(role_rights.role),
            role_name(role_rights.role, cluster),
            "\n".join(role_rights.reads),
            "\n".join(role_rights.writes),
        )
    print_figures(table)


async def _apply(endpoints: list[str], transport: Transport, rights: list[Rights], cluster: str) -> list[str]:
    client = EtcdClient(parse_endpoints(endpoints), transport)
    try:
        return await apply_rights(client, rights, cluster)
    finally:
        await client.close()


def _plain(rights: Rights, cluster: str) -> dict[str, JsonValue]:
    return {
        "user": etcd_user(rights.role),
        "role": role_name(rights.role, cluster),
        "reads": list(rights.reads),
        "reads_and_writes": list(rights.writes),
    }
