"""vLLM's unmodified OpenAI app, over an engine core in another process.

Follows vLLM's own launcher for API servers whose engines are managed elsewhere
(vllm/entrypoints/launchers/api_server/entry.py, run_server_worker), with FleetClient as the engine client.
"""

from __future__ import annotations

import resource
import socket
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import msgspec
import uvloop
from vllm.config import LoRAConfig, ModelConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.entry import build_and_serve
from vllm.envs import enable_envs_cache
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.usage.usage_lib import UsageContext
from vllm.utils.system_utils import set_ulimit

from frontend_svc.admission import AdmissionReader
from frontend_svc.api_server.access_log import show_request_ids
from frontend_svc.api_server.adapters import ShareAdapters
from frontend_svc.api_server.edge import CheckRequest
from frontend_svc.api_server.engine_client import FleetClient
from frontend_svc.api_server.engine_control import RefuseEngineControl
from frontend_svc.api_server.http_protocol import BoundedProtocol
from frontend_svc.api_server.kept_answers import FrontendCalls, KeepAnswers
from frontend_svc.api_server.large_lane import use_two_lanes
from frontend_svc.api_server.media import keep_media_apart
from frontend_svc.api_server.middleware import (
    GracefulStop,
    Ready,
    RequireApiKey,
    RetryAfter,
    SchemaApart,
    api_keys,
)
from frontend_svc.api_server.python import PythonBoot
from frontend_svc.api_server.request_limits import RequestLimits
from frontend_svc.api_server.spec import DEFAULT_MAX_TEXT_BYTES, TEXT_BYTES_PER_TOKEN
from frontend_svc.api_server.stream_start import StreamStart
from frontend_svc.api_server.tenants import TenantAdmission, Tenants
from frontend_svc.api_server.token_lists import answer_in_parts, use_ids_alone
from frontend_svc.api_server.vllm_arguments import check_reasoning_parser, parse_arguments, refuse
from tailrace.tenancy.file import KeyFile
from tailrace.wire.setting_errors import one_line


def install_middleware(args: Namespace) -> None:
    """Add ours to the arguments of the app."""
    RequireApiKey.keys = api_keys(args)
    # The last middleware is the outermost.
    middleware = (
        SchemaApart,
        ShareAdapters,
        StreamStart,
        KeepAnswers,
        RetryAfter,
        GracefulStop,
        RefuseEngineControl,
        CheckRequest,
        RequestLimits,
        RequireApiKey,
        TenantAdmission,
        Ready,
    )
    args.middleware = [*args.middleware, *(f"{kind.__module__}.{kind.__qualname__}" for kind in middleware)]


def set_limits(boot: PythonBoot, model: ModelConfig) -> None:
    """Set what requests may ask for, as far as it depends on the model."""
    text_bytes = boot.limits.max_text_bytes or max(
        DEFAULT_MAX_TEXT_BYTES, TEXT_BYTES_PER_TOKEN * model.max_model_len
    )
    RequestLimits.takes_media = model.is_multimodal_model or model.enable_prompt_embeds
    RequestLimits.configure(replace(boot.limits, max_text_bytes=text_bytes), bool(boot.api_keys_path))


def _caches_media_in_renderer(model: ModelConfig) -> bool:
    """Return whether vLLM allows one thread only for rendering, as it uses a cache of media."""
    media = model.multimodal_config
    return model.runner_type == "pooling" and media is not None and media.mm_processor_cache_gb > 0


def names_at_start(args: Namespace, lora: LoRAConfig) -> set[str]:
    """Return the names that are served from the start: the base model's, and adapters'."""
    modules = {module.name for module in args.lora_modules or ()}
    return {*(args.served_model_name or [args.model]), *modules, *(lora.default_mm_loras or {})}


async def serve(boot: PythonBoot, args: Namespace) -> None:
    """Serve until SIGTERM, then finish the responses in progress."""
    engine_args = AsyncEngineArgs.from_cli_args(args)
    try:
        vllm_config = engine_args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    except (TypeError, ValueError, OSError) as error:
        refuse(f"vLLM's API server rejects these settings: {one_line(error)}")
    if args.reasoning_parser:
        check_reasoning_parser(args.reasoning_parser, cached_tokenizer_from_config(vllm_config.model_config))
    # With a count above one, API servers send every image in full. A single one omits what its engine has
    # seen, but here another engine may get the request.
    vllm_config.parallel_config._api_process_count = 2
    model = vllm_config.model_config
    set_limits(boot, model)
    two_lanes = not _caches_media_in_renderer(model)
    if two_lanes:
        # The renderer has a copy of the tokenizer for each of its threads, of which there will be another.
        model.renderer_num_workers += 1
    http = socket.socket(fileno=boot.http_fd)
    FleetClient.admission = Ready.admission = AdmissionReader(Path(boot.admission_path))
    FleetClient.sends_tenants = boot.sends_tenants
    use_ids_alone()
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
    if two_lanes:
        use_two_lanes(engine.renderer._executor)
    keep_media_apart(engine.renderer)
    answer_in_parts()
    # vLLM does this when its engine core has started, which here is another process. Its code reads settings
    # from the environment for every token.
    enable_envs_cache()
    if boot.keeps_answers:
        KeepAnswers.frontend = FrontendCalls(engine.engine_core.call_utility_async)
    try:
        if boot.adapters_path and vllm_config.lora_config is not None:
            given = names_at_start(args, vllm_config.lora_config)
            await ShareAdapters.share(Path(boot.adapters_path), engine.engine_core.call_utility_async, given)
        await engine.reset_mm_cache()
        shutdown = await build_and_serve(engine, boot.listen_address, http, args, http=BoundedProtocol)
    finally:
        engine.shutdown(timeout=vllm_config.shutdown_timeout)
    try:
        await shutdown
    finally:
        http.close()


def run(boot_json: str, arguments: list[str]) -> None:
    """Serve until stopped. `arguments`: those of `vllm serve`."""
    boot = msgspec.json.decode(boot_json, type=PythonBoot)
    show_request_ids()
    args = parse_arguments(arguments)
    install_middleware(args)
    CheckRequest.max_bytes = KeepAnswers.max_bytes = boot.limits.max_body_bytes
    BoundedProtocol.limits = boot.connections
    BoundedProtocol.max_header_bytes = args.h11_max_incomplete_event_size
    BoundedProtocol.max_header_fields = args.h11_max_header_count
    if boot.api_keys_path:
        TenantAdmission.tenants = Tenants(KeyFile(Path(boot.api_keys_path)))
    set_ulimit()
    BoundedProtocol.max_idle = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
    uvloop.run(serve(boot, args))
