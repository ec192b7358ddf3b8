"""ASGI middleware for vLLM's Python app: routes that control one engine answer 501 over a fleet.

vLLM's development mode (VLLM_SERVER_DEV_MODE=1) and its elastic expert parallelism add routes that pause,
sleep, re-weight or resize *the* engine. Behind this API server is a fleet whose scheduler places requests:
an engine that sleeps on its own would strand its streams.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

from frontend_svc.api_server.middleware import App, Message, Receive, Send, send_error

ENGINE_CONTROL_PATHS: Final = frozenset(
    {
        "/collective_rpc",
        "/finish_weight_update",
        "/get_world_size",
        "/init_weight_transfer_engine",
        "/is_paused",
        "/is_scaling_elastic_ep",
        "/is_sleeping",
        "/pause",
        "/release_kv_cache_memory",
        "/resume",
        "/scale_elastic_ep",
        "/shutdown_weight_transfer_engine",
        "/sleep",
        "/start_draft_weight_update",
        "/start_weight_update",
        "/update_weight_version",
        "/update_weights",
        "/wake_up",
        "/weight_checker",
        "/weight_info",
    }
)


class RefuseEngineControl:
    """Answer 501 in OpenAI's error shape on ENGINE_CONTROL_PATHS; pass everything else on."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] != "http" or scope["path"].rstrip("/") not in ENGINE_CONTROL_PATHS:
            await self._app(scope, receive, send)
            return
        message = (
            f"{scope['path']} controls a single engine and is not available on a fleet. "
            "To take an instance out of service use `tailrace drain INSTANCE`."
        )
        await send_error(send, HTTPStatus.NOT_IMPLEMENTED, "NotImplementedError", message)
