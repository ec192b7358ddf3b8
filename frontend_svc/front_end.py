"""One front end: a front half as a child process, and the fleet as its engine core."""

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

from frontend_svc.admission import AdmissionFlag
from frontend_svc.engine import FleetEngine
from frontend_svc.fleet import Members
from frontend_svc.front_half.listener import stop_accepting
from frontend_svc.front_half.process import FrontHalf
from frontend_svc.front_half.python import python_launch
from frontend_svc.front_half.rust import rust_launch
from frontend_svc.front_half.sockets import EngineSockets, is_listening
from frontend_svc.front_half.spec import FrontHalfSpec, Launch
from frontend_svc.served_model import ServedModel
from frontend_svc.settings import Front, Settings
from frontend_svc.traces import RequestTraces
from tailrace.cluster import Phase
from tailrace.service.channels import Channels
from tailrace.service.shutdown import Shutdown

log = logging.getLogger(__name__)

# Seconds between two looks whether the front half listens.
_LOOK_S: Final = 0.05
# For the listener to be given up, and for whatever the drain's own bound does not hold.
_MARGIN_S: Final = 5.0


class FrontHalfExited(Exception):
    """The front half has ended by itself; the message is one line for the operator."""


async def run_front_end(
    settings: Settings,
    members: Members,
    channels: Channels,
    http: socket.socket,
    registry: CollectorRegistry,
    traces: RequestTraces | None,
    served: ServedModel | None,
    set_serving: Callable[[bool], Awaitable[None]],
    shutdown: Shutdown,
) -> None:
    """Serve until cancelled. `set_serving(True)` is awaited once users can connect, `set_serving(False)` when
    the drain begins: nothing new is accepted, and streams have `settings.drain_timeout_s` to end.

    Raises FrontHalfExited, FrontHalfStuck, OSError; none of them leaves a process behind.
    """
    with ExitStack() as stack:
        folder = settings.ipc_folder
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tailrace-frontend-")))
        admission = AdmissionFlag(folder / "admission")
        front_half: FrontHalf | None = None
        if settings.front is not Front.NONE:
            with EngineSockets.bind(folder) as sockets:
                launch = _launch(settings, http, sockets, admission.path)
                front_half = await FrontHalf.launch(launch.command, launch.env, launch.fds)
        engine = FleetEngine(
            settings.frontend_id,
            members,
            channels,
            admission,
            folder,
            registry,
            traces,
            settings.patience,
            Phase.REASONING if settings.reasoning_parser else Phase.ANSWERING,
            settings.pace_s,
            settings.limits,
            served,
        )
        drain = _Drain(settings, http, front_half, engine, set_serving)
        try:
            with shutdown.draining(drain.run, settings.drain_timeout_s + _MARGIN_S):
                async with asyncio.TaskGroup() as group:
                    group.create_task(engine.run(), name="engine core")
                    if front_half is not None:
                        group.create_task(_watch(front_half), name="front half")
                    group.create_task(drain.announce(), name="wait for listen")
        finally:
            if front_half is not None:
                await front_half.stop()


class _Drain:
    """From the first user who can connect to the last stream that ends."""

    def __init__(
        self,
        settings: Settings,
        http: socket.socket,
        front_half: FrontHalf | None,
        engine: FleetEngine,
        set_serving: Callable[[bool], Awaitable[None]],
    ) -> None:
        """`front_half` None: somebody else's, which nobody here can tell to accept nothing more."""
        self._timeout_s = settings.drain_timeout_s
        self._http = http
        self._front_half = front_half
        self._engine = engine
        self._set_serving = set_serving
        self._serving = False

    async def announce(self) -> None:
        """Tell once users can connect."""
        # The socket is shared with the child, which alone calls listen(): there is no event for that.
        while self._front_half is not None and not is_listening(self._http):  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_S)
        self._serving = True
        await self._set_serving(True)

    async def run(self) -> None:
        """Accept nothing more, and wait for the streams to end."""
        await self._set_serving(False)
        if not self._serving:
            return
        log.info("%d streams to finish", len(self._engine.table))
        if self._front_half is None:
            finished = await self._engine.wait_idle(self._timeout_s)
        else:
            await stop_accepting(self._http)
            # Each process that has it open keeps it listening.
            self._http.close()
            finished = await self._front_half.finish(self._timeout_s)
        if not finished:
            log.warning("%d streams are cut after %g s", len(self._engine.table), self._timeout_s)


def _launch(settings: Settings, http: socket.socket, sockets: EngineSockets, admission: Path) -> Launch:
    host, port = http.getsockname()[:2]
    spec = FrontHalfSpec(
        http_address=f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
        model=settings.model,
        served_model_name=settings.served_model_name,
        reasoning_parser=settings.reasoning_parser,
        drain_timeout_s=settings.drain_timeout_s,
        vllm_arguments=settings.vllm_arguments,
        api_keys=settings.api_keys,
        max_body_bytes=settings.max_body_bytes,
    )
    if settings.front is Front.RUST:
        return rust_launch(spec, http, sockets, settings.vllm_rs)
    return python_launch(spec, http, sockets, admission)


async def _watch(front_half: FrontHalf) -> None:
    status = await front_half.wait()
    if front_half.finishing:
        return
    how = f"was killed by signal {-status}" if status < 0 else f"exited with status {status}"
    raise FrontHalfExited(f"the front half {how}")
