"""One front end: a front half as a child process, and the fleet as its engine core."""

from __future__ import annotations

import asyncio
import logging
import socket
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry

from frontend_svc.admission import AdmissionFlag
from frontend_svc.engine import FleetEngine
from frontend_svc.fleet import Members
from frontend_svc.front_half.process import FrontHalf
from frontend_svc.front_half.python import python_launch
from frontend_svc.front_half.rust import rust_launch
from frontend_svc.front_half.sockets import EngineSockets, is_listening
from frontend_svc.front_half.spec import FrontHalfSpec, Launch
from frontend_svc.settings import Front, Settings
from frontend_svc.traces import RequestTraces
from tailrace.cluster import Phase
from tailrace.service.channels import Channels

log = logging.getLogger(__name__)

# Seconds between two looks whether the front half listens.
_LOOK_S: Final = 0.05


class FrontHalfExited(Exception):
    """The front half has ended by itself; the message is one line for the operator."""


async def run_front_end(
    settings: Settings,
    members: Members,
    channels: Channels,
    http: socket.socket,
    registry: CollectorRegistry,
    traces: RequestTraces | None,
    on_serving: Callable[[], None],
) -> None:
    """Serve until cancelled. `on_serving` is called once users can connect.

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
            settings.place_wait_s,
            Phase.REASONING if settings.reasoning_parser else Phase.ANSWERING,
            settings.pace_s,
        )
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(engine.run(), name="engine core")
                if front_half is not None:
                    group.create_task(_watch(front_half), name="front half")
                    group.create_task(_announce(http, on_serving), name="wait for listen")
                else:
                    on_serving()
        finally:
            if front_half is not None:
                await front_half.stop()


def _launch(settings: Settings, http: socket.socket, sockets: EngineSockets, admission: Path) -> Launch:
    host, port = http.getsockname()[:2]
    spec = FrontHalfSpec(
        http_address=f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
        model=settings.model,
        served_model_name=settings.served_model_name,
        reasoning_parser=settings.reasoning_parser,
        vllm_arguments=settings.vllm_arguments,
    )
    if settings.front is Front.RUST:
        return rust_launch(spec, http, sockets, settings.vllm_rs)
    return python_launch(spec, http, sockets, admission)


async def _watch(front_half: FrontHalf) -> None:
    status = await front_half.wait()
    how = f"was killed by signal {-status}" if status < 0 else f"exited with status {status}"
    raise FrontHalfExited(f"the front half {how}")


async def _announce(http: socket.socket, on_serving: Callable[[], None]) -> None:
    # The socket is shared with the child, which alone calls listen(): there is no event for that.
    while not is_listening(http):  # noqa: ASYNC110
        await asyncio.sleep(_LOOK_S)
    on_serving()
