"""Connect to the admin API at `--admin`, TAILRACE_ADMIN, or the local cluster's address.

If the cluster uses TLS, the operator's certificate is from `--tls`, TAILRACE_TLS_DIR, or the local cluster.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import click
import grpc

from tailrace.address import MalformedAddress, parse_address
from tailrace.bounded import shown
from tailrace.cli.errors import CliError, Unreachable, UsageProblem, rpc_problem
from tailrace.local.certificates import OPERATOR, certificate_folder
from tailrace.local.state import RunFolderUnusable, RunState, find_state, none_here
from tailrace.security.diagnosis import handshake_problem
from tailrace.security.options import TLS_FOLDER, open_transport
from tailrace.security.roles import OPERATORS, Role
from tailrace.security.transport import TlsTransport, Transport
from tailrace.service.channels import MESSAGE_BYTES_MAX
from tailrace.suggestion import did_you_mean
from tailrace.v1.admin_pb2 import (
    InstanceInfo,
    ListInstancesRequest,
    ListPoliciesRequest,
    ListRequestsReply,
    ListRequestsRequest,
    ListServicesRequest,
    PolicyInfo,
    RequestInfo,
    ServiceInfo,
)
from tailrace.v1.admin_pb2_grpc import AdminStub
from tailrace.v1.migration_pb2 import ListMigrationsRequest, MigrationRecord

F = TypeVar("F", bound=Callable[..., Any])

_TLS: Final = "tailrace.cli.admin.tls"
_MODEL: Final = "tailrace.cli.admin.model"

CALL_TIMEOUT_S: Final = 5.0
"""Deadline of all non-streaming calls, in seconds."""
# Running requests are fetched so many at a time.
_PAGE: Final = 1_000


@dataclass(frozen=True, slots=True)
class Admin:
    """A connection to the admin API."""

    address: str
    stub: AdminStub
    transport: Transport

    @contextmanager
    def errors(self, hint: str = "") -> Iterator[None]:
        """Convert gRPC errors to one-line messages for the user. `hint`: what to do if the server refuses."""
        try:
            yield
        except grpc.RpcError as error:
            raise rpc_problem(error, self.address, hint, self._problem) from error

    def instances(self) -> Sequence[InstanceInfo]:
        """Return all instances."""
        return self.stub.ListInstances(ListInstancesRequest(), timeout=CALL_TIMEOUT_S).instances

    def services(self) -> Sequence[ServiceInfo]:
        """Return all services."""
        return self.stub.ListServices(ListServicesRequest(), timeout=CALL_TIMEOUT_S).services

    def policies(self) -> Sequence[PolicyInfo]:
        """Return the installed policies."""
        return self.stub.ListPolicies(ListPoliciesRequest(), timeout=CALL_TIMEOUT_S).policies

    def migrations(self, limit: int, request_id: str = "") -> Sequence[MigrationRecord]:
        """Return the latest migrations, of one request if it is named."""
        request = ListMigrationsRequest(request_id=request_id, limit=limit)
        return self.stub.ListMigrations(request, timeout=CALL_TIMEOUT_S).migrations

    def request_pages(
        self, listing: ListRequestsRequest, limit: int | None = None
    ) -> Iterator[ListRequestsReply]:
        """Yield the pages of a listing, at least one, with `limit` requests at most (None: all).

        The last one has no `next_page_token`.
        """
        request, left = ListRequestsRequest(), limit
        request.CopyFrom(listing)
        while True:
            request.page_size = _PAGE if left is None else min(left, _PAGE)
            reply = self.stub.ListRequests(request, timeout=CALL_TIMEOUT_S)
            if left is not None:
                left = max(0, left - len(reply.requests))
                if not left:
                    reply.next_page_token = ""
            yield reply
            if not reply.next_page_token:
                return
            request.page_token = reply.next_page_token

    def requests(self, listing: ListRequestsRequest, limit: int | None = None) -> Iterator[RequestInfo]:
        """Yield the requests on these pages, each as it arrives."""
        for page in self.request_pages(listing, limit):
            yield from page.requests

    def _problem(self) -> str:
        """Describe a problem with certificates as far as the client can detect it; empty: none."""
        if not isinstance(self.transport, TlsTransport):
            return ""
        credentials = self.transport.folder.current()
        problems = (handshake_problem(part, Role.SCHEDULER, credentials) for part in self.address.split(","))
        return next(filter(None, problems), "")


def admin_option(function: F) -> F:
    """Add `--admin`, `--tls` and `--model`. The command gets `--admin` as `admin`; `connect` reads the others
    itself."""
    function = click.option(
        "--model",
        # A command may have an argument `model`.
        "cluster_of",
        metavar="NAME",
        expose_value=False,
        callback=_keep_model,
        help="In the cluster of `tailrace up`: the model that is meant, if it has a policy of its own.",
    )(function)
    return address_option(function)


def address_option(function: F) -> F:
    """Add `--admin` and `--tls`. The command gets `--admin` as `admin`; `connect` reads `--tls` itself."""
    function = click.option(
        "--tls",
        type=click.Path(file_okay=False, path_type=Path),
        envvar=TLS_FOLDER,
        metavar="DIR",
        expose_value=False,
        callback=_keep_tls,
        help="Folder with your certificate, of role viewer or admin: ca.crt, tls.crt, tls.key.",
    )(function)
    return click.option(
        "--admin",
        envvar="TAILRACE_ADMIN",
        metavar="HOST:PORT[,..]",
        help="Admin API (a scheduler's address). Default: TAILRACE_ADMIN, or the cluster of `tailrace up`.",
    )(function)


@dataclass(frozen=True, slots=True)
class AdminAddress:
    """Where the admin API is, as a user wrote it and as gRPC takes it, and how to connect to it."""

    text: str
    target: str
    transport: Transport


def find_admin(admin: str | None, model: str | None = None) -> AdminAddress:
    """Return where the admin API at `admin` is; None: the local cluster's, or that of the model's cluster in
    it, by default the one that --model names. Raise CliError."""
    folder: Path | None = given_tls()
    model = model or _given(_MODEL)
    if admin and model:
        raise UsageProblem(
            "--model: chooses in the cluster of `tailrace up`; --admin (TAILRACE_ADMIN) does not"
        )
    if admin:
        address = admin
    else:
        state = _local_cluster()
        address = state.admin if model is None else _of_model(state, model)
        if folder is None and state.certificates:
            folder = Path(certificate_folder(state.certificates, OPERATOR.role.value, OPERATOR.name))
    try:
        transport = open_transport(folder, OPERATORS)
    except click.ClickException as error:
        raise CliError(f"--tls: {error.message}") from error
    return admin_address(address, transport)


def admin_address(text: str, transport: Transport) -> AdminAddress:
    """Return the admin API at HOST:PORT[,..]; of several, names are looked up. Raise CliError."""
    return AdminAddress(text, _target(text), transport)


# gRPC's default limit of 4 MiB corresponds to about 20,000 requests.
CHANNEL_OPTIONS: Final = (("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),)


@contextmanager
def connect(admin: str | None, model: str | None = None) -> Iterator[Admin]:
    """Connect to the admin API at `admin`; None: at the local cluster's address, see `find_admin`."""
    found = find_admin(admin, model)
    transport = found.transport
    with transport.blocking_channel(found.target, Role.SCHEDULER, CHANNEL_OPTIONS) as channel:
        yield Admin(found.text, AdminStub(channel), transport)


def given_tls() -> Path | None:
    """Return the folder of --tls, or of its environment variable."""
    folder: Path | None = _given(_TLS)
    return folder


def _given(name: str) -> Any:
    context = click.get_current_context(silent=True)
    return None if context is None else context.meta.get(name)


def _keep_tls(context: click.Context, parameter: click.Parameter, value: Path | None) -> None:
    context.meta[_TLS] = value


def _keep_model(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    context.meta[_MODEL] = value


def _of_model(state: RunState, model: str) -> str:
    """Return the address for a name that users send. Raise UsageProblem."""
    if address := state.models.get(model):
        return address
    known = ", ".join(state.models) or "none"
    raise UsageProblem(f"--model: {shown(model)} is none of {known}{did_you_mean(model, state.models)}")


def _local_cluster() -> RunState:
    try:
        state = find_state()
    except RunFolderUnusable as error:
        raise CliError(str(error)) from error
    if state is None or not state.admin:
        raise Unreachable(
            f"no admin API: {none_here()}. tailrace up starts one here, and --admin HOST:PORT (or "
            "TAILRACE_ADMIN) reaches any other"
        )
    return state


def _target(address: str) -> str:
    """Return gRPC's target for the address; of several schedulers, gRPC uses the first that answers."""
    parts = [part.strip() for part in address.split(",")]
    endpoints = [_parse(part) for part in parts]
    if len(parts) == 1:
        return parts[0]
    return _numeric_target(parts, endpoints)


def _parse(part: str) -> tuple[str, int]:
    try:
        return parse_address(part)
    except MalformedAddress as error:
        hint = f": {error}" if str(error) else " is not HOST:PORT"
        raise UsageProblem(f"--admin: {part!r}{hint}") from error


def _numeric_target(parts: list[str], endpoints: list[tuple[str, int]]) -> str:
    """Resolve the names, because gRPC takes several targets only as addresses of one family.

    Names that cannot be resolved are skipped. If there is an IPv6 address, IPv4 ones are mapped into IPv6.
    """
    targets: list[tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]] = []
    unknown: list[str] = []
    for part, (host, port) in zip(parts, endpoints, strict=True):
        try:
            infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            unknown.append(f"{part}: {error.strerror}")
        else:
            # IPv4 first: a name such as localhost has both, and a service often listens only there.
            hosts = sorted((str(info[4][0]) for info in infos), key=lambda text: ":" in text)
            targets.append((ipaddress.ip_address(hosts[0]), port))
    if not targets:
        raise Unreachable(f"no admin API: {'; '.join(unknown)}")
    if all(address.version == 4 for address, _ in targets):
        return "ipv4:" + ",".join(f"{address}:{port}" for address, port in targets)
    return "ipv6:" + ",".join(
        f"[::ffff:{address}]:{port}" if address.version == 4 else f"[{address}]:{port}"
        for address, port in targets
    )
