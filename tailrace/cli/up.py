"""`tailrace up`: start a complete cluster on this machine."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import signal
import sys
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import click
from click.core import ParameterSource

from tailrace.address import parse_address
from tailrace.cli.errors import CliError, UsageProblem
from tailrace.cli.fleet_file import (
    FleetFile,
    admins_of,
    file_option,
    host_of,
    options_of,
    plan_here,
    read_fleet_file,
    require_alone,
)
from tailrace.cli.line import TINY_ARGUMENTS, count, split_line, with_line
from tailrace.cli.line_check import loads_vllm, refusal
from tailrace.cli.output import note
from tailrace.cli.up_front import with_front
from tailrace.fleet.hosts import control_hosts
from tailrace.local.certificates import issue_certificates
from tailrace.local.options import LOCAL_WORKERS_MAX, MONITOR_TRACES, ClusterOptions, Engine
from tailrace.local.plan import Plan, Tier
from tailrace.local.ports import LOOPBACK, PortUnavailable, require_free
from tailrace.local.process import PartFailed, PartRefused, stop_parts
from tailrace.local.progress import make_progress
from tailrace.local.requirements import (
    Missing,
    loses_precision,
    require_installed,
    require_proxy,
    visible_gpus,
)
from tailrace.local.start import Settings, Starter
from tailrace.local.state import RunFolder, RunFolderBusy, RunFolderUnusable, RunState
from tailrace.messages import objectives_message
from tailrace.model_folder import ModelFolderError, has_chat_template, require_files
from tailrace.numeric import WholeRange
from tailrace.policy.parameters import ParameterError, read_assignments
from tailrace.policy.registry import UnknownPolicyError, UnusablePolicyError, load
from tailrace.security.roles import Identity, Role
from tailrace.service.etcd import EtcdNotFoundError
from tailrace.service.settings import settings_options
from tailrace.service.vllm_line import GIVEN, NO_LINE, VllmCommand, read_line
from tailrace.tiny.task import MAX_SCORED_COUNT, task
from tailrace.v1.admin_pb2 import SetPolicyRequest

_INTERRUPTED: Final = 130
_WORKERS_WITHOUT_GPU: Final = 2


@click.command(
    cls=VllmCommand,
    epilog="Example: tailrace up Qwen/Qwen3-8B --max-model-len 32768 --enable-auto-tool-choice "
    "--tool-call-parser hermes --workers 2 --policy pascal --set quantum_tokens=250",
)
@click.option(
    "--workers",
    type=WholeRange(1, LOCAL_WORKERS_MAX),
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
@click.option("--no-console", is_flag=True, help="Start no console.")
@file_option(required=False)
@click.option("--on", metavar="HOST", help="The host of the --file that this machine is, if it has several.")
def up(
    options: ClusterOptions,
    workers: int | None,
    assignments: tuple[str, ...],
    no_traces: bool,
    no_console: bool,
    file: Path | None,
    on: str | None,
    arguments: Sequence[str],
) -> None:
    """Start a local cluster: etcd, services, workers and a front end on 127.0.0.1.

    Takes what follows `vllm serve`, spelled as there (--help=all shows vLLM's flags, --help=NAME some), and
    options of `tailrace serve worker` and `tailrace serve frontend`.

    State and logs are in .run in this folder (TAILRACE_RUN_DIR names another); other commands find it from
    here and from folders below. If a process does not start, everything is stopped again.
    Spans go to the cluster's monitor (see tailrace trace), or to OTEL_EXPORTER_OTLP_ENDPOINT if set.
    """
    source, host = None, ""
    if file is not None:
        require_alone("on")
        source = read_fleet_file(file)
        host = host_of(source, on)
        options = options_of(source)
        workers = source.fleet.model.number
    elif on is not None:
        raise UsageProblem("--on: names a host of a --file")
    else:
        options = replace(
            _with_addresses(with_line(options, arguments)),
            policy_parameters=_policy_parameters(options.policy, assignments),
            traces=None if no_traces else os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", MONITOR_TRACES),
        )
    options = on_this_machine(options, workers, lambda text: note(f"tailrace up: {text}"))
    options = replace(options, console=not no_console and _has_console())
    folder = RunFolder.default()
    try:
        with folder.locked():
            state = _already_up(folder)
            if state is not None:
                _require_same(state, click.get_current_context())
                note("tailrace up: already up")
            else:
                state = _start(options, folder, source, host)
    except (RunFolderBusy, RunFolderUnusable) as error:
        raise CliError(str(error)) from error
    click.echo(greeting(state, folder.logs, tailrace_command()))
    if options.engine is Engine.VLLM and loses_precision(options.model, options.line):
        note(
            f"\nThe weights of {options.model} are float32, and vLLM serves them in 16 bits.\n"
            "To keep their precision: --dtype float32"
        )


def _with_addresses(options: ClusterOptions) -> ClusterOptions:
    """Return the options with the addresses of a --config file: those on the line are our own options."""
    source = click.get_current_context().get_parameter_source
    line = options.line
    if source("host") is ParameterSource.DEFAULT and line.last("host"):
        options = replace(options, host=line.last("host"))
    if source("port") is ParameterSource.DEFAULT:
        options = replace(options, port=count(line, "port", options.port))
    return options


def on_this_machine(
    options: ClusterOptions, workers: int | None, say: Callable[[str], None] | None = None
) -> ClusterOptions:
    """Return the options with this machine's cores and GPUs, a number of workers that suits them, and the API
    servers that can run here.

    `workers`: of the first model, if that is given; `say`: see with_front. Raise UsageProblem if models that
    cannot be told apart are to be scaled.
    """
    _check_links(options)
    options = with_front(options, say or (lambda text: None))
    cores, earlier = len(os.sched_getaffinity(0)), 0
    given = [workers, *(model.workers for model in options.others)]
    models = []
    for model, number in zip(options.models, given, strict=True):
        gpus = visible_gpus() if model.engine is Engine.VLLM else ()
        usual = max(1, len(gpus) // model.ranks // len(given)) if gpus else _WORKERS_WITHOUT_GPU
        here = model.workers if model.bounds is not None else number or usual
        models.append(replace(model, workers=here, cores=cores, gpus=gpus, earlier_workers=earlier))
        earlier += here
    models = [replace(model, all_workers=earlier) for model in models]
    return replace(models[0], others=tuple(models[1:]))


def _check_links(options: ClusterOptions) -> None:
    """Raise UsageProblem if a scaled model has the folder of another one by a link."""
    folders = [os.path.realpath(each.model) for each in options.models]
    for at, each in enumerate(options.models):
        if each.bounds is not None and folders.count(folders[at]) > 1:
            raise UsageProblem(
                f"models[{at}].autoscale: {each.model} and another model name the same folder, and "
                "instances are told apart by what is in it: name a folder of another model, or leave "
                "autoscale out"
            )


def _has_console() -> bool:
    """Return whether the console can run here; say what it lacks if it cannot."""
    if find_spec("aiohttp") is not None:
        return True
    note("tailrace up: no console, because aiohttp is not installed (the extra `console` has it)")
    return False


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
    # Without its console the cluster serves as before (tailrace restart console).
    # A worker of a model that is scaled may end at any time.
    free = {name for each in state.scaled for name in each.names}
    ended = [
        part.name
        for part in state.parts
        if part.name in ended and part.tier is not Tier.CONSOLE and part.name not in free
    ]
    if ended or not state.ready:
        if ended and state.ready:
            problem = f"{', '.join(ended)} ended); tailrace restart {' '.join(ended)} starts what has ended"
        else:
            problem = "it never became ready); tailrace down stops it"
        raise CliError(f"a cluster is already running, but incomplete ({problem}")
    return state


def _require_same(state: RunState, context: click.Context) -> None:
    """Raise CliError if the running cluster was started with other values than those of the command line;
    without any on it, all that is asked for is that it runs."""
    if not context.meta[GIVEN]:
        return
    try:
        started = context.command.make_context(context.info_name, [*state.given])
        same = _values(started) == _values(context)
    except click.UsageError:
        # It was started by a version with other options.
        same = False
    if not same:
        started_by = shlex.join(["tailrace", "up", *state.given])
        raise CliError(
            f"a cluster is already up, with other flags ({started_by}): tailrace down stops it; one of a "
            "fleet.yaml is changed while it serves by tailrace apply"
        )


def _values(context: click.Context) -> dict[str, object]:
    """Return the values of a command line, defaults included, whatever the order and spelling of vLLM's
    flags. Raise click.UsageError."""
    worker, frontend, rest = split_line(context.params["arguments"], context)
    line = read_line(rest)
    return {
        **context.params,
        "model": context.params["model"] or line.model,
        "arguments": (worker, frontend, line.flags),
        "assignments": sorted(context.params["assignments"]),
    }


def _start(options: ClusterOptions, folder: RunFolder, file: FleetFile | None, host: str) -> RunState:
    plan = _plan(options, folder, file, host)
    try:
        return asyncio.run(_run(plan, folder, options, file, host))
    except PartRefused as error:
        raise UsageProblem(f"{error}\nAll started processes were stopped.") from error
    except PartFailed as error:
        raise CliError(f"{error}\nAll started processes were stopped.") from error
    except asyncio.CancelledError:
        note("tailrace up: interrupted; all started processes were stopped")
        sys.exit(_INTERRUPTED)


def _plan(options: ClusterOptions, folder: RunFolder, file: FleetFile | None, host: str) -> Plan:
    """Plan the parts on this machine, and check the requirements that are known in advance."""
    try:
        plan = plan_here(options, folder, file, host)
        here = {part.option("--model") for part in plan.parts}
        for model in options.models:
            if model.model in here:
                require_installed(model, lambda text: note(f"tailrace up: {text}"))
                require_startable("up", model, host)
        if plan.tier(Tier.EDGE):
            require_proxy()
            require_free(*parse_address(options.edge))
        elif plan.tier(Tier.FRONTEND) and not options.edge:
            require_free(options.host, options.port)
        shutil.rmtree(folder.data, ignore_errors=True)
        for data in (folder.data, folder.kept):
            data.mkdir(parents=True, exist_ok=True)
        folder.require_room()
        if plan.certificates and not host:
            issue_certificates(
                plan.certificates,
                (Identity(Role(part.role), part.name) for part in plan.parts if part.role),
            )
        return plan
    except (Missing, PortUnavailable, EtcdNotFoundError) as error:
        raise CliError(str(error)) from error
    except OSError as error:
        raise RunFolderUnusable.of(folder.path, error) from error


def require_startable(command: str, options: ClusterOptions, host: str) -> None:
    """Raise UsageProblem if a service or vLLM would refuse what the options' first model is given, once it is
    started. `host`: of a fleet on several, or empty."""
    try:
        require_files(options.model, options.line.flags)
    except ModelFolderError as error:
        raise UsageProblem(str(error)) from error
    # Of users' addresses and keys a host's file has been checked as a whole.
    insecure = ("--insecure",) if host else ()
    options = replace(options, frontend_arguments=(*options.frontend_arguments, *insecure))
    defaults = replace(
        options,
        line=NO_LINE,
        host=LOOPBACK,
        frontend_arguments=(),
        worker_arguments=TINY_ARGUMENTS if options.worker_arguments == TINY_ARGUMENTS else (),
    )
    if options == defaults:
        return
    if loads_vllm(options):
        note(f"tailrace {command}: checking the flags, for which vLLM is loaded")
    if problem := refusal(options):
        raise UsageProblem(problem)


async def _run(
    plan: Plan, folder: RunFolder, options: ClusterOptions, file: FleetFile | None, host: str
) -> RunState:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    if task is None:
        raise RuntimeError("not in a task")
    # The loop's handlers instead of Python's, so that a second Ctrl-C does not interrupt the cleanup.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, task.cancel)
    with make_progress([part.name for part in plan.parts]) as progress:
        starter = Starter(plan, folder, progress, options.cores)
        # Of a fleet on several hosts, one sets them.
        sets = not host or file is None or host == control_hosts(file.fleet)[0]
        slo = None if file is None or not file.fleet.slo else objectives_message(file.fleet.objectives())
        policy = SetPolicyRequest(name=options.policy, parameters=options.policy_parameters)
        return await starter.run(
            Settings(policy, slo) if sets else Settings(),
            options.served_name,
            [model.own for model in options.models if model.own is not None] if sets else [],
            models=admins_of(options, plan.admin, plan.own),
            host=host,
            tiny=options.serves_tiny_model,
            simulated=options.engine is Engine.SIMULATED,
            chat="chat_template" in options.line.flags or has_chat_template(options.model),
            given=click.get_current_context().meta[GIVEN],
            asks_for_key="api_key" in options.line.flags
            or bool(os.environ.get("TAILRACE_API_KEYS"))
            or any(part.option("--api-keys") for part in plan.parts),
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
# Of a long answer of a simulated engine: twenty seconds with the default profile.
_LONG_TOKENS: Final = 2_000
_POLICY: Final = "moves requests when an instance falls behind (tailrace set policy NAME: another one)"


def tailrace_command() -> str:
    """Return how this installation's `tailrace` can be typed here: by name if on PATH, else by path."""
    installed = Path(sysconfig.get_path("scripts")) / "tailrace"
    on_path = shutil.which("tailrace")
    if not installed.exists() or (on_path is not None and Path(on_path).samefile(installed)):
        return "tailrace"
    here = Path.cwd()
    return shlex.quote(str(installed.relative_to(here) if installed.is_relative_to(here) else installed))


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
            *_console_lines(state),
            f"  policy     {state.policy}: {_POLICY}"
            if state.policy == "tailrace"
            else f"  policy     {state.policy}",
            *_own_lines(state),
            f"  logs       {logs}",
            "",
            "A streamed answer, with separate reasoning and answer:" if state.tiny else "A streamed answer:",
            "",
            f"  {_curl(state, short)}",
            "",
            "Then start a long one, and migrate it while it streams:",
            "",
            f"  {_curl(state, long, _LONG_TOKENS if state.simulated else 0)} >/dev/null &",
            f"  {command} get requests",
            f"  {command} migrate REQUEST --to INSTANCE     (any unique part of its ID)",
            f"  {command} top",
            "",
            f"{command} down stops the cluster.",
        ]
    )


def _own_lines(state: RunState) -> list[str]:
    """Return the line about models with clusters of their own; none if there is none."""
    own = [name for name, admin in state.models.items() if admin != state.admin]
    return [f"             of its own: {', '.join(own)} (commands take --model NAME)"] if own else []


def _console_lines(state: RunState) -> list[str]:
    """Return the line about the console; none if it does not run."""
    spec = next((part.spec for part in state.parts if part.tier is Tier.CONSOLE), None)
    if spec is None:
        return []
    token = spec.option("--token-file")
    return [f"  console    http://{spec.address}/" + (f" (its token: {token})" if token else "")]


def _curl(state: RunState, prompt: str, min_tokens: int = 0) -> str:
    body: dict[str, object] = {"model": state.model, "stream": True, "temperature": 0}
    if state.chat:
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body |= {"prompt": prompt, "max_tokens": _TEXT_TOKENS}
    if min_tokens:
        body |= {"min_tokens": min_tokens, "max_tokens": min_tokens}
    url = f"{state.http}/v1/{'chat/' if state.chat else ''}completions"
    variable = "VLLM_API_KEY" if os.environ.get("VLLM_API_KEY") else "API_KEY" if state.asks_for_key else ""
    key = f' -H "Authorization: Bearer ${variable}"' if variable else ""
    insecure = "k" if url.startswith("https:") else ""
    url, data = shlex.quote(url), shlex.quote(json.dumps(body))
    return f"curl -sN{insecure} {url} -H 'Content-Type: application/json'{key} -d {data}"
