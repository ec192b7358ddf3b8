"""Exit a process whose event loop is blocked, so that its supervisor restarts it.

A service that hangs answers nothing, yet its process is alive: neither systemd nor a container engine
restarts it. The timer runs in a C thread of `faulthandler` and needs neither the event loop nor the
interpreter lock.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

TIMEOUT: Final = "TAILRACE_WATCHDOG_S"
"""Environment variable: seconds for which the event loop may be blocked; 0 disables the watchdog."""

# Importing an engine blocks the loop for a minute on a slow, shared machine.
_DEFAULT_S: Final = 300.0
_BEATS: Final = 10


def watchdog_timeout_s() -> float:
    """Return the timeout from the environment. Raise ValueError that names the variable."""
    text = os.environ.get(TIMEOUT, "")
    if not text:
        return _DEFAULT_S
    try:
        timeout_s = float(text)
    except ValueError:
        timeout_s = -1.0
    if not 0.0 <= timeout_s < 1e6:
        raise ValueError(f"{TIMEOUT}: {text!r} is not a number of seconds (0: off)")
    return timeout_s


@contextmanager
def watched_loop(timeout_s: float) -> Iterator[None]:
    """Watch the running event loop during the block; `timeout_s` 0 disables that.

    If the loop is blocked for `timeout_s`, the stacks of all threads go to stderr and the process exits with
    code 1.
    """
    if timeout_s == 0.0:
        yield
        return
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle | None = None

    def beat() -> None:
        nonlocal timer
        faulthandler.dump_traceback_later(timeout_s, exit=True)
        timer = loop.call_later(timeout_s / _BEATS, beat)

    beat()
    try:
        yield
    finally:
        if timer is not None:
            timer.cancel()
        faulthandler.cancel_dump_traceback_later()
