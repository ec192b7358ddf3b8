"""Command-line options that every service has, and types and errors of options that several have."""

from __future__ import annotations

import functools
import ipaddress
import os
import re
import socket
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click

from tailrace.address import MalformedAddress, parse_address, parse_endpoints
from tailrace.security.options import exposed, insecure_option, open_transport, tls_option
from tailrace.security.roles import Role
from tailrace.security.transport import PLAIN, Transport
from tailrace.telemetry.log_format import FORMATS, VARIABLE, log_as

_BRACKETED: Final = re.compile(r"\[[^\[\]]+\]")


@dataclass(frozen=True, slots=True)
class CommonOptions:
    """How a service finds the cluster and is found in it."""

    etcd: tuple[str, ...]
    cluster: str
    listen: str
    metrics: str
    # The member's name; stays the same over restarts.
    member_id: str
    # Host under which others reach this process; empty: the one it listens on.
    advertise: str
    transport: Transport = PLAIN
    # Whether it may listen beyond loopback without TLS.
    insecure: bool = False

    def advertised(self, address: str) -> str:
        """Return HOST:PORT to register for an address listened on. A wildcard host becomes this machine's
        name."""
        host, _, port = address.rpartition(":")
        if self.advertise:
            host = self.advertise
        elif host in ("0.0.0.0", "[::]", "*", ""):
            host = socket.gethostname()
        return f"{host}:{port}"

    def check_exposed(self, *addresses: str) -> None:
        """Refuse to listen where others can connect without authentication. Raise click.UsageError."""
        if self.insecure or self.transport.encrypted:
            return
        if open_to_all := exposed(addresses):
            raise click.UsageError(
                f"{', '.join(open_to_all)} can be reached from other machines without authentication: give "
                "--tls (tailrace certs makes certificates), listen on 127.0.0.1, or give --insecure"
            )


def new_incarnation() -> str:
    """Return a new incarnation id, which distinguishes this run of a process from any other."""
    return uuid.uuid4().hex


@contextmanager
def file_of(option: str) -> Iterator[None]:
    """Open the file of `option` (such as --journal) in the block: its OSError becomes one that names both."""
    try:
        yield
    except OSError as error:
        named = f"{error.filename}: {error.strerror}" if error.filename is not None else str(error)
        raise OSError(f"{option}: {named}") from error


log_format_option = click.option(
    "--log-format",
    envvar=VARIABLE,
    show_envvar=True,
    type=click.Choice(FORMATS),
    default=FORMATS[0],
    show_default=True,
    help="json: each line of the log is an object, also those of vLLM.",
)


def common_options(kind: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the common options to a click command, whose function gets them first, as CommonOptions.

    @click.command("monitor")
    @common_options("monitor")
    @click.option("--patience", default=2.0)
    def command(common: CommonOptions, patience: float) -> None: ...
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def wrapper(
            *,
            etcd: tuple[str, ...],
            cluster: str,
            listen: str,
            metrics: str,
            member_id: str | None,
            advertise: str,
            tls: Path | None,
            insecure: bool,
            log_format: str,
            **rest: object,
        ) -> None:
            common = CommonOptions(
                etcd=etcd,
                cluster=cluster,
                listen=listen,
                metrics=metrics,
                member_id=member_id or f"{kind}-{uuid.uuid4().hex[:8]}",
                advertise=advertise,
                transport=open_transport(tls, frozenset({Role(kind)})),
                insecure=insecure,
            )
            common.check_exposed(listen, metrics)
            log_as(kind, common.member_id)
            os.environ[VARIABLE] = log_format
            function(common, **rest)

        return _with_options(wrapper)

    return decorate


def _address(context: click.Context, parameter: click.Parameter, value: str) -> str:
    """Validate HOST:PORT."""
    try:
        parse_address(value, min_port=0)
    except MalformedAddress as error:
        raise click.BadParameter(f"{value!r}: {str(error) or 'HOST:PORT expected'}") from error
    return value


def _host(context: click.Context, parameter: click.Parameter, value: str) -> str:
    """Validate HOST, without a port; return an IPv6 address in brackets."""
    host = value[1:-1] if _BRACKETED.fullmatch(value) else value
    try:
        address = ipaddress.ip_address(host)
    except ValueError as error:
        if re.search(r"[\s:/\[\]]", value):
            raise click.BadParameter(
                f"{value!r}: a host name or an address without a port expected"
            ) from error
        return value
    return f"[{host}]" if address.version == 6 else host


def _endpoints(context: click.Context, parameter: click.Parameter, value: str) -> tuple[str, ...]:
    """Validate HOST:PORT[,..]."""
    try:
        return tuple(map(str, parse_endpoints(part.strip() for part in value.split(","))))
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


def _name(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Validate a name that becomes part of an etcd key."""
    if value is not None and (not value or "/" in value or len(value) > 100):
        raise click.BadParameter("1 to 100 characters without '/' expected")
    return value


def _with_options(function: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(
        [
            click.option(
                "--etcd",
                envvar="TAILRACE_ETCD",
                default="127.0.0.1:2379",
                show_default=True,
                metavar="HOST:PORT[,..]",
                callback=_endpoints,
                help="etcd endpoints.",
            ),
            click.option(
                "--cluster",
                envvar="TAILRACE_CLUSTER",
                default="default",
                show_default=True,
                callback=_name,
                help="Name of the cluster; several clusters can share an etcd.",
            ),
            click.option(
                "--listen",
                default="127.0.0.1:0",
                show_default=True,
                metavar="HOST:PORT",
                callback=_address,
                help="gRPC address; port 0: any free port.",
            ),
            click.option(
                "--metrics",
                default="127.0.0.1:0",
                show_default=True,
                metavar="HOST:PORT",
                callback=_address,
                help="HTTP address of /metrics; port 0: any free port.",
            ),
            click.option(
                "--id",
                "member_id",
                metavar="ID",
                callback=_name,
                help="ID in the cluster; generated by default.",
            ),
            tls_option,
            insecure_option,
            click.option(
                "--advertise",
                envvar="TAILRACE_ADVERTISE",
                default="",
                metavar="HOST",
                callback=_host,
                help="Host by which others reach this process, if not the one it listens on.",
            ),
            log_format_option,
        ]
    ):
        function = option(function)
    return function
