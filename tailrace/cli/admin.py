"""Reach the admin API: `--admin`, TAILRACE_ADMIN, or the local cluster's run folder."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import click
import grpc

from tailrace.cli.errors import CliError, Unreachable, UsageProblem, rpc_errors
from tailrace.local.state import RunFolderUnusable, find_state
from tailrace.service.channels import MESSAGE_BYTES_MAX
from tailrace.v1.admin_pb2_grpc import AdminStub

F = TypeVar("F", bound=Callable[..., Any])

CALL_TIMEOUT_S: Final = 5.0
"""Deadline of every call that is not a stream."""


@dataclass(frozen=True, slots=True)
class Admin:
    """A connection to the admin API."""

    address: str
    stub: AdminStub

    @contextmanager
    def errors(self, hint: str = "") -> Iterator[None]:
        """Turn gRPC errors of the block into one line for the user."""
        with rpc_errors(self.address, hint):
            yield


def admin_option(function: F) -> F:
    """Add `--admin`; the command gets its value as `admin`."""
    return click.option(
        "--admin",
        envvar="TAILRACE_ADMIN",
        metavar="HOST:PORT[,..]",
        help="Admin API (a scheduler's address). Default: TAILRACE_ADMIN, else the cluster of `tailrace up`.",
    )(function)


@contextmanager
def connect(admin: str | None) -> Iterator[Admin]:
    """Open the admin API at `admin`, or at the local cluster's address when that is None."""
    address = admin or _local_address()
    # gRPC's own limit of 4 MiB is some 20,000 requests.
    options = [("grpc.max_receive_message_length", MESSAGE_BYTES_MAX)]
    with grpc.insecure_channel(_target(address), options=options) as channel:
        yield Admin(address, AdminStub(channel))


def _local_address() -> str:
    try:
        state = find_state()
    except RunFolderUnusable as error:
        raise CliError(str(error)) from error
    if state is None or not state.admin:
        raise Unreachable(
            "no admin API: no local cluster runs here (tailrace up starts one); "
            "for another cluster give --admin HOST:PORT or set TAILRACE_ADMIN"
        )
    return state.admin


def _target(address: str) -> str:
    """What gRPC dials: of several schedulers, the first that answers."""
    parts = [part.strip() for part in address.split(",")]
    for part in parts:
        host, colon, port = part.rpartition(":")
        if not (colon and host and port.isdigit() and 0 < int(port) < 65536):
            raise UsageProblem(f"--admin: {part!r} is not HOST:PORT")
    return parts[0] if len(parts) == 1 else "ipv4:" + ",".join(_addresses(parts))


def _addresses(parts: list[str]) -> list[str]:
    """gRPC takes several only as IPv4 addresses. Those whose names nobody knows now are left out."""
    found: list[str] = []
    unknown: list[str] = []
    for part in parts:
        host, _, port = part.rpartition(":")
        try:
            infos = socket.getaddrinfo(host, int(port), socket.AF_INET, socket.SOCK_STREAM)
            found.append(f"{infos[0][4][0]}:{port}")
        except OSError as error:
            unknown.append(f"{part}: {error.strerror}")
    if not found:
        raise Unreachable(f"no admin API: {'; '.join(unknown)}")
    return found
