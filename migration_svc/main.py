"""`tailrace serve migration`: opens, limits, journals, commits and aborts migrations."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Final

import click

from migration_svc.journal import Journal
from migration_svc.metrics import MigrationMetrics
from migration_svc.migration import CopyRules
from migration_svc.runs import History, Runs
from migration_svc.servicer import MigrationServicer
from migration_svc.slots import MigrationSlots
from migration_svc.traces import MigrationTraces
from tailrace.handover import MIGRATE_MAX_S, SETTLE_S, TRANSFERS
from tailrace.numeric import WholeRange
from tailrace.service.options import CommonOptions, common_options, file_of
from tailrace.service.runtime import Shutdown, open_service, run_service
from tailrace.service.server import Servicer, serve_grpc
from tailrace.service.settings import settings_options
from tailrace.v1.migration_pb2_grpc import add_MigrationServicer_to_server

log = logging.getLogger(__name__)

KIND: Final = "migration"
# Time for resigning leadership, beyond what migrations may take.
_MARGIN_S: Final = 10.0


@click.command("migration")
@common_options(KIND)
@click.option(
    "--journal",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Journal of open migrations that survives a restart; none: no journal.",
)
@click.option(
    "--limit",
    type=WholeRange(min=1),
    default=TRANSFERS,
    show_default=True,
    help="Maximum open migrations per instance in each direction.",
)
@click.option(
    "--queue",
    type=WholeRange(min=1),
    default=64,
    show_default=True,
    help="Maximum migrations waiting for a slot of one instance in one direction.",
)
@settings_options(CopyRules, "rules")
def command(common: CommonOptions, journal: Path | None, limit: int, queue: int, rules: CopyRules) -> None:
    """Execute migrations; run a second service as a standby."""
    if (longest_s := 2 * rules.room_wait_s + rules.timeout_s + SETTLE_S) > MIGRATE_MAX_S:
        raise click.UsageError(
            f"--patience (twice) and --timeout: with {SETTLE_S:g} s for its end a migration may take "
            f"{longest_s:g} s, and schedulers wait {MIGRATE_MAX_S:g} s"
        )
    slots = MigrationSlots(limit, queue, rules.room_wait_s)
    run_service(lambda shutdown: serve(common, journal, slots, rules, shutdown))


async def serve(
    common: CommonOptions,
    journal_path: Path | None,
    slots: MigrationSlots,
    rules: CopyRules,
    shutdown: Shutdown,
) -> None:
    """Run the migration service until cancelled. Raise StoreUnavailable, ListenError or OSError."""
    async with open_service(KIND, common) as service:
        with file_of("--journal"):
            journal = Journal(journal_path)
        history = History()
        metrics = MigrationMetrics(service.registry, lambda: len(runs), lambda: slots.waiting)
        members = service.members

        def keep_models() -> None:
            metrics.keep_models({record.model for record in members.instances.values()})

        keep_models()
        members.add_listener(keep_models)
        traces = MigrationTraces(service.tracing)
        runs = Runs(service.channels, slots, journal, history, metrics, traces, rules)
        servicer = MigrationServicer(runs, history, lambda: members.instances)
        services = [Servicer(add_MigrationServicer_to_server, servicer, "tailrace.v1.Migration")]
        try:
            await runs.clean_up()
            async with (
                serve_grpc(common.listen, services, common.transport) as server,
                await service.stand(server.address) as membership,
            ):

                async def drain() -> None:
                    await server.set_serving(False)
                    # Two admitting services would exceed the limit: this one stops admitting before it
                    # resigns.
                    runs.stop_admitting()
                    await membership.aclose()
                    await runs.wait()

                waits_s = slots.max_wait_s + rules.room_wait_s
                with shutdown.draining(drain, waits_s + rules.timeout_s + SETTLE_S + _MARGIN_S):
                    try:
                        await asyncio.get_running_loop().create_future()
                    finally:
                        await membership.aclose()
                        await runs.close()
        finally:
            journal.close()
