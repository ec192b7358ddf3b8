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

from tailrace.cli.errors import CliError, UsageProblem
from tailrace.cli.output import note
from tailrace.local.certificates import ETCD_SERVER, certificate_folder, issue_certificates
from tailrace.local.options import MONITOR_TRACES, ClusterOptions, Engine, Front
from tailrace.local.plan import Plan, make_plan
from tailrace.local.ports import PortUnavailable, free_ports, require_free
from tailrace.local.process import PartFailed, PartRefused, stop_parts
from tailrace.local.progress import make_progress
from tailrace.local.requirements import Missing, loses_precision, require_installed, visible_gpus
from tailrace.local.start import Starter
from tailrace.local.state import RunFolder, RunFolderBusy, RunFolderUnusable, RunState
from tailrace.model_folder import TOKENIZER_FLAGS, ModelFolderError, require_model, require_tokenizer
from tailrace.policy.parameters import ParameterError, read_assignments
from tailrace.policy.registry import UnknownPolicyError, UnusablePolicyError, load
from tailrace.security.roles import Identity, Role
from tailrace.service.etcd import EtcdNotFoundError, etcd_command
from tailrace.service.settings import settings_options
from tailrace.tiny import MODEL_PATH, REASONING_PARSER
from tailrace.tiny.task import MAX_SCORED_COUNT, task
from tailrace.v1.admin_pb2 import SetPolicyRequest

_INTERRUPTED: Final = 130
_TINY_NAME: Final = "tiny"
_TINY_ARGUMENTS: Final = ("--kv-blocks", "4096")
"""A small KV cache for the shipped model, which still holds a dozen of its longest answers."""


@click.command(epilog="Example: tailrace up --workers 2 --policy pascal --set quantum_tokens=250")
@settings_options(ClusterOptions, "options")
@click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="KEY=VALUE",
    help="A parameter of the --policy; can be repeated.",
)
@click.option("--no-traces", is_flag=True, help="Export no spans.")
@click.argument("worker_arguments", nargs=-1, type=click.UNPROCESSED)
def up(
    options: ClusterOptions, assignments: tuple[str, ...], no_traces: bool, worker_arguments: tuple[str, ...]
) -> None:
    """Start a local cluster: etcd, services, workers and a front end on 127.0.0.1.

    State and logs are in .run (TAILRACE_RUN_DIR). If a process does not start, everything is stopped again.
    Spans go to the cluster's monitor (see tailrace trace), or to OTEL_EXPORTER_OTLP_ENDPOINT if set. Put
    options of `tailrace serve worker` after --.
    """
    vllm = options.engine is Engine.VLLM
    if not vllm and options.ranks != 1:
        raise UsageProblem("--tensor-parallel-size and --pipeline-parallel-size are for vLLM engines")
    if not options.model:
        options = replace(
            options,
            model=str(MODEL_PATH),
            served_name=options.served_name or _TINY_NAME,
            reasoning_parser=options.reasoning_parser or REASONING_PARSER,
        )
        worker_arguments = (*(_TINY_ARGUMENTS if vllm else ()), *worker_arguments)
    options = replace(
        options,
        served_name=options.served_name or options.model,
        policy_parameters=_policy_parameters(options.policy, assignments),
        cores=len(os.sched_getaffinity(0)),
        gpus=visible_gpus() if vllm else (),
        worker_arguments=worker_arguments,
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
    if vllm and loses_precision(options.model, worker_arguments):
        note(
            f"tailrace up: the weights of {options.model} are float32, and vLLM serves them in 16 bits; "
            "to keep their precision: tailrace up ... -- --engine-arg dtype=float32"
        )


def _policy_parameters(policy: str | None, assignments: Sequence[str]) -> dict[str, str]:
    """Return the given parameters. Raise UsageProblem if the policy does not accept them."""
    if policy is None:
        if assignments:
            raise UsageProblem("--set requires --policy")
        return {}
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
        if not any(flag.startswith(TOKENIZER_FLAGS) for flag in options.frontend_arguments):
            require_tokenizer(options.model)
    except ModelFolderError as error:
        raise UsageProblem(f"--model: {error}") from error
    if options.keep_answers_s and options.front is not Front.PYTHON:
        raise UsageProblem("--keep-answers: not supported by vllm-rs; use --front python")
    for flag in options.frontend_arguments:
        if not flag.startswith("--"):
            raise UsageProblem(
                f"--frontend-arg: {flag!r} is not a flag of vllm serve (--NAME or --NAME=VALUE)"
            )
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
        policy = None
        if options.policy is not None:
            policy = SetPolicyRequest(name=options.policy, parameters=options.policy_parameters)
        return await starter.run(policy, options.served_name, tiny=options.serves_tiny_model)


# The shipped model can answer only these prompts; other models get one that invites a long answer.
_TINY_PROMPTS: Final = (
    task("wxyz", 12, 9).prompt,
    task("wxyz", MAX_SCORED_COUNT, MAX_SCORED_COUNT - 40).prompt,
)
_PROMPTS: Final = (
    "Why is the sky blue? Answer in one sentence.",
    "Write a story of two thousand words about a lighthouse keeper.",
)


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
    short, long = _TINY_PROMPTS if state.tiny else _PROMPTS
    return "\n".join(
        [
            "",
            f"Tailrace is up: {workers}, OpenAI API at {state.http}/v1",
            f"  admin API  {state.admin}",
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
    body = {
        "model": state.model,
        "stream": True,
        "temperature": 0,
        "messages": [{"role": "user", "content": prompt}],
    }
    url = f"{state.http}/v1/chat/completions"
    key = ' -H "Authorization: Bearer $VLLM_API_KEY"' if os.environ.get("VLLM_API_KEY") else ""
    return f"curl -sN {url} -H 'Content-Type: application/json'{key} -d '{json.dumps(body)}'"
