"""`tailrace serve console`: a page that shows the fleet, for operators. It needs the admin API alone."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

import click
from aiohttp import web

from console_svc.clusters import Clusters
from console_svc.web import Site
from tailrace.address import MalformedAddress, format_address, parse_address
from tailrace.bounded import read_regular
from tailrace.cli.admin import AdminAddress, admin_option, find_admin
from tailrace.security.audit import AuditFile
from tailrace.security.https import Https, UnusableCertificate
from tailrace.security.options import exposed, insecure_option
from tailrace.service.options import log_format_option
from tailrace.service.runtime import run_service
from tailrace.service.sockets import ListenError, listen_reason
from tailrace.service.tasks import Loop, supervised
from tailrace.telemetry.log_format import VARIABLE, log_as

log = logging.getLogger(__name__)

KIND: Final = "console"
_TOKEN_BYTES_MAX: Final = 4_096
_TOKEN_MIN: Final = 16
_BACKLOG: Final = 64
# Streams of snapshots end only when they are cut.
_CLOSE_S: Final = 0.5


@click.command(KIND)
@click.option(
    "--http", default="127.0.0.1:8081", show_default=True, metavar="HOST:PORT", help="Address of the page."
)
@click.option(
    "--token-file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Ask viewers for the token in this file, which is created if there is none.",
)
@click.option(
    "--ssl-certfile",
    type=click.Path(dir_okay=False, exists=True, path_type=Path),
    metavar="FILE",
    help="HTTPS with the certificate chain in this file.",
)
@click.option(
    "--ssl-keyfile",
    type=click.Path(dir_okay=False, exists=True, path_type=Path),
    metavar="FILE",
    help="The key of --ssl-certfile.",
)
@insecure_option
@admin_option
@log_format_option
def command(
    http: str,
    token_file: Path | None,
    ssl_certfile: Path | None,
    ssl_keyfile: Path | None,
    insecure: bool,
    admin: str | None,
    log_format: str,
) -> None:
    """Serve a page that shows the fleet and acts on it through the admin API.

    It also shows the clusters of models with a policy of their own. Whoever opens the page acts with the
    rights of the certificate in --tls. Beyond loopback, and with a certificate, it asks for a token
    (--token-file).
    """
    try:
        host, port = parse_address(http, min_port=0)
    except MalformedAddress as error:
        raise click.BadParameter(
            f"{http!r}: {str(error) or 'HOST:PORT expected'}", param_hint="--http"
        ) from error
    found = find_admin(admin)
    if token_file is None and not insecure:
        if exposed([http]):
            raise click.UsageError(
                f"{http} can be reached from other machines without authentication: give --token-file, "
                "listen on 127.0.0.1, or give --insecure"
            )
        if found.transport.encrypted:
            raise click.UsageError(
                "every user of this machine could act with the certificate in --tls: give --token-file, or "
                "--insecure"
            )
    https = _https(ssl_certfile, ssl_keyfile)
    token = _token(token_file) if token_file is not None else ""
    log_as(KIND, KIND)
    os.environ[VARIABLE] = log_format
    run_service(lambda _: serve(found, host, port, token, https))


def _token(file: Path) -> str:
    """Return the token in the file; create it if there is none. Raise click.ClickException."""
    try:
        try:
            with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as created:
                created.write(secrets.token_urlsafe(32) + "\n")
        except FileExistsError:
            pass
        token = read_regular(file, _TOKEN_BYTES_MAX).decode("ascii").strip()
    except OSError as error:
        raise click.ClickException(f"--token-file: {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise click.ClickException(
            f"--token-file: {file}: the token has other characters than ASCII's"
        ) from error
    if len(token) < _TOKEN_MIN:
        raise click.ClickException(
            f"--token-file: {file}: a token of at least {_TOKEN_MIN} characters expected"
        )
    return token


def _https(certificate: Path | None, key: Path | None) -> Https | None:
    """Return the TLS for browsers; None: none. Raise click.ClickException."""
    if (certificate is None) != (key is None):
        raise click.UsageError("--ssl-certfile and --ssl-keyfile go together")
    if certificate is None or key is None:
        return None
    try:
        return Https(certificate, key)
    except UnusableCertificate as error:
        raise click.ClickException(f"--ssl-certfile: {error}") from error


async def serve(admin: AdminAddress, host: str, port: int, token: str, https: Https | None) -> None:
    """Run the console until cancelled. Raise ListenError."""
    async with AsyncExitStack() as stack:
        clusters = Clusters(admin)
        await stack.enter_async_context(clusters.running())
        runner = web.AppRunner(
            Site(clusters, AuditFile(None), host, token).app(), access_log=None, shutdown_timeout=_CLOSE_S
        )
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        try:
            context = https.context if https is not None else None
            await web.TCPSite(runner, host, port, backlog=_BACKLOG, ssl_context=context).start()
        except OSError as error:
            raise ListenError.of("--http", format_address(host, port), listen_reason(error)) from error
        bound = runner.addresses[0]
        address = f"{'https' if https is not None else 'http'}://{format_address(bound[0], bound[1])}/"
        log.info("the console of %s is at %s", admin.text, address)
        loops: dict[str, Loop] = {} if https is None else {"certificate": https.follow}
        async with supervised(loops):
            await asyncio.get_running_loop().create_future()
