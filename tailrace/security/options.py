"""Command-line options for a process's TLS credentials."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from tailrace.security.credentials import UnusableCredentials
from tailrace.security.folder import CredentialFolder
from tailrace.security.roles import Role
from tailrace.security.transport import PLAIN, TlsTransport, Transport


def is_loopback(address: str) -> bool:
    """Return whether HOST:PORT is reachable from this machine only. `localhost` is the only name that
    counts."""
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def exposed(addresses: Iterable[str]) -> list[str]:
    """Return the addresses that are reachable from other machines."""
    return [address for address in addresses if not is_loopback(address)]


TLS_FOLDER: Final = "TAILRACE_TLS_DIR"

F = TypeVar("F", bound=Callable[..., Any])


def tls_option(function: F) -> F:
    """Add `--tls`; the command receives `tls`, a Path or None."""
    return click.option(
        "--tls",
        type=click.Path(file_okay=False, path_type=Path),
        envvar=TLS_FOLDER,
        metavar="DIR",
        help="Use mutual TLS, with the certificate in this folder (tailrace certs issue).",
    )(function)


def insecure_option(function: F) -> F:
    """Add `--insecure`; the command receives the flag `insecure`."""
    return click.option(
        "--insecure",
        is_flag=True,
        envvar="TAILRACE_INSECURE",
        help="Allow listening beyond loopback without authentication.",
    )(function)


def open_transport(folder: Path | None, roles: frozenset[Role]) -> Transport:
    """Open the transport of a process: unencrypted when `folder` is None, else mutual TLS.

    `roles`: the roles that the certificate may have. Raise click.ClickException.
    """
    if folder is None:
        return PLAIN
    try:
        return TlsTransport(CredentialFolder(folder, roles))
    except UnusableCredentials as error:
        raise click.ClickException(str(error)) from error
