"""`tailrace up`: start a complete cluster on this machine."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import click
from click.core import ParameterSource

from tailrace.cli.errors import CliError, UsageProblem
from tailrace.cli.output import note
from tailrace.cli.serve import service_command
from tailrace.local.certificates import ETCD_SERVER, certificate_folder, issue_certificates
from tailrace.local.options import MONITOR_TRACES, ClusterOptions, Engine
from tailrace.local.plan import Plan, make_plan
from tailrace.local.ports import PortUnavailable, free_ports, require_free
from tailrace.local.process import PartFailed, PartRefused, stop_parts
from tailrace.local.progress import make_progress
from tailrace.local.requirements import Missing, loses_precision, require_installed, visible_gpus
from tailrace.local.start import Starter
from tailrace.local.state import RunFolder, RunFolderBusy, RunFolderUnusable, RunState
from tailrace.model_folder import (
    TOKENIZER_FLAGS,
    ModelFolderError,
    has_chat_template,
    require_model,
    require_tokenizer,
)
from tailrace.numeric import WholeRange
from tailrace.policy.parameters import ParameterError, read_assignments
from tailrace.policy.registry import UnknownPolicyError, UnusablePolicyError, load
from tailrace.security.roles import Identity, Role
from tailrace.service.etcd import EtcdNotFoundError, etcd_command
from tailrace.service.settings import settings_options
from tailrace.service.vllm_line import VllmCommand, VllmLine, VllmLineError, read_line, split_options
from tailrace.tiny import MODEL_PATH
from tailrace.tiny.task import MAX_SCORED_COUNT, task
from tailrace.v1.admin_pb2 import SetPolicyRequest

_INTERRUPTED: Final = 130
_TINY_ARGUMENTS: Final = ("--kv-blocks", "4096")
"""A small KV cache for the shipped model, which still holds a dozen of its longest answers."""


# Options of services that follow from the others here.
_SET_HERE: Final = frozenset(
    {"--advertise", "--cluster", "--count", "--etcd", "--http", "--id", "--ipc", "--listen", "--metrics"}
)
_SPAN: Final = "tailrace serve worker and tailrace serve ranks start an engine on several machines"
# Flags of vLLM's that a cluster on one machine has another word for.
NOT_LOCAL: Final = {
    "data_parallel_size": "replicas are workers (--workers N); ranks that share experts are started by "
    "tailrace serve worker",
    "data_parallel_rank": "each rank is started by tailrace serve worker",
    "master_addr": _SPAN,
    "nnodes": _SPAN,
    "node_rank": _SPAN,
}
_WORKERS_WITHOUT_GPU: Final = 2


@click.command(
    cls=VllmCommand,
    epilog="Example: tailrace up Qwen/Qwen3-8B --max-model-len 32768 --enable-auto-tool-choice "
    "--tool-call-parser hermes --workers 2 --policy pascal --set quantum_tokens=250",
)
@click.option(
    "--workers",
    type=WholeRange(1, 500),
    help="Number of workers.  [default: one for each GPU, or group of GPUs with --tensor-parallel-size; "
    f"{_WORKERS_WITHOUT_GPU} without]",
)
@settings_options(ClusterOptions, "options")
@click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="KEY=VALUE",
    help="A parameter of the --policy; can be repeated.",
)
@click.option("--no-traces", is_flag=True, help="Export no spans.")
def up(
    options: ClusterOptions,
    workers: int | None,
    assignments: tuple[str, ...],
    no_traces: bool,
    arguments: Sequence[str],
) -> None:
    """Start a local cluster: etcd, services, workers and a front end on 127.0.0.1.

    Takes what follows `vllm serve`, spelled as there (--help=all shows vLLM's flags, --help=NAME some), and
    options of `tailrace serve worker` and `tailrace serve frontend`.

    State and logs are in .run (TAILRACE_RUN_DIR). If a process does not start, everything is stopped again.
    Spans go to the cluster's monitor (see tailrace trace), or to OTEL_EXPORTER_OTLP_ENDPOINT if set.
    """
    vllm = options.engine is Engine.VLLM
    options = _with_line(options, arguments)
    gpus = visible_gpus() if vllm else ()
    ranks = 1
    if vllm:
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            ranks *= _count(options.line, name, 1)
    options = replace(
        options,
        ranks=ranks,
        workers=workers or (max(1, len(gpus) // ranks) if gpus else _WORKERS_WITHOUT_GPU),
        policy_parameters=_policy_parameters(options.policy, assignments),
        cores=len(os.sched_getaffinity(0)),
        gpus=gpus,
        traces=None if no_traces else os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", MONITOR_TRACES),
    )
    folder = RunFolder.default()
    try:
        with folder.locked():
            state = _already_up(folder)
            if state is not None:
                note("tailrace up: already up")
            else:
                state = _start(options, folder)
    except (RunFolderBusy, RunFolderUnusable) as error:
        raise CliError(str(error)) from error
    click.echo(greeting(state, folder.logs, tailrace_command()))
    if vllm and loses_precision(options.model, options.line):
        note(
            f"tailrace up: the weights of {options.model} are float32, and vLLM serves them in 16 bits; "
            "to keep their precision: tailrace up ... --dtype float32"
        )


def _with_line(options: ClusterOptions, arguments: Sequence[str]) -> ClusterOptions:
    """Return the options with the rest of the command line in its places. Raise UsageProblem or CliError."""
    parent = click.get_current_context()
    worker, frontend, rest = _split(arguments, parent)
    line = read_line(rest, options.model)
    if mistaken := _SET_HERE & {word.partition("=")[0] for word in (*worker, *frontend)}:
        raise UsageProblem(f"{min(mistaken)}: tailrace up sets it")
    for name in line.flags.keys() & NOT_LOCAL.keys():
        raise UsageProblem(f"--{name.replace('_', '-')}: {NOT_LOCAL[name]}")
    model = options.model or line.model or str(MODEL_PATH)
    options = replace(options, model=model, line=line.without("model"), frontend_arguments=tuple(frontend))
    # Of a --config file: those on the line are our own options.
    source = parent.get_parameter_source
    if source("host") is ParameterSource.DEFAULT and line.last("host"):
        options = replace(options, host=line.last("host"))
    if source("port") is ParameterSource.DEFAULT:
        options = replace(options, port=_count(line, "port", options.port))
    small = options.engine is Engine.VLLM and options.serves_tiny_model
    return replace(options, worker_arguments=(*(_TINY_ARGUMENTS if small else ()), *worker))


def _split(
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


def _count(line: VllmLine, name: str, default: int) -> int:
    """Return the value of a flag that takes a number. Raise UsageProblem."""
    try:
        return line.count(name, default)
    except VllmLineError as error:
        raise UsageProblem(str(error)) from error


def _policy_parameters(policy: str, assignments: Sequence[str]) -> dict[str, str]:
    """Return the given parameters. Raise UsageProblem if the policy does not accept them."""
    try:
        assignments_by_name = read_assignments(assignments)
        load(policy, parameters=assignments_by_name)
    except ParameterError as error:
        raise UsageProblem(f"--set: {error}") from error
    except (UnknownPolicyError, UnusablePolicyError) as error:
        raise UsageProblem(f"--policy: {error}") from error
    return assignments_by_name


def _already_up(folder: RunFolder) -> RunState | None:
    """Return the state of a cluster that is running completely, None if nothing is running.

    Raise CliError for an incomplete cluster, or RunFolderUnusable.
    """
    state = folder.read()
    if state is None:
        return None
    ended = [part.name for part in state.parts if not part.identity.alive()]
    if len(ended) == len(state.parts):
        stop_parts(state.parts)  # their children may still be running
        folder.forget()
        return None
    if ended or not state.ready:
        problem = f"{', '.join(ended)} ended" if ended else "it never became ready"
        raise CliError(f"a cluster is already running, but incomplete ({problem}); tailrace down stops it")
    return state


def _start(options: ClusterOptions, folder: RunFolder) -> RunState:
    plan = _plan(options, folder)
    try:
        return asyncio.run(_run(plan, folder, options))
    except PartRefused as error:
        raise UsageProblem(f"{error}\nAll started processes were stopped.") from error
    except PartFailed as error:
        raise CliError(f"{error}\nAll started processes were stopped.") from error
    except asyncio.CancelledError:
        note("tailrace up: interrupted; all started processes were stopped")
        sys.exit(_INTERRUPTED)


def _plan(options: ClusterOptions, folder: RunFolder) -> Plan:
    """Check the requirements that are known in advance, and plan the cluster."""
    try:
        require_model(options.model)
        if not TOKENIZER_FLAGS & options.line.flags.keys():
            require_tokenizer(options.model)
    except ModelFolderError as error:
        raise UsageProblem(str(error)) from error
    try:
        require_installed(options)
        require_free(options.host, options.port)
        shutil.rmtree(folder.data, ignore_errors=True)
        folder.data.mkdir(parents=True)
        folder.require_room()
        plan = make_plan(
            options,
            free_ports,
            partial(_etcd_command, folder, options.tls),
            [sys.executable, "-m", "tailrace"],
            str(folder.data),
        )
        if plan.certificates:
            issue_certificates(
                plan.certificates, (Identity(Role(part.role), part.name) for part in plan.parts)
            )
        return plan
    except (Missing, PortUnavailable, EtcdNotFoundError) as error:
        raise CliError(str(error)) from error
    except OSError as error:
        raise RunFolderUnusable.of(folder.path, error) from error


def _etcd_command(folder: RunFolder, tls: bool, port: int) -> Sequence[str]:
    certificates = Path(
        certificate_folder(str(folder.data / "certs"), ETCD_SERVER.role.value, ETCD_SERVER.name)
    )
    return etcd_command(folder.data / "etcd", port, certificates if tls else None)


async def _run(plan: Plan, folder: RunFolder, options: ClusterOptions) -> RunState:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    if task is None:
        raise RuntimeError("not in a task")
    # The loop's handlers instead of Python's, so that a second Ctrl-C does not interrupt the cleanup.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, task.cancel)
    with make_progress([part.name for part in plan.parts]) as progress:
        starter = Starter(plan, folder, progress, options.cores)
        policy = SetPolicyRequest(name=options.policy, parameters=options.policy_parameters)
        return await starter.run(
            policy,
            options.served_name,
            tiny=options.serves_tiny_model,
            chat="chat_template" in options.line.flags or has_chat_template(options.model),
            asks_for_key="api_key" in options.line.flags or "--api-keys" in options.frontend_arguments,
        )


# The shipped model can answer only these prompts; other models get one that invites a long answer.
_TINY_PROMPTS: Final = (
    task("wxyz", 12, 9).prompt,
    task("wxyz", MAX_SCORED_COUNT, MAX_SCORED_COUNT - 40).prompt,
)
_PROMPTS: Final = (
    "Why is the sky blue? Answer in one sentence.",
    "Write a story of two thousand words about a lighthouse keeper.",
)


# A base model continues a text.
_TEXTS: Final = ("The sky is blue because", "A story of two thousand words about a lighthouse keeper:")
# Within any model's context, and long enough to be migrated by hand.
_TEXT_TOKENS: Final = 700
_POLICY: Final = "moves requests when an instance falls behind (tailrace set policy NAME: another one)"


def tailrace_command() -> str:
    """Return how this installation's `tailrace` can be typed here: by name if on PATH, else by path."""
    installed = Path(sysconfig.get_path("scripts")) / "tailrace"
    on_path = shutil.which("tailrace")
    if not installed.exists() or (on_path is not None and Path(on_path).samefile(installed)):
        return "tailrace"
    here = Path.cwd()
    return str(installed.relative_to(here)) if installed.is_relative_to(here) else str(installed)


def greeting(state: RunState, logs: Path, command: str) -> str:
    """Text for stdout: addresses, a curl line for a streamed answer, and what to do next.

    `command`: how `tailrace` is typed here.
    """
    workers = "1 worker" if state.workers == 1 else f"{state.workers} workers"
    short, long = _TINY_PROMPTS if state.tiny else _PROMPTS if state.chat else _TEXTS
    return "\n".join(
        [
            "",
            f"Tailrace is up: {workers}, OpenAI API at {state.http}/v1",
            f"  admin API  {state.admin}",
            f"  policy     {state.policy}: {_POLICY}"
            if state.policy == "tailrace"
            else f"  policy     {state.policy}",
            f"  logs       {logs}",
            "",
            "A streamed answer, with separate reasoning and answer:" if state.tiny else "A streamed answer:",
            "",
            f"  {_curl(state, short)}",
            "",
            "Then start a long one, and migrate it while it streams:",
            "",
            f"  {_curl(state, long)} >/dev/null &",
            f"  {command} get requests",
            f"  {command} migrate REQUEST --to INSTANCE     (any unique part of its ID)",
            f"  {command} top",
            "",
            f"{command} down stops the cluster.",
        ]
    )


def _curl(state: RunState, prompt: str) -> str:
    body: dict[str, object] = {"model": state.model, "stream": True, "temperature": 0}
    if state.chat:
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body |= {"prompt": prompt, "max_tokens": _TEXT_TOKENS}
    url = f"{state.http}/v1/{'chat/' if state.chat else ''}completions"
    variable = "VLLM_API_KEY" if os.environ.get("VLLM_API_KEY") else "API_KEY" if state.asks_for_key else ""
    key = f' -H "Authorization: Bearer ${variable}"' if variable else ""
    insecure = "k" if url.startswith("https:") else ""
    return f"curl -sN{insecure} {url} -H 'Content-Type: application/json'{key} -d '{json.dumps(body)}'"
