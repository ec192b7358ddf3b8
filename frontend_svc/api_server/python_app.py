"""vLLM's unmodified OpenAI app, over an engine core in another process.

Follows vLLM's own launcher for API servers whose engines are managed elsewhere
(vllm/entrypoints/launchers/api_server/entry.py, run_server_worker), with FleetClient as the engine client.
"""

from __future__ import annotations

import resource
import socket
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import msgspec
import uvloop
from vllm import logger as vllm_logger
from vllm.config import LoRAConfig, ModelConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.entry import build_and_serve
from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
from vllm.envs import enable_envs_cache
from vllm.reasoning import ReasoningParserManager
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.usage.usage_lib import UsageContext

from frontend_svc.admission import AdmissionReader
from frontend_svc.api_server.adapters import ShareAdapters
from frontend_svc.api_server.edge import CheckRequest
from frontend_svc.api_server.engine_client import FleetClient
from frontend_svc.api_server.http_protocol import BoundedProtocol, show_request_ids
from frontend_svc.api_server.kept_answers import FrontendCalls, KeepAnswers
from frontend_svc.api_server.large_lane import use_two_lanes
from frontend_svc.api_server.launch import PythonBoot
from frontend_svc.api_server.media import bound_images, keep_media_apart
from frontend_svc.api_server.middleware import (
    GracefulStop,
    Ready,
    RefuseEngineControl,
    RequireApiKey,
    RetryAfter,
    SchemaApart,
    api_keys,
)
from frontend_svc.api_server.request_limits import RequestLimits
from frontend_svc.api_server.spec import (
    ARGUMENTS_REFUSED,
    DEFAULT_MAX_HEADER_BYTES,
)
from frontend_svc.api_server.stream_start import StreamStart
from frontend_svc.api_server.tenants import TenantAdmission, Tenants
from frontend_svc.api_server.token_lists import answer_in_parts, use_ids_alone
from tailrace.tenancy.body import max_text_bytes_of
from tailrace.tenancy.file import KeyFile
from tailrace.wire.serve_flags import FlagRefused, read_serve_arguments, serve_parser
from tailrace.wire.setting_errors import one_line, without_pydantic


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
        RefuseEngineControl,
        CheckRequest,
        RequestLimits,
        RequireApiKey,
        TenantAdmission,
        Ready,
        GracefulStop,
    )
    args.middleware = [*args.middleware, *(f"{kind.__module__}.{kind.__qualname__}" for kind in middleware)]


def set_limits(boot: PythonBoot, model: ModelConfig) -> None:
    """Set what requests may ask for, as far as it depends on the model."""
    text_bytes = boot.limits.max_text_bytes or max_text_bytes_of(model.max_model_len)
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
    bound_images()
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
    BoundedProtocol.max_idle = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
    uvloop.run(serve(boot, args))


# Parse the arguments of vLLM's Python API server like `vllm serve`; end the process if one is refused.
#
# vLLM's own parser answers a wrong argument with the usage of a few hundred others. Here it is one line in
# click's form, "Error: ...", which names the argument, and click's exit status for a wrong command line.


def refuse(reason: str) -> NoReturn:
    """End the process: `reason`, which becomes one line, says which argument or setting is wrong."""
    print(f"Error: {without_pydantic(reason)}", file=sys.stderr, flush=True)
    sys.exit(ARGUMENTS_REFUSED)


def parse_arguments(arguments: list[str]) -> Namespace:
    """Parse the arguments and import the parsers that they name. End the process if one is refused."""
    cli_env_setup()
    parser = serve_parser()
    # vLLM's is 4 MiB, and counts only with the HTTP parser that it does not take.
    parser.set_defaults(h11_max_incomplete_event_size=DEFAULT_MAX_HEADER_BYTES)
    try:
        args = read_serve_arguments(parser, arguments)
    except FlagRefused as error:
        refuse(str(error))
    # vLLM 0.30 does not have this function.
    if hasattr(vllm_logger, "configure_logging_from_args"):
        vllm_logger.configure_logging_from_args(args)
    return args


def check_reasoning_parser(name: str, tokenizer: object) -> None:
    """End the process if the parser does not fit the model, as one whose marks its tokenizer lacks."""
    try:
        ReasoningParserManager.get_reasoning_parser(name)(tokenizer)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        refuse(f"argument --reasoning-parser: {name!r} does not fit this model: {one_line(error)}")
