"""A complete front end, including the API server, over an echo worker, in a thread of the test process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import TypeVar

from prometheus_client import CollectorRegistry

from frontend_svc.admission import Readiness
from frontend_svc.api_server.sockets import bind_http
from frontend_svc.api_server.spec import BodyLimits
from frontend_svc.engine import FleetEngine
from frontend_svc.front_end import run_front_end
from frontend_svc.settings import Front, Limits, Settings, WaitLimits
from tailrace.service.channels import Channels
from tailrace.service.message_stream import MIN_MESSAGE_BYTES
from tailrace.service.private_folder import private_folder
from tailrace.service.runtime import Shutdown
from tailrace.service.vllm_line import VllmLine
from tailrace.tiny import MODEL_PATH, REASONING_PARSER
from tests.frontend.echo_worker import EchoWorker
from tests.frontend.fleet import record
from tests.frontend.scripted_worker import serving
from tests.static_members import StaticMembers
from tests.waiting import WAIT_S

T = TypeVar("T")
START_S = 4 * WAIT_S
PLACE_WAIT_S = 0.5
MAX_STREAMS = 8
DRAIN_S = WAIT_S


class FrontEndThread:
    """Front end in a thread. Users connect to `url`; change `members` only through `call`."""

    def __init__(
        self, front: Front, vllm_rs: Path, worker: EchoWorker | None = None, on_demand: bool = False
    ) -> None:
        self.front = front
        self._on_demand = on_demand
        # Set once an API server that is started on demand answers.
        self.woken = threading.Event()
        self.url = ""
        self.worker = worker or EchoWorker("w0")
        # Large enough for a usual prompt, small enough that a test can exceed it.
        self.worker.max_message_bytes = MIN_MESSAGE_BYTES
        self.members = StaticMembers()
        self.registry = CollectorRegistry()
        self.shutdown = Shutdown()
        self.readiness = Readiness()
        # The state that the health check would report.
        self.serving = False
        self._vllm_rs = vllm_rs
        self._loop: asyncio.AbstractEventLoop | None = None
        self._main: asyncio.Task[None] | None = None
        self._ready = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"front end {front.value}")

    def start(self) -> None:
        """Start and wait until users can connect. Raise RuntimeError if the front end does not start."""
        self._thread.start()
        if not self._ready.wait(START_S) or self._error is not None:
            self.stop()
            raise RuntimeError("the front end did not start") from self._error

    def stop(self) -> None:
        """Stop and wait for the end of the thread."""
        if self._loop is not None and self._main is not None:
            self._loop.call_soon_threadsafe(self._main.cancel)
        self._thread.join()

    def call(self, work: Coroutine[None, None, T]) -> T:
        """Run a coroutine in the front end's event loop and return its result."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_S)

    async def _set_serving(self, serving: bool) -> None:
        self.serving = serving
        if serving:
            self._ready.set()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except asyncio.CancelledError:
            pass
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits for the start
            self._error = error
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._loop, self._main = asyncio.get_running_loop(), asyncio.current_task()
        channels = Channels()
        async with serving(self.worker):
            self.members.instances["w0"] = record("w0", self.worker.address)
            with bind_http("127.0.0.1:0", lambda: False) as http, private_folder("frontend") as folder:
                self.url = f"http://127.0.0.1:{http.getsockname()[1]}"
                settings = Settings(
                    frontend_id="f0",
                    http="",
                    front=self.front,
                    on_demand=self._on_demand,
                    model=str(MODEL_PATH),
                    line=VllmLine.read(
                        ["--served-model-name", "tiny", "--reasoning-parser", REASONING_PARSER]
                    ),
                    vllm_rs=self._vllm_rs,
                    wait_limits=WaitLimits(PLACE_WAIT_S),
                    limits=Limits(max_streams=MAX_STREAMS),
                    drain_timeout_s=DRAIN_S,
                    # What no worker accepts is to be found out by the front end.
                    body_limits=BodyLimits(max_text_bytes=4 * MIN_MESSAGE_BYTES),
                )
                engine = FleetEngine(settings, self.members, channels, folder, self.registry, None)
                try:
                    await run_front_end(
                        settings,
                        engine,
                        http,
                        self._set_serving,
                        self.readiness,
                        self.shutdown,
                        self.woken.set,
                    )
                finally:
                    await channels.close()
