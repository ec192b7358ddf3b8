"""Run one front end: the API server as a child process, with the fleet as its engine core."""

from __future__ import annotations

import asyncio
import logging
import socket
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry

from frontend_svc.adapters import SharedAdapters
from frontend_svc.admission import AdmissionFlag, Readiness
from frontend_svc.answers.coordinator import AnswerCoordinator
from frontend_svc.api_server.python import python_launch
from frontend_svc.api_server.rust import rust_launch
from frontend_svc.api_server.sockets import EngineSockets, is_listening, stop_accepting
from frontend_svc.api_server.spec import ARGUMENTS_REFUSED, ApiServerSpec, Launch
from frontend_svc.engine import FleetEngine
from frontend_svc.fleet import ServedModel
from frontend_svc.observer import RequestTraces
from frontend_svc.settings import Front, Settings
from frontend_svc.tenants import TenantUsage
from tailrace.address import format_address
from tailrace.members import Members
from tailrace.service.channels import Channels
from tailrace.service.child import Child
from tailrace.service.runtime import Shutdown
from tailrace.service.tasks import first_ended, supervised

log = logging.getLogger(__name__)

# Seconds between two checks whether the API server listens.
_POLL_S: Final = 0.05
# Time beyond the drain timeout for closing the listener and for work that the timeout does not bound.
_MARGIN_S: Final = 5.0
# Time for the API server to send the last events of the streams that did not finish.
_FAREWELL_S: Final = 2.0


class ApiServerExited(Exception):
    """The API server exited by itself; the message is one line for the operator."""


class ArgumentsRefused(ApiServerExited):
    """The API server refused an argument. It has said which, and why."""


async def run_front_end(
    settings: Settings,
    members: Members,
    channels: Channels,
    http: socket.socket,
    registry: CollectorRegistry,
    traces: RequestTraces | None,
    served: ServedModel | None,
    set_serving: Callable[[bool], Awaitable[None]],
    readiness: Readiness,
    shutdown: Shutdown,
    on_models: Callable[[frozenset[str]], None] = lambda models: None,
    answers: AnswerCoordinator | None = None,
    adapters: SharedAdapters | None = None,
    tenants: TenantUsage | None = None,
) -> None:
    """Serve until cancelled.

    `set_serving(True)` is awaited once users can connect, `set_serving(False)` when the drain begins: nothing
    new is accepted, and streams have `settings.drain_timeout_s` to finish. `readiness` is kept up to date.
    `on_models`, `answers`, `adapters` and `tenants`: see FleetEngine.

    Raise ApiServerExited, ApiServerStuck or OSError; none of them leaves a process behind.
    """
    with ExitStack() as stack:
        folder = settings.ipc_folder
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tailrace-frontend-")))
        readiness.admission = admission = AdmissionFlag(folder / "admission")
        adapters_path = None if adapters is None else adapters.follow(folder / "adapters")
        api_server: Child | None = None
        if settings.front is not Front.NONE:
            with EngineSockets.bind(folder) as sockets:
                launch = _launch(settings, http, sockets, admission.path, adapters_path)
                api_server = await Child.launch(launch.command, launch.env, launch.fds)
        engine = FleetEngine(
            settings,
            members,
            channels,
            admission,
            folder,
            registry,
            traces,
            served,
            on_models,
            answers,
            adapters,
            tenants,
        )
        drain = _Drain(settings, http, api_server, engine, set_serving, readiness)
        try:
            with shutdown.draining(drain.run, settings.drain_timeout_s + _MARGIN_S):
                async with supervised({"wait for listen": drain.announce}):
                    await first_ended(engine.run(), *([] if api_server is None else [_watch(api_server)]))
        finally:
            if api_server is not None:
                await api_server.stop()


class _Drain:
    """Report when users can connect, and let streams finish before the front end stops."""

    def __init__(
        self,
        settings: Settings,
        http: socket.socket,
        api_server: Child | None,
        engine: FleetEngine,
        set_serving: Callable[[bool], Awaitable[None]],
        readiness: Readiness,
    ) -> None:
        """`api_server` None: another process runs it, and cannot be told from here to stop accepting."""
        self._timeout_s = settings.drain_timeout_s
        self._http = http
        self._api_server = api_server
        self._engine = engine
        self._set_serving = set_serving
        self._readiness = readiness

    async def announce(self) -> None:
        """Report serving once users can connect."""
        # The socket is shared with the child, which is the one to call listen(): there is no event to wait
        # for.
        while self._api_server is not None and not is_listening(self._http):  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
        self._readiness.serving = True
        await self._set_serving(True)

    async def run(self) -> None:
        """Stop accepting requests and wait for the streams to finish; end those that do not in time, or
        before this is cancelled."""
        serving, self._readiness.serving = self._readiness.serving, False
        await self._set_serving(False)
        if not serving:
            return
        log.info("waiting for %d streams to finish", len(self._engine.table))
        try:
            finished = await self._finish()
        except asyncio.CancelledError:
            await self._end_streams()
            raise
        if not finished:
            log.warning("%d streams did not finish within %g s", len(self._engine.table), self._timeout_s)
            await self._end_streams()

    async def _finish(self) -> bool:
        if self._api_server is None:
            return await self._engine.wait_idle(self._timeout_s)
        await stop_accepting(self._http)
        # The socket listens as long as any process has it open.
        self._http.close()
        return await self._api_server.finish(self._timeout_s)

    async def _end_streams(self) -> None:
        """End the streams that are left with an error, and wait until their clients have it."""
        self._engine.end_streams()
        if self._api_server is not None:
            await self._api_server.finish(_FAREWELL_S)


def _launch(
    settings: Settings, http: socket.socket, sockets: EngineSockets, admission: Path, adapters: Path | None
) -> Launch:
    spec = ApiServerSpec(
        http_address=format_address(*http.getsockname()[:2]),
        model=settings.model,
        drain_timeout_s=settings.drain_timeout_s,
        line=settings.line,
        api_keys=settings.api_keys,
        connections=settings.connections,
        limits=settings.body_limits,
        sends_tenants=settings.limits.fair_backlog_tokens > 0,
        keeps_answers=settings.keep_answers_s > 0,
        adapters=adapters,
    )
    if settings.front is Front.RUST:
        return rust_launch(spec, http, sockets, settings.vllm_rs or Path())
    return python_launch(spec, http, sockets, admission)


async def _watch(api_server: Child) -> None:
    """Wait until the API server exits by itself. Raise ApiServerExited."""
    status = await api_server.wait()
    if api_server.finishing:
        await asyncio.get_running_loop().create_future()
    if status == ARGUMENTS_REFUSED:
        raise ArgumentsRefused("the API server refused its arguments")
    ending = f"was killed by signal {-status}" if status < 0 else f"exited with status {status}"
    raise ApiServerExited(f"the API server {ending}")
