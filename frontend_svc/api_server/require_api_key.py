"""ASGI middleware for vLLM's Python app: with an API key set, all routes but those for probes want it.

vLLM guards /v1, /v2, /inference and /cohere alone: /invocations generates, and /tokenize, /pooling or /rerank
compute, for anyone who reaches the port.
"""

from __future__ import annotations

import os
import secrets
from argparse import Namespace
from http import HTTPStatus
from typing import ClassVar, Final

from frontend_svc.api_server.asgi import App, Message, Receive, Send, send_error

OPEN_PATHS: Final = frozenset({"/health", "/ping", "/version", "/load", "/metrics"})


def api_keys(args: Namespace) -> list[str]:
    """Return the keys as vLLM takes them: from --api-key, else from VLLM_API_KEY."""
    given: list[str] = args.api_key or [os.environ.get("VLLM_API_KEY", "")]
    return [key for key in given if key]


class RequireApiKey:
    """Answer 401 in OpenAI's error shape without a key of `keys`; no key set: pass everything on."""

    keys: ClassVar[list[str]] = []

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if self.keys and scope["type"] == "http" and scope["method"] != "OPTIONS":
            path = scope["path"].removeprefix(scope.get("root_path", ""))
            if path not in OPEN_PATHS and not self._has_key(scope):
                message = "This API wants its key: send the header 'Authorization: Bearer KEY'."
                challenge = {"www-authenticate": "Bearer"}
                await send_error(send, HTTPStatus.UNAUTHORIZED, "AuthenticationError", message, challenge)
                return
        await self._app(scope, receive, send)

    def _has_key(self, scope: Message) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, token = given.partition(b" ")
        # All keys are compared, in constant time each: how long it takes tells nothing.
        matches = [secrets.compare_digest(token, key.encode()) for key in self.keys]
        return scheme.lower() == b"bearer" and any(matches)
