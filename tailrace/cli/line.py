"""A `vllm serve` line as a whole cluster takes it: what goes to workers, to front ends, and to both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import click

from tailrace.cli.errors import UsageProblem
from tailrace.cli.serve import service_command
from tailrace.local.options import ClusterOptions, Engine
from tailrace.service.vllm_line import VllmLine, VllmLineError, flag_arguments, read_line, split_options
from tailrace.tiny import MODEL_PATH

TINY_ARGUMENTS: Final = ("--kv-blocks", "4096")
"""A small KV cache for the shipped model, which still holds a dozen of its longest answers."""

# Options of services that follow from the others here.
_SET_HERE: Final = frozenset(
    {"--advertise", "--cluster", "--count", "--etcd", "--http", "--id", "--ipc", "--listen", "--metrics"}
)
_SPAN: Final = "tailrace serve worker and tailrace serve ranks start an engine on several machines"
# Flags of vLLM's that a cluster has another word for.
NOT_LOCAL: Final = {
    "data_parallel_size": "replicas are workers (--workers N); ranks that share experts are started by "
    "tailrace serve worker",
    "data_parallel_rank": "each rank is started by tailrace serve worker",
    "master_addr": _SPAN,
    "nnodes": _SPAN,
    "node_rank": _SPAN,
}


def with_line(options: ClusterOptions, arguments: Sequence[str]) -> ClusterOptions:
    """Return the options with the rest of the command line in its places. Raise UsageProblem or CliError."""
    worker, frontend, rest = split_line(arguments, click.get_current_context())
    line = read_line(rest, options.model)
    if mistaken := _SET_HERE & {word.partition("=")[0] for word in (*worker, *frontend)}:
        raise UsageProblem(f"{min(mistaken)}: tailrace up sets it")
    for name in line.flags.keys() & NOT_LOCAL.keys():
        raise UsageProblem(f"--{name.replace('_', '-')}: {NOT_LOCAL[name]}")
    model = options.model or line.model or str(MODEL_PATH)
    options = replace(options, model=model, line=line.without("model"), frontend_arguments=tuple(frontend))
    vllm = options.engine is Engine.VLLM
    tiny = TINY_ARGUMENTS if vllm and options.serves_tiny_model else ()
    ranks = ranks_of(options.line) if vllm else 1
    return replace(options, worker_arguments=(*tiny, *worker), ranks=ranks)


def arguments_of(flags: Mapping[str, object]) -> list[str]:
    """Return flags by name, as a file has them, as a command line has them."""
    contexts = [click.Context(service_command(name)) for name in ("worker", "frontend")]
    options = [each for context in contexts for each in context.command.get_params(context)]
    several = [each for each in options if isinstance(each, click.Option) and each.multiple]
    repeated = {name for each in several for name in each.opts}
    arguments: list[str] = []
    for name, value in flags.items():
        flag = name.lstrip("-")
        each = value if isinstance(value, list) and f"--{flag}" in repeated else [value]
        arguments += [word for one in each for word in flag_arguments({flag: one})]
    return arguments


def ranks_of(line: VllmLine) -> int:
    """Return the number of devices of a worker. Raise UsageProblem."""
    return count(line, "tensor_parallel_size", 1) * count(line, "pipeline_parallel_size", 1)


def count(line: VllmLine, name: str, default: int) -> int:
    """Return the value of a flag that takes a number. Raise UsageProblem."""
    try:
        return line.count(name, default)
    except VllmLineError as error:
        raise UsageProblem(str(error)) from error


def split_line(
    arguments: Sequence[str], parent: click.Context
) -> tuple[Sequence[str], Sequence[str], Sequence[str]]:
    """Return those of workers and of front ends, checked as these services do, and the rest."""
    if not arguments:
        return (), (), ()  # loading the services' commands takes a second
    commands = [service_command(name) for name in ("worker", "frontend")]
    (worker, frontend), rest = split_options(
        arguments, [click.Context(each, parent=parent) for each in commands]
    )
    for command, own in zip(commands, (worker, frontend), strict=True):
        command.make_context(command.name, list(own), parent)
    return worker, frontend, rest
