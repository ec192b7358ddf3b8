"""Errors of commands: one line on stderr and an exit code (1 failure, 2 wrong usage, 3 not reachable now)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

import click
import grpc

from tailrace.service.channels import is_from_server


class CliError(click.ClickException):
    """The command failed. The message is one line for the user: the problem and what to do."""

    exit_code = 1

    def show(self, file: IO[Any] | None = None) -> None:
        """Write the line to stderr (or `file`)."""
        click.echo(f"tailrace: {self.message}", file=file, err=file is None)


class UsageProblem(CliError):
    """An argument or option is invalid."""

    exit_code = 2


class Unreachable(CliError):
    """The admin API did not answer, or cannot carry anything out at the moment: try again."""

    exit_code = 3


@contextmanager
def file_errors(*problems: type[Exception], path: Path | None = None) -> Iterator[None]:
    """Convert `problems`, whose messages are for users, and OSErrors of files to CliErrors.

    `path`: the file, if `problems` do not name it; nor do OSErrors of reading and writing an open file.
    """
    try:
        yield
    except problems as error:
        raise CliError(f"{path}: {error}" if path else str(error)) from error
    except OSError as error:
        raise CliError(f"{error.filename or path}: {error.strerror}") from error


def rpc_problem(error: grpc.RpcError, address: str, hint: str, diagnose: Callable[[], str]) -> CliError:
    """Return what a gRPC error means.

    `address`: address of the admin API; `hint`: what to do if the server refuses; `diagnose`: returns the
    reason if the connection failed, "" if unknown.
    """
    if not isinstance(error, grpc.Call):
        return CliError(f"the admin API at {address} failed: {error}")
    code, details = error.code(), _without_field((error.details() or "").strip().rstrip("."))
    match code:
        case grpc.StatusCode.UNAVAILABLE if is_from_server(error):
            # No scheduler can carry it out now, such as while another one takes over.
            return Unreachable(details)
        case grpc.StatusCode.UNAVAILABLE if problem := diagnose():
            return Unreachable(f"no connection to the admin API at {address}: {problem}")
        case grpc.StatusCode.UNAVAILABLE if details.endswith("Socket closed"):
            return Unreachable(
                f"the admin API at {address} closed the connection; does it require a certificate? (--tls)"
            )
        case grpc.StatusCode.PERMISSION_DENIED | grpc.StatusCode.UNAUTHENTICATED:
            return CliError(details)
        case grpc.StatusCode.UNAVAILABLE:
            return Unreachable(
                f"the admin API at {address} is unavailable ({details}); is the cluster up? (tailrace up)"
            )
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return Unreachable(f"the admin API at {address} did not respond in time; try again")
        case grpc.StatusCode.UNIMPLEMENTED:
            return Unreachable(
                f"what answers at {address} does not serve this: an older Tailrace scheduler, or something "
                "else, such as a proxy on the way"
            )
        case grpc.StatusCode.INVALID_ARGUMENT:
            return UsageProblem(_with_hint(details or "invalid argument", hint))
        case grpc.StatusCode.UNKNOWN | grpc.StatusCode.INTERNAL:
            detail = details or code.name.lower()
            return CliError(f"the admin API at {address} failed: {detail}; see the scheduler's log")
        case _:
            return CliError(_with_hint(details or code.name.lower().replace("_", " "), hint))


# Fields of the admin API with which its errors begin. Who types a command knows no fields, and the rest of
# the message quotes what was typed, unless that is missing.
_FIELDS: Final = frozenset(
    {"id", "instance_id", "name", "parameters", "request_id", "slo", "target_instance_id"}
)


def _without_field(details: str) -> str:
    """Return the details without the field that they begin with."""
    field, colon, reason = details.partition(": ")
    return reason if colon and field in _FIELDS and not reason.startswith("must") else details


def _with_hint(text: str, hint: str) -> str:
    return f"{text}; {hint}" if hint else text
