"""vLLM's unmodified OpenAI app, over an engine core in another process.

Follows vLLM's own launcher for API servers whose engines are managed elsewhere
(vllm/entrypoints/launchers/api_server/entry.py, run_server_worker), with FleetClient as the engine client.
"""

from __future__ import annotations

import socket
from argparse import Namespace
from pathlib import Path

import msgspec
import uvloop
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.entry import build_and_serve
from vllm.envs import enable_envs_cache
from vllm.usage.usage_lib import UsageContext
from vllm.utils.system_utils import set_ulimit

from frontend_svc.admission import AdmissionReader
from frontend_svc.api_server.engine_client import FleetClient
from frontend_svc.api_server.engine_control import RefuseEngineControl
from frontend_svc.api_server.kept_answers import FrontendCalls, KeepAnswers
from frontend_svc.api_server.middleware import GracefulStop, RequireApiKey, RetryAfter, api_keys
from frontend_svc.api_server.python import PythonBoot
from frontend_svc.api_server.stream_start import StreamStart
from frontend_svc.api_server.tenants import BodyLimit, TenantAdmission, TenantRequests, Tenants
from frontend_svc.api_server.vllm_arguments import parse_arguments, refuse
from tailrace.tenancy.file import KeyFile
from tailrace.wire.setting_errors import one_line


def install_middleware(args: Namespace) -> None:
    """Add ours to the arguments of the app."""
    RequireApiKey.keys = api_keys(args)
    # The last middleware is the outermost.
    middleware = (
        StreamStart,
        KeepAnswers,
        RetryAfter,
        GracefulStop,
        RefuseEngineControl,
        TenantRequests,
        BodyLimit,
        RequireApiKey,
        TenantAdmission,
    )
    args.middleware = [*args.middleware, *(f"{kind.__module__}.{kind.__qualname__}" for kind in middleware)]


async def serve(boot: PythonBoot, args: Namespace) -> None:
    """Serve until SIGTERM, then finish the responses in progress."""
    engine_args = AsyncEngineArgs.from_cli_args(args)
    try:
        vllm_config = engine_args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    except (TypeError, ValueError, OSError) as error:
        refuse(f"vLLM's API server rejects these settings: {one_line(error)}")
    # With a count above one, API servers send every image in full. A single one omits what its engine has
    # seen, but here another engine may get the request.
    vllm_config.parallel_config._api_process_count = 2
    http = socket.socket(fileno=boot.http_fd)
    FleetClient.admission = AdmissionReader(Path(boot.admission_path))
    FleetClient.sends_tenants = boot.sends_tenants
    engine = FleetClient.from_vllm_config(
        vllm_config=vllm_config,
        usage_context=UsageContext.OPENAI_API_SERVER,
        enable_log_requests=engine_args.enable_log_requests,
        aggregate_engine_logging=engine_args.aggregate_engine_logging,
        disable_log_stats=engine_args.disable_log_stats,
        client_addresses={
            "input_address": boot.input_address,
            "output_address": boot.output_address,
            "input_listener": socket.socket(fileno=boot.input_fd),
            "output_listener": socket.socket(fileno=boot.output_fd),
        },
    )
    # vLLM does this when its engine core has started, which here is another process. Its code reads settings
    # from the environment for every token.
    enable_envs_cache()
    if boot.keeps_answers:
        KeepAnswers.frontend = FrontendCalls(engine.engine_core.call_utility_async)
    try:
        await engine.reset_mm_cache()
        shutdown = await build_and_serve(engine, boot.listen_address, http, args)
    finally:
        engine.shutdown(timeout=vllm_config.shutdown_timeout)
    try:
        await shutdown
    finally:
        http.close()


def run(boot_json: str, arguments: list[str]) -> None:
    """Serve until stopped. `arguments`: those of `vllm serve`."""
    boot = msgspec.json.decode(boot_json, type=PythonBoot)
    args = parse_arguments(arguments)
    install_middleware(args)
    BodyLimit.max_bytes = KeepAnswers.max_bytes = boot.max_body_bytes
    if boot.api_keys_path:
        TenantAdmission.tenants = Tenants(KeyFile(Path(boot.api_keys_path)))
    set_ulimit()
    uvloop.run(serve(boot, args))
