"""Run one front end: the API server as a child process, with the fleet as its engine core."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import msgspec

from frontend_svc.admission import Readiness
from frontend_svc.api_server.launch import python_launch, rust_launch
from frontend_svc.api_server.sockets import (
    EngineSockets,
    first_connection,
    is_listening,
    stop_accepting,
    waiting_connections,
)
from frontend_svc.api_server.spec import ARGUMENTS_REFUSED, ApiServerSpec, Launch
from frontend_svc.engine import FleetEngine
from frontend_svc.settings import Front, Settings
from tailrace.address import format_address
from tailrace.records import ServiceRecord
from tailrace.service.child import Child
from tailrace.service.runtime import Shutdown
from tailrace.service.tasks import first_ended, supervised
from tailrace.store.client import StoreUnavailable
from tailrace.store.registration import Registration

log = logging.getLogger(__name__)

# Seconds between two checks whether the API server listens.
_POLL_S: Final = 0.05
# Connections that wait for an API server that is asleep, as many as the system allows.
_BACKLOG: Final = 4_096
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
    engine: FleetEngine,
    http: socket.socket,
    set_serving: Callable[[bool], Awaitable[None]],
    readiness: Readiness,
    shutdown: Shutdown,
    on_woken: Callable[[], None],
) -> None:
    """Serve until cancelled.

    `set_serving(True)` is awaited once users can connect, `set_serving(False)` when the drain begins: nothing
    new is accepted, and streams have `settings.drain_timeout_s` to finish. `readiness` is kept up to date.
    `on_woken()` is called once an API server that was started on demand answers.

    Raise ApiServerExited, ApiServerStuck or OSError; none of them leaves a process behind.
    """
    readiness.admission = engine.admission
    readiness.context_tokens = lambda: engine.context_tokens
    with ExitStack() as stack:
        api_server: _ApiServer | None = None
        if settings.front is not Front.NONE:
            sockets = stack.enter_context(EngineSockets.bind(engine.ipc_folder))
            api_server = _ApiServer(http, sockets, _launch(settings, engine, http, sockets))
            if not settings.on_demand:
                await api_server.start()
        drain = _Drain(settings, http, api_server, engine, set_serving, readiness)
        try:
            with shutdown.draining(drain.run, settings.drain_timeout_s + _MARGIN_S):
                async with supervised({"wait for listen": drain.announce}):
                    own = [] if api_server is None else [_keep(api_server, engine, on_woken)]
                    await first_ended(engine.run(), *own)
        finally:
            if api_server is not None and api_server.child is not None:
                await api_server.child.stop()


class _ApiServer:
    """The API server, which runs or is started by the first connection."""

    def __init__(self, http: socket.socket, sockets: EngineSockets, launch: Launch) -> None:
        self.http = http
        self._sockets = sockets
        self._launch = launch
        # None: it is asleep.
        self.child: Child | None = None

    async def start(self) -> Child:
        """Start it; it has its sockets from then on. Raise OSError."""
        self.child = await Child.launch(self._launch.command, self._launch.env, self._launch.fds)
        self._sockets.close()
        return self.child


class _Drain:
    """Report when users can connect, and let streams finish before the front end stops."""

    def __init__(
        self,
        settings: Settings,
        http: socket.socket,
        api_server: _ApiServer | None,
        engine: FleetEngine,
        set_serving: Callable[[bool], Awaitable[None]],
        readiness: Readiness,
    ) -> None:
        """`api_server` None: another process runs it, and cannot be told from here to stop accepting.
        Without a child, it is asleep, and there are no streams."""
        self._timeout_s = settings.drain_timeout_s
        self._http = http
        self._api_server = api_server
        self._engine = engine
        self._set_serving = set_serving
        self._readiness = readiness

    async def announce(self) -> None:
        """Report serving once users can connect."""
        # The socket is shared with the child, which calls listen() if it is not started on demand: there is
        # no event to wait for.
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
        child = None if self._api_server is None else self._api_server.child
        if child is None:
            return await self._engine.wait_idle(self._timeout_s)
        await stop_accepting(self._http)
        # The socket listens as long as any process has it open.
        self._http.close()
        return await child.finish(self._timeout_s)

    async def _end_streams(self) -> None:
        """End the streams that are left with an error, and wait until their clients have it."""
        self._engine.end_streams()
        if self._api_server is not None and self._api_server.child is not None:
            await self._api_server.child.finish(_FAREWELL_S)


def _launch(settings: Settings, engine: FleetEngine, http: socket.socket, sockets: EngineSockets) -> Launch:
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
        adapters=None if engine.adapters is None else engine.adapters.follow(engine.ipc_folder / "adapters"),
    )
    if settings.front is Front.RUST:
        return rust_launch(spec, http, sockets, settings.vllm_rs or Path())
    return python_launch(spec, http, sockets, engine.admission.path)


async def _keep(api_server: _ApiServer, engine: FleetEngine, on_woken: Callable[[], None]) -> None:
    """Start the API server when the first connection comes, if it is asleep, and wait until it exits by
    itself. Raise ApiServerExited or OSError."""
    if api_server.child is not None:
        await _watch(api_server.child)
        return
    api_server.http.listen(_BACKLOG)
    await first_connection(api_server.http)
    log.info("the first connection: the API server starts")
    child = await api_server.start()
    engine.expect_api_server()
    async with supervised({"wait for accept": lambda: _accepted(api_server.http, on_woken)}):
        await _watch(child)


async def _accepted(http: socket.socket, on_woken: Callable[[], None]) -> None:
    """Call `on_woken` once the API server has accepted the connections that came while it was asleep."""
    while http.fileno() >= 0 and waiting_connections(http):  # noqa: ASYNC110 - another process accepts
        await asyncio.sleep(_POLL_S)
    if http.fileno() < 0:
        return  # this front end stops before that
    log.info("the API server answers")
    on_woken()


async def _watch(child: Child) -> None:
    """Wait until the API server exits by itself. Raise ApiServerExited."""
    status = await child.wait()
    if child.finishing:
        await asyncio.get_running_loop().create_future()
    if status == ARGUMENTS_REFUSED:
        raise ArgumentsRefused("the API server refused its arguments")
    ending = f"was killed by signal {-status}" if status < 0 else f"exited with status {status}"
    raise ApiServerExited(f"the API server {ending}")


# Pause between two writes: a starting front end connects to one instance after the other.
_PAUSE_S: Final = 0.2
# Pause between attempts while etcd cannot be reached.
_RETRY_S: Final = 1.0


class Announcer:
    """Publish in etcd which models this front end is connected to, and whether its API server is asleep;
    changes during a write go into the next one."""

    def __init__(self, registration: Registration, record: ServiceRecord) -> None:
        self._registration = registration
        self._record = record
        self._changed = asyncio.Event()

    def set_models(self, models: frozenset[str]) -> None:
        """Set the model keys to publish. Does not wait."""
        self._publish(msgspec.structs.replace(self._record, connected_models=sorted(models)))

    def woke(self) -> None:
        """Publish that the API server answers. Does not wait."""
        self._publish(msgspec.structs.replace(self._record, asleep=False))

    def _publish(self, record: ServiceRecord) -> None:
        if record != self._record:
            self._record = record
            self._changed.set()

    async def run(self) -> None:
        """Write the front end's record when it changes, until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                await self._registration.update(msgspec.json.encode(self._record))
                await asyncio.sleep(_PAUSE_S)
            except StoreUnavailable as error:
                log.warning("cannot publish this front end to etcd: %s", error)
                # The registration writes its value again once etcd is back; by then it may be outdated.
                self._changed.set()
                await asyncio.sleep(_RETRY_S)
            except Exception:
                self._changed.set()
                raise
