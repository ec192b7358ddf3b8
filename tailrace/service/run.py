"""Run a service's main coroutine as a process."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Final

import uvloop

from tailrace.service.failure import failure
from tailrace.service.shutdown import Shutdown
from tailrace.service.watchdog import watchdog_timeout_s, watched_loop
from tailrace.store.errors import StoreUnavailable

log = logging.getLogger(__name__)

# What a clean shutdown may take before the process ends anyhow.
_GRACE_S: Final = 15.0
_LEVEL: Final = "TAILRACE_LOG_LEVEL"
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


def run_service(main: Callable[[Shutdown], Coroutine[None, None, None]]) -> None:
    """Run `main` under uvloop until it returns or is told to stop; never returns.

    The first SIGTERM or SIGINT runs the drain that `main` has set in its Shutdown, if any, and then cancels
    `main`, which cleans up; a second one cuts the drain short. Exit codes: 0 it returned or was told to stop;
    1 it failed, with one line on stderr for what an operator can mend, a traceback for what is our mistake.
    """
    level = os.environ.get(_LEVEL, "INFO").upper()
    if level not in logging.getLevelNamesMapping():
        sys.exit(f"{_LEVEL}: {level!r} is none of {', '.join(logging.getLevelNamesMapping())}")
    logging.basicConfig(
        stream=sys.stderr,
        level=level,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    try:
        timeout_s = watchdog_timeout_s()
    except ValueError as error:
        sys.exit(str(error))
    # Where a library crashes, its stack is the only word there is.
    faulthandler.enable()
    # It tells of every lost connection again and again; what matters of it is ours to say.
    logging.getLogger("grpc").setLevel(logging.ERROR)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_until_signalled(main, timeout_s))
    except (StoreUnavailable, OSError) as error:
        log.error("%s", error)
        sys.exit(1)
    except Exception:
        log.exception("failed")
        sys.exit(1)
    sys.exit(0)


async def _until_signalled(
    main: Callable[[Shutdown], Coroutine[None, None, None]], watchdog_s: float
) -> None:
    with watched_loop(watchdog_s):
        await _run_to_end(main)


async def _run_to_end(main: Callable[[Shutdown], Coroutine[None, None, None]]) -> None:
    loop = asyncio.get_running_loop()
    shutdown = Shutdown()
    task = asyncio.create_task(main(shutdown), name="main")
    stopping: asyncio.Task[None] | None = None

    def drained(done: asyncio.Task[None]) -> None:
        if (error := failure(done)) is not None:
            log.error("draining failed", exc_info=error)
        task.cancel()
        loop.call_later(_GRACE_S, _give_up)

    def stop(signum: int) -> None:
        nonlocal stopping
        name = signal.Signals(signum).name
        if stopping is None:
            log.info("%s: stopping", name)
            stopping = asyncio.create_task(shutdown.run_drain(), name="drain")
            stopping.add_done_callback(drained)
        elif not stopping.done():
            log.info("%s again: stopping without draining", name)
            stopping.cancel()

    for number in _SIGNALS:
        loop.add_signal_handler(number, stop, number)
    try:
        await task
    except asyncio.CancelledError:
        if stopping is None:
            raise
    finally:
        if stopping is not None:
            stopping.cancel()
            await asyncio.gather(stopping, return_exceptions=True)


def _give_up() -> None:
    log.error("did not stop within %.0f s; ending", _GRACE_S)
    os._exit(1)
