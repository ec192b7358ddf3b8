"""`tailrace profile`: measure the speed of instances for the policies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import click

from tailrace.cli.admin import Admin, admin_option, connect
from tailrace.cli.errors import CliError
from tailrace.cli.output import Output, note, output_option, print_figures, print_json
from tailrace.cli.plain import to_plain_list
from tailrace.cli.tables import PROFILES
from tailrace.numeric import Duration
from tailrace.v1.admin_pb2 import AdminProfileRequest
from tailrace.v1.profile_pb2 import MeasuredProfile
from tailrace.v1.types_pb2 import INSTANCE_STATE_SUSPECT

# Time beyond the budget for a step in progress, the fits and etcd.
_MARGIN_S: Final = 60.0
_HINT: Final = "tailrace get instances lists them"


@click.command(epilog="Example: tailrace profile worker-0 -o json")
@click.argument("instances", metavar="[INSTANCE]...", nargs=-1)
@click.option(
    "--force",
    is_flag=True,
    help="Profile even if it carries requests: they get slower, and the results less accurate.",
)
@click.option(
    "--budget",
    "budget_s",
    type=Duration(min=1, max=600),
    default=60.0,
    show_default=True,
    help="Maximum seconds per instance; more time allows longer prompts and larger batches.",
)
@output_option()
@admin_option
def profile(
    instances: tuple[str, ...], force: bool, budget_s: float, output: Output, admin: str | None
) -> None:
    """Profile the speed of each INSTANCE; by default, an idle one of each kind.

    The profile is stored in etcd for all instances of the kind (model, engine, hardware), and policies use it
    at once. An instance that carries requests is refused, and a user's request that arrives in the meantime
    stops the profiling: tailrace drain keeps them away. Progress goes to stderr.
    """
    with connect(admin) as connection, connection.errors(_HINT):
        names = instances or _one_of_each_kind(connection)
        profiles = [_measured(connection, name, force, budget_s) for name in names]
    if output is Output.JSON:
        print_json({PROFILES.name: to_plain_list(profiles)})
    else:
        print_figures(PROFILES.table(profiles))


def _one_of_each_kind(connection: Admin) -> Sequence[str]:
    """Return the least loaded instance of each kind. Raise CliError if there is none."""
    first: dict[str, str] = {}
    for info in sorted(connection.instances(), key=lambda i: (i.running + i.waiting, i.instance_id)):
        if info.state != INSTANCE_STATE_SUSPECT and info.profile_kind:
            first.setdefault(info.profile_kind, info.instance_id)
    if not first:
        raise CliError("no instance to profile: there is none, or all have a fixed profile (--profile)")
    return sorted(first.values())


def _measured(connection: Admin, name: str, force: bool, budget_s: float) -> MeasuredProfile:
    request = AdminProfileRequest(instance_id=name, force=force, budget_s=budget_s)
    for event in connection.stub.Profile(request, timeout=budget_s + _MARGIN_S):
        if event.message:
            note(f"{name}: {event.message}")
        if event.HasField("profile"):
            return event.profile
    raise CliError(f"{name}: the stream of events ended without a profile; see the worker's log")
