"""`tailrace serve frontend`: one front end of the cluster."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterable
from contextlib import AsyncExitStack
from hashlib import blake2b
from http import HTTPStatus
from importlib.metadata import version
from pathlib import Path
from typing import Final

import click
import msgspec
from click.core import ParameterSource
from prometheus_client import CollectorRegistry, Gauge

from frontend_svc.adapters import SharedAdapters
from frontend_svc.admission import Readiness
from frontend_svc.announcer import Announcer
from frontend_svc.answers.service import answers_servicer, keep_answers
from frontend_svc.api_server.middleware import READY_PATH, unready_body
from frontend_svc.api_server.rust import flags_to_json
from frontend_svc.api_server.sockets import bind_http, split_address
from frontend_svc.api_server.spec import (
    ARGUMENTS_REFUSED,
    DEFAULT_CONNECTION_LIMITS,
    BodyLimits,
    ConnectionLimits,
)
from frontend_svc.engine import DEFAULT_WAIT_LIMITS, ApiServerStuck
from frontend_svc.fleet import ServedModel
from frontend_svc.front_end import ApiServerExited, ArgumentsRefused, run_front_end
from frontend_svc.observer import RequestTraces
from frontend_svc.settings import (
    DEFAULT_KEEP_ANSWERS_BYTES,
    DEFAULT_PLACE_WAIT_S,
    DRAIN_TIMEOUT_S,
    Front,
    Limits,
    Settings,
    WaitLimits,
)
from tailrace.address import format_address
from tailrace.model_folder import TOKENIZER_FLAGS, ModelFolderError, require_model, require_tokenizer
from tailrace.model_identity import identify_model
from tailrace.numeric import RealRange, WholeRange
from tailrace.records import ServiceRecord
from tailrace.security.options import exposed
from tailrace.service.channels import Channels
from tailrace.service.message_stream import MAX_MESSAGE_BYTES, MIN_MESSAGE_BYTES
from tailrace.service.options import KEPT_ANSWERS, CommonOptions, common_options, new_incarnation
from tailrace.service.runtime import Shutdown, run_service
from tailrace.service.server import serve_grpc
from tailrace.store.membership import Membership
from tailrace.store.registration import register
from tailrace.store.store import Store
from tailrace.telemetry.metrics import Page, new_registry, serve_metrics
from tailrace.telemetry.tracing import configure
from tailrace.tenancy.file import KeyFile, KeyFileUnusable, read_keys
from tailrace.tiny import MODEL_PATH, REASONING_PARSER

log = logging.getLogger(__name__)

KIND: Final = "frontend"
_LIMITS: Final = Limits()
_BODY_LIMITS: Final = BodyLimits()
# Parameters that only our middleware in vLLM's Python app applies.
_PYTHON_ONLY: Final = (
    "max_body_bytes",
    "max_text_bytes",
    "max_messages",
    "max_sequences",
    "max_bodies_bytes",
    "body_timeout",
    "header_timeout",
    "max_pending_connections",
)
# Version of what front ends exchange about answers; increased with each change that an older one would
# misread.
_ANSWERS_FORMAT: Final = "1"
_RESPONSES_STORE: Final = "VLLM_ENABLE_RESPONSES_API_STORE"


@click.command("frontend")
@common_options(KIND)
@click.option(
    "--http",
    default="127.0.0.1:8000",
    show_default=True,
    metavar="HOST:PORT",
    help="Address for users; beyond loopback it requires API keys (or --insecure).",
)
@click.option(
    "--front",
    type=click.Choice([front.value for front in Front]),
    default=Front.PYTHON.value,
    show_default=True,
    help="vLLM's API server: its Python app, vllm-rs, or none (run one yourself, see --ipc).",
)
@click.option("--model", metavar="PATH", help="Model folder or name.  [default: the tiny reasoning model]")
@click.option("--served-model-name", default="", metavar="NAME", help="Model name that users send.")
@click.option("--reasoning-parser", default="", metavar="NAME", help="vLLM's reasoning parser for the model.")
@click.option(
    "--vllm-rs",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Executable for --front rust.  [default: the one on PATH or next to this Python]",
)
@click.option(
    "--ipc",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for the engine core's sockets.  [default: a private one]",
)
@click.option(
    "--place-wait",
    type=RealRange(min=0),
    help="Maximum seconds that a request waits for its first instance if there is none.  "
    f"[default: {DEFAULT_PLACE_WAIT_S[Front.PYTHON]:g}; {DEFAULT_PLACE_WAIT_S[Front.RUST]:g} with "
    "--front rust, which cannot tell a client to try again]",
)
@click.option(
    "--resume-wait",
    type=RealRange(min=0),
    default=DEFAULT_WAIT_LIMITS.resume_s,
    show_default=True,
    help="The same for a request that an instance has started, when that instance is lost.",
)
@click.option(
    "--pace-tpot",
    type=RealRange(min=0),
    default=0.0,
    show_default=True,
    metavar="MS",
    help="Minimum milliseconds per token at which answers are shown; 0: no pacing. A request overrides it "
    "with tailrace_pace_tpot_ms in vllm_xargs.",
)
@click.option(
    "--drain-timeout",
    type=RealRange(min=0),
    default=DRAIN_TIMEOUT_S,
    show_default=True,
    metavar="SECONDS",
    help="On SIGTERM, how long running streams may take to finish before they end with an error.",
)
@click.option(
    "--max-streams",
    type=WholeRange(min=1),
    default=_LIMITS.max_streams,
    show_default=True,
    help="Maximum requests in progress; further ones are refused with 429.",
)
@click.option(
    "--max-unplaced",
    type=WholeRange(min=1),
    default=_LIMITS.max_unplaced,
    show_default=True,
    help="Maximum requests waiting for an instance; further ones are refused with 503.",
)
@click.option(
    "--max-message-bytes",
    type=WholeRange(MIN_MESSAGE_BYTES, MAX_MESSAGE_BYTES),
    default=_LIMITS.max_message_bytes,
    show_default=True,
    help="Largest message accepted from a worker: one step's outputs, with their log-probabilities.",
)
@click.option(
    "--api-keys",
    type=click.Path(dir_okay=False, path_type=Path),
    envvar="TAILRACE_API_KEYS",
    metavar="FILE",
    help="Require users' API keys from this file (tailrace keys make), with their tenants' models and "
    "limits. Only with --front python.",
)
@click.option(
    "--fair-backlog",
    type=WholeRange(min=0),
    default=_LIMITS.fair_backlog_tokens,
    show_default=True,
    metavar="TOKENS",
    help="While prompts of this many tokens per instance have no first token yet, new requests wait for "
    "their tenant's turn, by weight (tailrace keys make --weight), for at most --place-wait; 0: off. "
    "Requires --api-keys.",
)
@click.option(
    "--max-body-bytes",
    type=WholeRange(min=1024),
    default=_BODY_LIMITS.max_body_bytes,
    show_default=True,
    help="Largest body of a user's request; larger ones are refused with 413. Only with --front python.",
)
@click.option(
    "--header-timeout",
    type=RealRange(min=0.1),
    default=DEFAULT_CONNECTION_LIMITS.header_timeout_s,
    show_default=True,
    metavar="SECONDS",
    help="How long a connection may take to send a request's header; it is then closed with 408. Only with "
    "--front python.",
)
@click.option(
    "--max-pending-connections",
    type=WholeRange(min=1),
    default=DEFAULT_CONNECTION_LIMITS.max_pending,
    show_default=True,
    help="Maximum connections that have not sent a whole header; for a further one, the one that waited "
    "longest is closed. Only with --front python.",
)
@click.option(
    "--max-text-bytes",
    type=WholeRange(min=0),
    default=_BODY_LIMITS.max_text_bytes,
    show_default=True,
    help="Largest body without its images and other media, as sent; larger ones are refused with 413; 0: 16 "
    "bytes for each token of the model's context, at least 1 MiB. Only with --front python.",
)
@click.option(
    "--max-messages",
    type=WholeRange(min=1),
    default=_BODY_LIMITS.max_messages,
    show_default=True,
    help="Most messages of a request, with their content parts and tools; more are refused with 400. Only "
    "with --front python.",
)
@click.option(
    "--max-sequences",
    type=WholeRange(min=1),
    default=_BODY_LIMITS.max_sequences,
    show_default=True,
    help="Most sequences of a request, which are its prompts times n; more are refused with 400. Only with "
    "--front python.",
)
@click.option(
    "--max-bodies-bytes",
    type=WholeRange(min=1024),
    default=_BODY_LIMITS.max_bodies_bytes,
    show_default=True,
    help="Most bytes of the bodies of all users' requests in progress; with --api-keys one tenant may have "
    "half of them. Further ones are refused with 429. Only with --front python.",
)
@click.option(
    "--body-timeout",
    type=RealRange(min=0.1),
    default=_BODY_LIMITS.body_timeout_s,
    show_default=True,
    metavar="SECONDS",
    help="Time for the body of a user's request to arrive, besides a second for each 256 KiB; later it is "
    "refused with 400. Only with --front python.",
)
@click.option(
    "--keep-answers",
    type=KEPT_ANSWERS,
    default=0.0,
    show_default=True,
    metavar="SECONDS",
    help="Clients that reconnect (Last-Event-ID, Idempotency-Key) get the rest of their answers from any "
    "front end that keeps answers. How long an answer is kept after its client stops reading, here "
    "and on a second front end; at least 5 s; 0: off. Only with --front python.",
)
@click.option(
    "--keep-answers-bytes",
    type=WholeRange(min=1 << 20),
    default=DEFAULT_KEEP_ANSWERS_BYTES,
    show_default=True,
    help="Memory for all kept answers, including copies for other front ends; one answer may use an "
    "eighth of it.",
)
@click.argument("vllm_arguments", nargs=-1, type=click.UNPROCESSED)
def command(
    common: CommonOptions,
    http: str,
    front: str,
    model: str | None,
    served_model_name: str,
    reasoning_parser: str,
    vllm_rs: Path | None,
    ipc: Path | None,
    place_wait: float | None,
    resume_wait: float,
    pace_tpot: float,
    drain_timeout: float,
    max_streams: int,
    max_unplaced: int,
    max_message_bytes: int,
    api_keys: Path | None,
    fair_backlog: int,
    max_body_bytes: int,
    header_timeout: float,
    max_pending_connections: int,
    max_text_bytes: int,
    max_messages: int,
    max_sequences: int,
    max_bodies_bytes: int,
    body_timeout: float,
    keep_answers: float,
    keep_answers_bytes: int,
    vllm_arguments: tuple[str, ...],
) -> None:
    """Serve the fleet to users through vLLM's own API server.

    Put flags of `vllm serve` after `--`; engine flags have no effect here.
    """
    try:
        split_address(http)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--http") from error
    if api_keys is not None:
        _check_keys(api_keys, Front(front), vllm_arguments)
    elif not _asks_for_key(vllm_arguments):
        _check_without_keys(common, http)
    if fair_backlog and api_keys is None:
        problem = (
            "not supported by vllm-rs; use --front python and --api-keys"
            if front == Front.RUST.value
            else "requires --api-keys"
        )
        raise click.UsageError(f"--fair-backlog: {problem}")
    if keep_answers and front != Front.PYTHON.value:
        raise click.UsageError(
            "--keep-answers: not supported by vllm-rs, which has no middleware; use --front python"
        )
    if front != Front.PYTHON.value:
        _refuse_given(_PYTHON_ONLY, "has no effect without --front python: nothing else applies it")
    if front == Front.RUST.value:
        try:
            flags_to_json(vllm_arguments)
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="VLLM_ARGUMENTS") from error
    model = model or str(MODEL_PATH)
    if Path(model).resolve() == MODEL_PATH:
        reasoning_parser = reasoning_parser or REASONING_PARSER
    try:
        require_model(model)
        if not any(argument.startswith(TOKENIZER_FLAGS) for argument in vllm_arguments):
            require_tokenizer(model)
    except ModelFolderError as error:
        raise click.BadParameter(str(error), param_hint="--model") from error
    settings = Settings(
        frontend_id=common.member_id,
        http=http,
        front=Front(front),
        model=model,
        served_model_name=served_model_name,
        reasoning_parser=reasoning_parser,
        vllm_arguments=vllm_arguments,
        vllm_rs=_vllm_rs(vllm_rs) if front == Front.RUST.value else Path(),
        ipc_folder=ipc,
        wait_limits=WaitLimits(
            DEFAULT_PLACE_WAIT_S[Front(front)] if place_wait is None else place_wait, resume_wait
        ),
        drain_timeout_s=drain_timeout,
        pace_s=pace_tpot / 1e3,
        limits=Limits(max_message_bytes, max_streams, max_unplaced, fair_backlog),
        api_keys=api_keys,
        connections=ConnectionLimits(header_timeout, max_pending_connections),
        body_limits=BodyLimits(
            max_body_bytes, max_text_bytes, max_messages, max_sequences, max_bodies_bytes, body_timeout
        ),
        keep_answers_s=keep_answers,
        keep_answers_bytes=keep_answers_bytes,
    )
    run_service(lambda shutdown: serve(common, settings, shutdown))


async def serve(common: CommonOptions, settings: Settings, shutdown: Shutdown) -> None:
    """Run one front end until cancelled. Raise StoreUnavailable or ListenError (PortTaken)."""
    served = await asyncio.to_thread(_served_model, settings)
    async with AsyncExitStack() as stack:
        store = await Store.connect(common.etcd, common.cluster, common.transport)
        stack.push_async_callback(store.close)
        members = await Membership.start(store)
        stack.push_async_callback(members.close)
        http = stack.enter_context(bind_http(settings.http, lambda: _is_shared(common, settings, members)))
        tracing = await stack.enter_async_context(configure(KIND, common.member_id))
        channels = Channels(common.transport)
        stack.push_async_callback(channels.close)
        registry = new_registry(KIND, common.member_id)
        registry.model = served.public_name
        if settings.api_keys is not None:
            _register_key_file(registry, KeyFile(settings.api_keys))
        readiness = Readiness()
        pages = {READY_PATH: lambda: _ready_page(readiness)}
        metrics = await stack.enter_async_context(
            serve_metrics(common.metrics, registry, common.transport, pages)
        )
        answers, setting = None, ""
        if settings.keep_answers_s:
            setting = _answers_setting(settings, served)
            answers = keep_answers(settings, setting, members, channels, registry)
        adapters = SharedAdapters(store, members, served.public_name)
        stack.push_async_callback(adapters.close)
        servicers = [] if answers is None else [answers_servicer(answers)]
        server = await stack.enter_async_context(serve_grpc(common.listen, servicers, common.transport))
        await server.set_serving(False)
        record = ServiceRecord(
            kind=KIND,
            service_id=common.member_id,
            incarnation=new_incarnation(),
            address=common.advertised(server.address),
            metrics_address=common.advertised(metrics.address),
            http_address=common.advertised(_host_port(http.getsockname())),
            model_name=served.public_name,
            model=served.name,
            model_key=served.key,
            answers=setting,
        )
        # Before the HTTP port is bound: a second front end on it must recognise this one as a member.
        registration = await register(
            store, f"services/{KIND}/{common.member_id}", msgspec.json.encode(record)
        )
        stack.push_async_callback(registration.withdraw)
        announcer = Announcer(registration, record)
        announcer.start()
        stack.push_async_callback(announcer.close)
        traces = RequestTraces(tracing.tracer(KIND), common.member_id) if tracing.enabled else None

        async def set_serving(serving: bool) -> None:
            await server.set_serving(serving)
            if serving:
                log.info("serving users on http://%s", record.http_address)

        try:
            await run_front_end(
                settings,
                members,
                channels,
                http,
                registry,
                traces,
                served,
                set_serving,
                readiness,
                shutdown,
                announcer.set_models,
                answers,
                adapters,
            )
        except (ApiServerExited, ApiServerStuck) as error:
            if isinstance(error, ArgumentsRefused):
                raise SystemExit(ARGUMENTS_REFUSED) from None
            log.error("%s", error)
            raise SystemExit(1) from None


def _refuse_given(parameters: Iterable[str], problem: str) -> None:
    """Raise click.UsageError if one of these parameters was given."""
    context = click.get_current_context()
    for parameter in parameters:
        if context.get_parameter_source(parameter) is not ParameterSource.DEFAULT:
            raise click.UsageError(f"--{parameter.replace('_', '-')} {problem}")


def _check_keys(file: Path, front: Front, vllm_arguments: tuple[str, ...]) -> None:
    """Check the key file. Raise click.UsageError or click.ClickException."""
    if front is not Front.PYTHON:
        raise click.UsageError("--api-keys: not supported by vllm-rs; use --front python, or VLLM_API_KEY")
    if _asks_for_key(vllm_arguments):
        raise click.UsageError("--api-keys cannot be combined with vLLM's own key (VLLM_API_KEY, --api-key)")
    if os.environ.get(_RESPONSES_STORE, "").strip() not in ("", "0"):
        raise click.UsageError(
            f"--api-keys cannot be combined with {_RESPONSES_STORE}: vLLM gives a stored response to whoever "
            "knows its ID, of any tenant"
        )
    try:
        read_keys(file)
    except KeyFileUnusable as error:
        raise click.ClickException(str(error)) from error


def _ready_page(readiness: Readiness) -> Page:
    unready = readiness.unready
    if unready is None:
        return HTTPStatus.OK, "text/plain", b""
    return HTTPStatus(unready.status), "application/json", unready_body(unready)


def _register_key_file(registry: CollectorRegistry, file: KeyFile) -> None:
    unusable = Gauge(
        "tailrace_frontend_api_keys_unusable",
        "1 while the file of API keys cannot be read: earlier keys stay in force.",
        registry=registry,
    )
    unusable.set_function(lambda: float(bool(file.problem())))


def _check_without_keys(common: CommonOptions, http: str) -> None:
    """Refuse to serve users of other machines without keys. Raise click.UsageError.

    Certificates make no difference: they protect the other ports, and users have none.
    """
    if not common.insecure and exposed([http]):
        raise click.UsageError(
            f"--http {http} can be reached from other machines, and requests there need no API key: give "
            "--api-keys FILE (tailrace keys make writes it) or set VLLM_API_KEY, listen on 127.0.0.1, or "
            "give --insecure"
        )


def _asks_for_key(vllm_arguments: tuple[str, ...]) -> bool:
    """Return whether vLLM's own API server requires an API key: an empty one counts as none."""
    keys: list[str] = []
    for position, argument in enumerate(vllm_arguments):
        flag, equals, value = argument.partition("=")
        if flag.replace("_", "-") == "--api-key":
            following = itertools.takewhile(
                lambda word: not word.startswith("--"), vllm_arguments[position + 1 :]
            )
            keys = [value] if equals else list(following)
    return any(keys or [os.environ.get("VLLM_API_KEY", "")])


def _served_model(settings: Settings) -> ServedModel:
    """Identify the model. Raise OSError if its folder cannot be read."""
    identity = identify_model(settings.model, _flag(settings, "--revision"))
    return ServedModel(settings.model, identity, settings.served_model_name or settings.model)


def _answers_setting(settings: Settings, served: ServedModel) -> str:
    """Return a digest of everything besides the log that an answer depends on.

    Front ends with equal digests may continue each other's answers.
    """
    depends = [
        _ANSWERS_FORMAT,
        version("vllm"),
        served.key,
        settings.served_model_name or settings.model,
        settings.reasoning_parser,
        *settings.vllm_arguments,
    ]
    return blake2b("\0".join(depends).encode(), digest_size=16).hexdigest()


def _flag(settings: Settings, name: str) -> str:
    """Return the value of a flag of `vllm serve`; empty if it is not given."""
    arguments = settings.vllm_arguments
    for position, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        if flag == name:
            return value if equals else next(iter(arguments[position + 1 :]), "")
    return ""


def _is_shared(common: CommonOptions, settings: Settings, members: Membership) -> bool:
    """Return whether another front end of this cluster is known to use the HTTP address."""
    advertised = common.advertised(settings.http)
    return any(
        kind == KIND and service_id != common.member_id and record.http_address == advertised
        for (kind, service_id), record in members.services.items()
    )


def _host_port(name: tuple[str, int]) -> str:
    return format_address(*name[:2])


def _vllm_rs(configured: Path | None) -> Path:
    """Return the path of the executable. Raise click.ClickException if it does not exist."""
    path = str(configured) if configured is not None else shutil.which("vllm-rs")
    if path is None:
        path = str(Path(sysconfig.get_path("scripts")) / "vllm-rs")
    if not Path(path).is_file():
        raise click.ClickException(
            f"no vllm-rs at {path}; `make install FRONT=rust` extracts it from vLLM's wheel"
        )
    return Path(path).absolute()


if __name__ == "__main__":
    sys.exit(command())
