"""`tailrace keys`: manage the API keys of tenants."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click
import msgspec
from rich.table import Table

from tailrace.bounded import shown
from tailrace.brief_help import WholeGroup
from tailrace.cli.errors import UsageProblem, file_errors
from tailrace.cli.output import Output, note, output_option, print_figures, print_json
from tailrace.numeric import RealRange, WholeRange
from tailrace.tenancy.file import KeyFileUnusable, locked_key_file, read_keys, readers_problem
from tailrace.tenancy.keys import EDGES, MAX_BURST_S, MAX_WEIGHT, MIN_BURST_S, MIN_WEIGHT, Tenant, TenantKeys

F = TypeVar("F", bound=Callable[..., Any])

_FILE: Final = "TAILRACE_API_KEYS"


@click.group(
    cls=WholeGroup,
    help="Users' API keys, in a file that front ends watch (--api-keys): no restart is needed.",
    epilog="Example: tailrace keys make team-a --requests-per-minute 600 --concurrency 50",
)
def keys() -> None:
    """A group."""


def _file_option(function: F) -> F:
    return click.option(
        "--file",
        type=click.Path(dir_okay=False, path_type=Path),
        envvar=_FILE,
        default=Path("keys.json"),
        show_default=True,
        metavar="FILE",
        help="File with tenants and hashes of keys.",
    )(function)


@keys.command()
@click.argument("tenant")
@click.option("--models", metavar="NAME[,..]", help="Models that it may use; '' for all.")
@click.option(
    "--requests-per-minute",
    type=RealRange(min=0),
    help="Each of a request's sequences (prompts times n) counts; 0: no limit.",
)
@click.option("--tokens-per-minute", type=RealRange(min=0), help="Prompt and output tokens; 0: no limit.")
@click.option(
    "--burst-seconds",
    type=RealRange(MIN_BURST_S, MAX_BURST_S),
    help="Seconds' worth of both rates that it may save up and use at once; default 60.",
)
@click.option("--concurrency", type=WholeRange(min=0), help="Concurrent sequences; 0: no limit.")
@click.option(
    "--priority",
    type=WholeRange(-(2**31), 2**31 - 1),
    help="Smaller values are served first, if engines order by priority.",
)
@click.option("--longest-prompt", type=WholeRange(min=0), help="In tokens; 0: no limit.")
@click.option(
    "--weight",
    type=RealRange(MIN_WEIGHT, MAX_WEIGHT),
    help="Its share relative to other waiting tenants, with --fair-backlog; default 1.",
)
@click.option(
    "--shared-cache",
    metavar="NAME",
    help="Tenants with the same NAME share cached prompts, and can tell what another has sent; '' (default): "
    "with nobody.",
)
@click.option("--no-key", is_flag=True, help="Only change the tenant's limits.")
@_file_option
def make(tenant: str, models: str | None, no_key: bool, file: Path, **limits: float | str | None) -> None:
    """Create a key for a tenant, and print it: it is never stored.

    The given limits apply to the tenant from now on, for all its keys.
    """
    changes: dict[str, Any] = {name: value for name, value in limits.items() if value is not None}
    if models is not None:
        changes["models"] = _names(models)
    if not tenant or len(tenant) > 100:
        raise UsageProblem("a tenant's name must have 1 to 100 characters")
    with file_errors(KeyFileUnusable), locked_key_file(file) as replace:
        tenant_keys = read_keys(file) if file.exists() else TenantKeys()
        before = tenant_keys.tenant(tenant)
        if no_key and before is None:
            raise UsageProblem(f"there is no tenant {tenant!r}")
        changed = msgspec.structs.replace(before or Tenant(name=tenant), **changes)
        tenant_keys = tenant_keys.with_tenant(changed)
        key = ""
        now = _now()
        tenant_keys = tenant_keys.with_edge_key(now)
        if not no_key:
            tenant_keys, key = tenant_keys.with_key(tenant, now)
        replace(tenant_keys)
        _note_readers(file)
    if key:
        note(f"{tenant}: new key, shown only once")
        click.echo(key)


def _names(models: str) -> tuple[str, ...]:
    """Return the names in a list with commas; none if the text is empty. Raise UsageProblem."""
    names = tuple(part.strip() for part in models.split(",")) if models else ()
    # A slip of the pen must not mean all models.
    if not all(names):
        raise UsageProblem(f"--models: {shown(models)} has an empty name; for all models give '' alone")
    return names


@keys.command("list")
@_file_option
@output_option()
def list_(file: Path, output: Output) -> None:
    """Show tenants, their limits and the IDs of their keys."""
    with file_errors(KeyFileUnusable):
        tenant_keys = read_keys(file)
        _note_readers(file)
    if output is Output.JSON:
        print_json(
            {
                "keys": [
                    {"key_id": key.key_id, "tenant": key.tenant, "created": key.created}
                    for key in tenant_keys.keys
                    if key.tenant
                ],
                "tenants": [msgspec.structs.asdict(tenant) for tenant in tenant_keys.tenants],
            }
        )
        return
    table = Table(
        "KEY",
        "TENANT",
        "CREATED",
        "MODELS",
        "REQ/MIN",
        "TOKENS/MIN",
        "BURST S",
        "AT A TIME",
        "PRIORITY",
        "PROMPT",
        "WEIGHT",
        "CACHE",
        box=None,
    )
    for key in tenant_keys.keys:
        if (tenant := tenant_keys.tenant(key.tenant)) is not None:
            table.add_row(key.key_id, tenant.name, key.created, *_limits(tenant))
    with_keys = {key.tenant for key in tenant_keys.keys}
    for tenant in tenant_keys.tenants:
        if tenant.name not in with_keys:
            table.add_row("-", tenant.name, "-", *_limits(tenant))
    print_figures(table)


def _limits(tenant: Tenant) -> list[str]:
    rates = (tenant.requests_per_minute, tenant.tokens_per_minute)
    shown = [", ".join(tenant.models) or "all", *(f"{rate:g}" if rate else "-" for rate in rates)]
    shown += [f"{tenant.burst_seconds:g}" if any(rates) else "-", str(tenant.concurrency or "-")]
    shown += [str(tenant.priority), str(tenant.longest_prompt or "-"), f"{tenant.weight:g}"]
    return [*shown, tenant.shared_cache or "own"]


@keys.command()
@click.argument("key_id")
@_file_option
def revoke(key_id: str, file: Path) -> None:
    """Revoke a key by its ID; front ends that can read the file refuse it within a second. Requests in
    progress continue, and the tenant keeps its limits for the next key.

    The ID `edges` replaces the key that edges show to vllm-rs.
    """
    with file_errors(KeyFileUnusable), locked_key_file(file) as replace:
        try:
            remaining = read_keys(file).without_key(key_id)
        except KeyError:
            raise UsageProblem(f"there is no key {key_id!r} (tailrace keys list)") from None
        # Without one, front ends with vllm-rs would not start.
        replace(remaining.with_edge_key(_now()) if key_id == EDGES else remaining)
        _note_readers(file)
    if key_id == EDGES:
        note(
            f"{key_id}: replaced; copy {file} to every edge and front end, then restart front ends with "
            "--front rust, which refuse all requests until then"
        )
    else:
        note(f"{key_id}: revoked")


@keys.command()
@click.argument("tenant")
@_file_option
def remove(tenant: str, file: Path) -> None:
    """Remove a tenant: revoke all its keys, and forget its limits."""
    with file_errors(KeyFileUnusable), locked_key_file(file) as replace:
        try:
            replace(read_keys(file).without_tenant(tenant))
        except KeyError:
            raise UsageProblem(f"there is no tenant {tenant!r} (tailrace keys list)") from None
        _note_readers(file)
    note(f"{tenant}: removed")


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _note_readers(file: Path) -> None:
    """Tell the operator if front ends may be unable to read the file. Raise OSError."""
    if problem := readers_problem(file):
        note(problem)
