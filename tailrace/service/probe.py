"""`python -m tailrace.service.probe HOST:PORT`: check whether that service is healthy, for containers and
units.

Uses the standard gRPC health check and optionally an HTTP URL. Exit codes: 0 healthy, 1 unhealthy, 2 wrong
usage.
"""

from __future__ import annotations

import http.client
import ssl
import sys
import urllib.error
import urllib.request
from http import HTTPStatus
from http.client import HTTPResponse
from pathlib import Path
from typing import cast

import click
import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from tailrace.numeric import Duration
from tailrace.security.options import open_transport, tls_option
from tailrace.security.roles import MEMBERS, Role
from tailrace.security.transport import PLAIN, TlsTransport, Transport


class Unhealthy(Exception):
    """Why the service is unhealthy, for people."""


@click.command()
@click.argument("address", metavar="HOST:PORT")
@click.option("--service", default="", metavar="NAME", help="Full name of one gRPC service.  [default: all]")
@click.option("--http", "url", metavar="URL", help="Also GET this; anything but 200 is unhealthy.")
@click.option(
    "--timeout",
    type=Duration(min=0, min_open=True),
    default=3.0,
    show_default=True,
    metavar="SECONDS",
    help="For each of the two.",
)
@tls_option
@click.option(
    "--role",
    type=click.Choice(sorted(role.value for role in MEMBERS)),
    help="What the service is, where it has a certificate.  [default: of the role of one's own]",
)
def main(
    address: str, service: str, url: str | None, timeout: float, tls: Path | None, role: str | None
) -> None:
    """Say whether the service at HOST:PORT is healthy."""
    transport = open_transport(tls, frozenset(Role))
    try:
        check_grpc(address, service, timeout, transport, _role(transport, role))
        if url is not None:
            check_http(url, timeout)
    except Unhealthy as why:
        click.echo(str(why), err=True)
        sys.exit(1)
    click.echo("healthy")


def _role(transport: Transport, role_name: str | None) -> Role:
    """Return the given role, or this process's own: mostly a process probes itself."""
    if role_name is None and isinstance(transport, TlsTransport):
        return transport.folder.current().identity.role
    return Role(role_name) if role_name is not None else Role.WORKER


def check_grpc(
    address: str,
    service: str,
    timeout_s: float,
    transport: Transport = PLAIN,
    role: Role = Role.WORKER,
) -> None:
    """Raise Unhealthy unless the health service at HOST:PORT reports SERVING within the time.

    `role`: of the process there; irrelevant without TLS.
    """
    with transport.blocking_channel(address, role, ()) as channel:
        try:
            reply = HealthStub(channel).Check(HealthCheckRequest(service=service), timeout=timeout_s)
        except grpc.RpcError as error:
            reason = error.code().name if isinstance(error, grpc.Call) else str(error)
            raise Unhealthy(f"{address}: {reason}") from error
    if reply.status != HealthCheckResponse.SERVING:
        raise Unhealthy(f"{address}: {HealthCheckResponse.ServingStatus.Name(reply.status)}")


def get_directly(url: str, timeout_s: float, context: ssl.SSLContext | None = None) -> HTTPResponse:
    """GET a URL of the fleet, whatever proxy the environment names for the world outside. `context`: for
    https.

    Raise urllib.error.HTTPError for a status from 400 on, OSError, ValueError or http.client.HTTPException.
    """
    direct = urllib.request.ProxyHandler({})
    opener = urllib.request.build_opener(direct, urllib.request.HTTPSHandler(context=context))
    return cast(HTTPResponse, opener.open(url, timeout=timeout_s))


def check_http(url: str, timeout_s: float, context: ssl.SSLContext | None = None) -> None:
    """Raise Unhealthy unless a GET of the URL returns 200 within the time. `context`: for https."""
    try:
        with get_directly(url, timeout_s, context) as reply:
            status = reply.status
    except urllib.error.HTTPError as error:
        status = error.code
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise Unhealthy(f"{url}: {error}") from error
    if status != HTTPStatus.OK:
        raise Unhealthy(f"{url}: HTTP {status}")


if __name__ == "__main__":
    main()
