"""ASGI middleware for vLLM's Python app: SIGTERM lets the responses under way end.

vLLM's own handler of the signal first shuts its engine client down, which cuts every response. uvicorn's way
is the one that is wanted: accept nothing more, finish the responses, then end.
"""

from __future__ import annotations

import asyncio
import signal
from typing import Protocol

from frontend_svc.api_server.asgi import App, Message, Receive, Send


class Server(Protocol):
    """The part of uvicorn.Server that is used here."""

    should_exit: bool
    force_exit: bool


class GracefulStop:
    """Takes over SIGTERM and SIGINT once the app starts up, which is after vLLM has set its handlers."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass everything on; of the app's lifespan, note where its server is."""
        if scope["type"] == "lifespan":
            _take_signals(scope["app"].state.server)
        await self._app(scope, receive, send)


def _take_signals(server: Server) -> None:
    def stop() -> None:
        # The second time: at once.
        server.force_exit = server.should_exit
        server.should_exit = True

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
