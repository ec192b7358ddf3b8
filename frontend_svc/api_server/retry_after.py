"""ASGI middleware for vLLM's Python app: 429 and 503 answers say when to come back."""

from __future__ import annotations

from typing import Final

from frontend_svc.api_server.asgi import App, Message, Receive, Send

RETRY_AFTER_S: Final = 2
_STATUSES: Final = (429, 503)


class RetryAfter:
    """Add `Retry-After` to a 429 or 503 that has none."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass everything on; only the start of an HTTP response is looked at."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_start(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] in _STATUSES:
                headers = list(message.get("headers", []))
                if not any(name.lower() == b"retry-after" for name, _ in headers):
                    message["headers"] = [*headers, (b"retry-after", str(RETRY_AFTER_S).encode())]
            await send(message)

        await self._app(scope, receive, send_start)
