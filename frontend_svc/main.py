"""`tailrace serve frontend`: one front end of the cluster."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
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
from frontend_svc.answers.service import answers_servicer, keep_answers
from frontend_svc.api_server.launch import flags_to_json
from frontend_svc.api_server.middleware import READY_PATH, unready_body
from frontend_svc.api_server.sockets import bind_http, split_address
from frontend_svc.api_server.spec import ARGUMENTS_REFUSED, BodyLimits, ConnectionLimits
from frontend_svc.engine import ApiServerStuck, FleetEngine
from frontend_svc.fleet import ServedModel
from frontend_svc.front_end import Announcer, ApiServerExited, ArgumentsRefused, run_front_end
from frontend_svc.observer import RequestTraces
from frontend_svc.settings import Front, Settings, place_wait_s
from frontend_svc.tenants import TenantUsage, usage_servicer
from tailrace.address import format_address
from tailrace.model_folder import ModelFolderError, require_files
from tailrace.model_identity import identify_model
from tailrace.security.options import exposed
from tailrace.service import vllm_rs
from tailrace.service.options import CommonOptions, common_options
from tailrace.service.private_folder import private_folder
from tailrace.service.runtime import Shutdown, open_service, run_service
from tailrace.service.server import serve_grpc
from tailrace.service.settings import options_of, settings_options
from tailrace.service.tasks import supervised
from tailrace.service.vllm_line import VllmCommand, VllmLine, read_line
from tailrace.store.membership import Membership
from tailrace.telemetry.metrics import Page
from tailrace.tenancy.file import KeyFile, KeyFileUnusable, read_keys, register_key_file
from tailrace.tiny import MODEL_PATH, REASONING_PARSER

log = logging.getLogger(__name__)

KIND: Final = "frontend"
# Version of what front ends exchange about answers; increased with each change that an older one would
# misread.
_ANSWERS_FORMAT: Final = "1"
# ssl.CERT_REQUIRED, as vLLM's flag has it.
_CERTIFICATE_REQUIRED: Final = "2"
_DEV_MODE: Final = "VLLM_SERVER_DEV_MODE"
_RESPONSES_STORE: Final = "VLLM_ENABLE_RESPONSES_API_STORE"


@click.command("frontend", cls=VllmCommand)
@common_options(KIND)
@settings_options(Settings, "settings")
def command(common: CommonOptions, settings: Settings, arguments: Sequence[str]) -> None:
    """Serve the fleet to users through vLLM's own API server.

    Takes any flag of `vllm serve`. Those of the engine count where the API server needs them, such as
    --max-model-len; give workers the same.
    """
    line = read_line(arguments, settings.model)
    settings = _with_defaults(replace(settings, frontend_id=common.member_id, line=line))
    _check(common, settings)
    try:
        require_files(settings.model, line.flags)
    except ModelFolderError as error:
        raise click.BadParameter(str(error), param_hint="--model") from error
    if settings.vllm_rs is not None:
        _check_vllm_rs(settings.vllm_rs, settings.line)
    run_service(lambda shutdown: serve(common, settings, shutdown))


def _check(common: CommonOptions, settings: Settings) -> None:
    """Refuse settings that do not go together. Raise click.UsageError or click.ClickException."""
    try:
        split_address(settings.http)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--http") from error
    if settings.api_keys is not None:
        _check_keys(settings.api_keys, settings.front, settings.line)
    elif not _asks_for_key(settings.line) and not _asks_for_certificate(settings.line):
        _check_without_keys(common, settings.http)
    if settings.limits.fair_backlog_tokens and settings.api_keys is None:
        raise click.UsageError("--fair-backlog: requires --api-keys")
    if settings.on_demand and settings.front is Front.NONE:
        raise click.UsageError("--on-demand: with --front none, another process starts the API server")
    if settings.front is not Front.PYTHON:
        if settings.keep_answers_s:
            raise click.UsageError(
                "--keep-answers: not supported by vllm-rs, which has no middleware; use --front python"
            )
        _refuse_given(
            {**options_of(BodyLimits), **options_of(ConnectionLimits)},
            "has no effect without --front python: nothing else applies it",
        )


def _check_vllm_rs(executable: Path, line: VllmLine) -> None:
    """Raise click.UsageError if vllm-rs refuses flags, click.ClickException if it does not run."""
    try:
        problem = vllm_rs.refusal(executable, flags_to_json(line.without("config").flags))
    except OSError as error:
        raise click.ClickException(f"vllm-rs: {error}") from error
    if problem:
        raise click.UsageError(problem)


def _with_defaults(settings: Settings) -> Settings:
    """Return the settings with the defaults that follow from others. Raise click.ClickException."""
    model, line = settings.model or settings.line.model or str(MODEL_PATH), settings.line
    if Path(model).resolve() == MODEL_PATH and not line.last("reasoning_parser"):
        line = line.adding("--reasoning-parser", REASONING_PARSER)
    context, waits = click.get_current_context(), settings.wait_limits
    if context.get_parameter_source("place_s") is ParameterSource.DEFAULT:
        waits = replace(waits, place_s=place_wait_s(settings.front))
    waits = replace(waits, place_s=max(waits.place_s, waits.instance_s))
    return replace(
        settings,
        model=model,
        http=_http(settings.http, line, context.get_parameter_source("http") is ParameterSource.DEFAULT),
        line=line.without("host", "port", "model"),
        vllm_rs=_vllm_rs(settings.vllm_rs) if settings.front is Front.RUST else None,
        wait_limits=waits,
    )


def _http(http: str, line: VllmLine, default: bool) -> str:
    """Return the address for users, which vLLM's --host and --port also name. Raise click.UsageError."""
    if not default:
        if line.has("host", "port"):
            raise click.UsageError(f"--http {http} cannot be combined with --host and --port: it has both")
        return http
    host, _, port = http.rpartition(":")
    host = line.last("host") or host
    return f"{f'[{host}]' if ':' in host and not host.startswith('[') else host}:{line.last('port') or port}"


async def serve(common: CommonOptions, settings: Settings, shutdown: Shutdown) -> None:
    """Run one front end until cancelled. Raise StoreUnavailable or ListenError (PortTaken)."""
    served = await asyncio.to_thread(_served_model, settings)
    readiness = Readiness()
    pages = {READY_PATH: lambda: _ready_page(readiness)}
    async with open_service(KIND, common, pages) as service, AsyncExitStack() as stack:
        members, channels, registry = service.members, service.channels, service.registry
        http = stack.enter_context(bind_http(settings.http, lambda: _is_shared(common, settings, members)))
        registry.model = served.public_name
        _register_readiness(registry, readiness)
        tenants = None
        if settings.api_keys is not None:
            keys = KeyFile(settings.api_keys)
            register_key_file(registry, keys)
            if settings.front is Front.RUST:
                tenants = TenantUsage(keys)
        answers, setting = None, ""
        if settings.keep_answers_s:
            setting = _answers_setting(settings, served)
            answers = keep_answers(settings, setting, members, channels, registry)
        adapters = SharedAdapters(service.store, members, served.public_name)
        stack.push_async_callback(adapters.close)
        servicers = [usage_servicer(tenants, readiness, settings.api_keys is not None)]
        if answers is not None:
            servicers.append(answers_servicer(answers))
        server = await stack.enter_async_context(serve_grpc(common.listen, servicers, common.transport))
        await server.set_serving(False)
        record = msgspec.structs.replace(
            service.record(server.address),
            http_address=common.advertised(_host_port(http.getsockname())),
            model_name=served.public_name,
            model=served.name,
            model_key=served.key,
            names=[*settings.names],
            api_server=settings.front.value,
            parses_tools=bool(settings.line.last("tool_call_parser")),
            https="ssl_certfile" in settings.line.flags,
            asleep=settings.on_demand,
            answers=setting,
        )
        # Before the HTTP port is bound: a second front end on it must recognise this one as a member.
        registration = await stack.enter_async_context(service.announced(record))
        announcer = Announcer(registration, record)
        await stack.enter_async_context(supervised({"announces the front end": announcer.run}))
        tracing = service.tracing
        traces = RequestTraces(tracing.tracer(KIND), common.member_id) if tracing.enabled else None

        async def set_serving(serving: bool) -> None:
            await server.set_serving(serving)
            if serving:
                scheme = "https" if "ssl_certfile" in settings.line.flags else "http"
                log.info("serving users on %s://%s", scheme, record.http_address)

        folder = settings.ipc_folder or stack.enter_context(private_folder("frontend"))
        engine = FleetEngine(
            settings,
            members,
            channels,
            folder,
            registry,
            traces,
            served,
            announcer.set_models,
            answers,
            adapters,
            tenants,
        )
        try:
            await run_front_end(settings, engine, http, set_serving, readiness, shutdown, announcer.woke)
        except (ApiServerExited, ApiServerStuck) as error:
            if isinstance(error, ArgumentsRefused):
                raise SystemExit(ARGUMENTS_REFUSED) from None
            log.error("%s", error)
            raise SystemExit(1) from None


def _refuse_given(flags: Mapping[str, str], problem: str) -> None:
    """Raise click.UsageError if one of these options, by parameter, was given."""
    context = click.get_current_context()
    for parameter, flag in flags.items():
        if context.get_parameter_source(parameter) is not ParameterSource.DEFAULT:
            raise click.UsageError(f"{flag} {problem}")


def _check_keys(file: Path, front: Front, line: VllmLine) -> None:
    """Check the key file. Raise click.UsageError or click.ClickException."""
    if front is Front.NONE:
        raise click.UsageError("--api-keys: an API server of your own does not ask for them")
    if _asks_for_key(line):
        raise click.UsageError("--api-keys cannot be combined with vLLM's own key (VLLM_API_KEY, --api-key)")
    if os.environ.get(_RESPONSES_STORE, "").strip() not in ("", "0"):
        raise click.UsageError(
            f"--api-keys cannot be combined with {_RESPONSES_STORE}: vLLM gives a stored response to whoever "
            "knows its ID, of any tenant"
        )
    if front is Front.RUST and os.environ.get(_DEV_MODE, "").strip() not in ("", "0"):
        raise click.UsageError(
            f"--api-keys cannot be combined with {_DEV_MODE} and vllm-rs: its further routes ask for no key"
        )
    try:
        tenant_keys = read_keys(file)
    except KeyFileUnusable as error:
        raise click.ClickException(str(error)) from error
    if front is Front.RUST and not tenant_keys.edge_key:
        raise click.UsageError(
            f"--api-keys: {file} has no key of edges, by which alone vllm-rs is used with keys: any "
            "`tailrace keys make` adds it; then copy the file to all edges and front ends"
        )


def _ready_page(readiness: Readiness) -> Page:
    unready = readiness.unready
    if unready is None:
        return HTTPStatus.OK, "text/plain", b""
    return HTTPStatus(unready.status), "application/json", unready_body(unready)


def _register_readiness(registry: CollectorRegistry, readiness: Readiness) -> None:
    unready = Gauge("tailrace_frontend_unready", "1 while /ready of this port is 503.", registry=registry)
    unready.set_function(lambda: float(readiness.unready is not None))


def _check_without_keys(common: CommonOptions, http: str) -> None:
    """Refuse to serve users of other machines without keys. Raise click.UsageError.

    Certificates make no difference: they protect the other ports, and users have none.
    """
    if not common.insecure and exposed([http]):
        raise click.UsageError(
            f"users' address {http} can be reached from other machines, and requests there need no API key: "
            "give --api-keys FILE (tailrace keys make writes it) or set VLLM_API_KEY, listen on 127.0.0.1, "
            "require clients' certificates (--ssl-cert-reqs 2), or give --insecure"
        )


def _asks_for_key(line: VllmLine) -> bool:
    """Return whether vLLM's own API server requires an API key: an empty one counts as none."""
    return any(line.flags.get("api_key") or [os.environ.get("VLLM_API_KEY", "")])


def _asks_for_certificate(line: VllmLine) -> bool:
    """Return whether vLLM's own API server requires a certificate of its clients, as behind an edge."""
    given = line.last("ssl_certfile") and line.last("ssl_ca_certs")
    return bool(given) and line.last("ssl_cert_reqs") == _CERTIFICATE_REQUIRED


def _served_model(settings: Settings) -> ServedModel:
    """Identify the model. Raise OSError if its folder cannot be read."""
    identity = identify_model(settings.model, settings.line.last("revision"))
    return ServedModel(settings.model, identity, settings.public_name)


def _answers_setting(settings: Settings, served: ServedModel) -> str:
    """Return a digest of everything besides the log that an answer depends on.

    Front ends with equal digests may continue each other's answers.
    """
    depends = [
        _ANSWERS_FORMAT,
        version("vllm"),
        served.key,
        settings.public_name,
        *(f"{name} {' '.join(values)}" for name, values in sorted(settings.line.flags.items())),
    ]
    return blake2b("\0".join(depends).encode(), digest_size=16).hexdigest()


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
    path = vllm_rs.find() if configured is None else configured
    if path is None or not path.is_file():
        raise click.ClickException(
            f"no vllm-rs at {path or vllm_rs.beside_python()}; `python -m {vllm_rs.__name__}` fetches it"
        )
    return path.absolute()


if __name__ == "__main__":
    sys.exit(command())
