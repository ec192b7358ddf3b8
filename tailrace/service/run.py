"""Run a service's main coroutine as a process."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Final

import uvloop

from tailrace.store.errors import StoreUnavailable

log = logging.getLogger(__name__)

# What a clean shutdown may take before the process ends anyhow.
_GRACE_S: Final = 15.0
_LEVEL: Final = "TAILRACE_LOG_LEVEL"
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


def run_service(main: Callable[[], Coroutine[None, None, None]]) -> None:
    """Run `main` under uvloop until it returns or SIGTERM or SIGINT cancels it; never returns.

    `main` cleans up when it is cancelled. Exit codes: 0 it returned or was told to stop; 1 it failed, with
    one line on stderr for what an operator can mend, a traceback for what is our mistake.
    """
    level = os.environ.get(_LEVEL, "INFO").upper()
    if level not in logging.getLevelNamesMapping():
        sys.exit(f"{_LEVEL}: {level!r} is none of {', '.join(logging.getLevelNamesMapping())}")
    logging.basicConfig(
        stream=sys.stderr,
        level=level,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    # They tell of every lost connection again and again; what matters of it is ours to say.
    for library in ("grpc", "etcd3aio"):
        logging.getLogger(library).setLevel(logging.ERROR)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_until_signalled(main))
    except (StoreUnavailable, OSError) as error:
        log.error("%s", error)
        sys.exit(1)
    except Exception:
        log.exception("failed")
        sys.exit(1)
    sys.exit(0)


async def _until_signalled(main: Callable[[], Coroutine[None, None, None]]) -> None:
    loop = asyncio.get_running_loop()
    task = asyncio.create_task(main(), name="main")
    signalled = asyncio.Event()

    def stop(signum: int) -> None:
        if not signalled.is_set():
            log.info("%s: stopping", signal.Signals(signum).name)
            signalled.set()
            task.cancel()
            loop.call_later(_GRACE_S, _give_up)

    for number in _SIGNALS:
        loop.add_signal_handler(number, stop, number)
    try:
        await task
    except asyncio.CancelledError:
        if not signalled.is_set():
            raise


def _give_up() -> None:
    log.error("did not stop within %.0f s; ending", _GRACE_S)
    os._exit(1)
