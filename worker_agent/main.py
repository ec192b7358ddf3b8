"""`tailrace serve worker`: its command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import click

from tailrace.numeric import WholeRange
from tailrace.service.options import CommonOptions, common_options
from tailrace.service.runtime import run_service
from tailrace.service.settings import settings_options
from tailrace.service.vllm_line import VllmCommand, read_line
from worker_agent.engine.errors import EngineSettingError
from worker_agent.network import untrusted_reason
from worker_agent.parallel.node_span import worker_span
from worker_agent.settings import EngineOptionError, EngineOptions, WorkerSettings, with_flags

KIND: Final = "worker"


@click.command("worker", cls=VllmCommand)
@common_options(KIND)
@settings_options(EngineOptions, "options")
@settings_options(WorkerSettings, "settings")
@click.option(
    "--count",
    type=WholeRange(1, 1000),
    default=1,
    show_default=True,
    help="Workers in this process (simulated only); --id worker-5 starts worker-5, worker-6, ...",
)
def command(
    common: CommonOptions,
    options: EngineOptions,
    settings: WorkerSettings,
    count: int,
    arguments: Sequence[str],
) -> None:
    """Run an engine as a member of the fleet.

    Takes any flag of `vllm serve`; those of the API server alone have no effect here.
    """
    line = read_line(arguments, options.model)
    if settings.kv_address is not None:
        common.check_exposed(f"{settings.kv_address}:0")
    if count > 1 and options.kind != "simulated":
        raise click.UsageError(
            "--count is only for simulated engines: run each vLLM worker in its own process"
        )
    if options.simulated and options.kind != "simulated":
        raise click.UsageError("--sim is only for simulated engines (--engine simulated)")
    if count > 1 and settings.stream_port:
        raise click.UsageError("--stream-port cannot be combined with --count")
    try:
        options = with_flags(options, line)
        if options.kind == "vllm":
            _check_span(options.arguments, common.insecure)
    except (EngineOptionError, EngineSettingError) as error:
        raise click.UsageError(str(error)) from error
    # Only now, since it imports the transport: whoever reads these options alone need not have it.
    from worker_agent.serving import serve_or_log_error

    run_service(lambda shutdown: serve_or_log_error(common, options, count, settings, shutdown))


def _check_span(arguments: Mapping[str, object], insecure: bool) -> None:
    """Raise EngineSettingError if the settings of an engine on several machines do not fit together, and
    EngineOptionError if others could take part in it, or in a data-parallel deployment."""
    span = worker_span(arguments)
    meetings = [] if span is None else [span.meeting]
    if arguments.get("data_parallel_size", 1) != 1:
        # vLLM's default is a loopback address.
        address = str(arguments.get("data_parallel_address", "127.0.0.1"))
        port = arguments.get("data_parallel_rpc_port", 0)
        meetings.append(f"{f'[{address}]' if ':' in address else address}:{port}")
    for meeting in meetings:
        if not insecure and (reason := untrusted_reason(meeting)):
            raise EngineOptionError(reason)
