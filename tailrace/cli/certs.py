"""`tailrace certs`: manage the cluster's own authority and the certificates that it signs."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click
from rich.table import Table

from tailrace.brief_help import WholeGroup
from tailrace.cli.errors import UsageProblem, file_errors
from tailrace.cli.output import Output, note, output_option, print_figures, print_json
from tailrace.cli.plain import JsonValue
from tailrace.numeric import RealRange
from tailrace.security.authority import (
    AUTHORITY_DAYS,
    CERTIFICATE_DAYS,
    Authority,
    AuthorityProblem,
    Issued,
)
from tailrace.security.roles import Identity, NoIdentity, Role

F = TypeVar("F", bound=Callable[..., Any])

_FOLDER: Final = "TAILRACE_CERTS_DIR"


@click.group(
    cls=WholeGroup,
    help="Certificates with which services and operators authenticate to one another. You can also use "
    "certificates from elsewhere: docs/security.md lists what they must contain.",
    epilog="Example: tailrace certs init; tailrace certs issue worker worker-0",
)
def certs() -> None:
    """A group."""


def folder_option(function: F) -> F:
    """Add `--dir`, the folder of the authority."""
    return click.option(
        "--dir",
        "folder",
        type=click.Path(file_okay=False, path_type=Path),
        envvar=_FOLDER,
        default=Path("certs"),
        show_default=True,
        metavar="DIR",
        help="Where the authority's key and all certificates are stored; readable only by its owner.",
    )(function)


def _days_option(default: float) -> Callable[[F], F]:
    return click.option(
        "--days",
        type=RealRange(min=0, min_open=True, max=36_500),
        default=default,
        show_default=True,
        help="Days of validity.",
    )


@certs.command()
@folder_option
@_days_option(AUTHORITY_DAYS)
def init(folder: Path, days: float) -> None:
    """Create an authority for one cluster, and one for its etcd."""
    with file_errors(AuthorityProblem):
        authority = Authority.create(folder, days)
    note(
        f"authorities in {folder}, valid until {_day(authority.not_after)}; keep ca.key and etcd-ca.key on a "
        "machine without services"
    )


@certs.command()
@click.argument("role", type=click.Choice([role.value for role in Role]), metavar="ROLE")
@click.argument("name")
@click.option(
    "--host",
    "hosts",
    multiple=True,
    metavar="HOST",
    help="Name or address by which clients other than Tailrace's reach it (etcd members, a monitor that "
    "receives spans); can be repeated.",
)
@folder_option
@_days_option(CERTIFICATE_DAYS)
def issue(role: str, name: str, hosts: tuple[str, ...], folder: Path, days: float) -> None:
    """Create a key and a certificate; prints their folder, for use with --tls. A member's has a subfolder
    with those towards etcd."""
    try:
        identity = Identity(Role(role), name)
    except NoIdentity as error:
        raise UsageProblem(str(error)) from error
    with file_errors(AuthorityProblem):
        issued = Authority.load(folder).issue(identity, days, hosts)
    note(f"{identity}: valid until {_day(issued.not_after)}")
    click.echo(str(issued.folder))


@certs.command()
@folder_option
@_days_option(CERTIFICATE_DAYS)
def rotate(folder: Path, days: float) -> None:
    """Reissue every certificate. Services pick up theirs by themselves, and drop no stream."""
    with file_errors(AuthorityProblem):
        renewed = Authority.load(folder).rotate(days)
    for issued in renewed:
        note(f"{issued.identity}: valid until {_day(issued.not_after)}")


@certs.command("new-authority")
@folder_option
@_days_option(AUTHORITY_DAYS)
def new_authority(folder: Path, days: float) -> None:
    """Start replacing the cluster's and etcd's authorities: the old ones stay trusted, too.

    Next steps, after copying the folders to every process each time: tailrace certs rotate, tailrace certs
    retire-authority.
    """
    with file_errors(AuthorityProblem):
        authority = Authority.load(folder)
        authority.supersede(days)
    note(
        f"new authority, valid until {_day(authority.not_after)}; once every process has the new ca.crt: "
        "tailrace certs rotate"
    )


@certs.command("retire-authority")
@folder_option
def retire_authority(folder: Path) -> None:
    """Trust only the new authorities."""
    with file_errors(AuthorityProblem):
        Authority.load(folder).retire()
    note(
        "the older authorities are no longer trusted once every process has the new ca.crt; etcd's members "
        "and front ends with HTTPS (--ssl-ca-certs) trust them until you restart these"
    )


@certs.command("list")
@folder_option
@output_option()
def list_(folder: Path, output: Output) -> None:
    """Show the certificates and the authority, their expiry dates, and how many days are left."""
    with file_errors(AuthorityProblem):
        authority = Authority.load(folder)
        certificates = authority.issued()
    now = datetime.datetime.now(datetime.UTC)
    if not authority.separates_etcd:
        note("etcd has no authority of its own here: tailrace certs new-authority gives it one")
    if output is Output.JSON:
        print_json(
            {
                "authority": _validity(authority.not_after, now),
                "certificates": [_plain(issued, now) for issued in certificates],
            }
        )
        return
    table = Table("ROLE", "NAME", "VALID UNTIL", "DAYS LEFT", "HOSTS", "FOLDER", box=None)
    for issued in certificates:
        identity, end = issued.identity, issued.not_after
        hosts, days = " ".join(issued.hosts), _days_left(end, now)
        table.add_row(identity.role.value, identity.name, _day(end), days, hosts, str(issued.folder))
    end = authority.not_after
    table.add_row("authority", "", _day(end), _days_left(end, now), "", str(folder))
    print_figures(table)


def _plain(issued: Issued, now: datetime.datetime) -> dict[str, JsonValue]:
    return {
        "role": issued.identity.role.value,
        "name": issued.identity.name,
        **_validity(issued.not_after, now),
        "hosts": list(issued.hosts),
        "folder": str(issued.folder),
    }


def _validity(not_after: datetime.datetime, now: datetime.datetime) -> dict[str, JsonValue]:
    """Return when a certificate ends, and the days until then: negative if it has."""
    return {"not_after": not_after.isoformat(), "days_left": round(_days(not_after, now), 2)}


def _days(not_after: datetime.datetime, now: datetime.datetime) -> float:
    return (not_after - now) / datetime.timedelta(days=1)


def _days_left(not_after: datetime.datetime, now: datetime.datetime) -> str:
    days = _days(not_after, now)
    return f"{days:.1f}" if days > 0 else "expired"


def _day(time: datetime.datetime) -> str:
    return f"{time:%Y-%m-%d %H:%M:%SZ}"
