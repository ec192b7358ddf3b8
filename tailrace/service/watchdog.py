"""End or restart a process that hangs: its event loop is blocked, or a call of foreign code does not return.

A service that hangs answers nothing, yet its process is alive: neither systemd nor a container engine
restarts it. Python threads watch the loop and calls; they count only the time in which the process runs. A
C timer of `faulthandler` is for what keeps the interpreter lock, which they need.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, NoReturn

log = logging.getLogger(__name__)

TIMEOUT: Final = "TAILRACE_WATCHDOG_S"
"""Environment variable: seconds for which the event loop may be blocked; 0 disables the watchdog."""

# Importing an engine blocks the loop for a minute on a slow, shared machine.
_DEFAULT_S: Final = 300.0
_BEATS: Final = 10
# Timeouts until the C timer expires, which counts time in which the process was suspended.
_LOCKED: Final = 4

# Whether this process is a service that may be ended.
_watching = False


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
    code 1. Time in which the process was suspended (SIGSTOP, a frozen container) does not count. A call that
    keeps the interpreter lock is ended only after _LOCKED times as long, and suspended time counts for that:
    a process that was suspended for so long still exits when it goes on.
    """
    global _watching
    if timeout_s == 0.0:
        yield
        return
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle | None = None
    beats = 0

    def beat() -> None:
        nonlocal timer, beats
        beats += 1
        timer = loop.call_later(timeout_s / _BEATS, beat)

    beat()
    stopped = threading.Event()
    arguments = (stopped, timeout_s, lambda: beats)
    thread = threading.Thread(target=_watch_loop, args=arguments, name="loop-watchdog", daemon=True)
    thread.start()
    _watching = True
    try:
        yield
    finally:
        _watching = False
        if timer is not None:
            timer.cancel()
        stopped.set()
        thread.join()
        faulthandler.cancel_dump_traceback_later()


def _watch_loop(stopped: threading.Event, timeout_s: float, beats: Callable[[], int]) -> None:
    interval_s = timeout_s / _BEATS
    last, blocked_s, seen_s = 0, 0.0, time.monotonic()
    while blocked_s < timeout_s:
        faulthandler.dump_traceback_later(_LOCKED * timeout_s, exit=True)
        if stopped.wait(interval_s):
            return
        now_s, now = time.monotonic(), beats()
        # An interval that took much longer was one in which this thread did not run either.
        blocked_s = blocked_s + min(now_s - seen_s, 2 * interval_s) if now == last else 0.0
        last, seen_s = now, now_s
    # Not by the log, for which the blocked thread may hold a lock.
    os.write(2, f"the event loop was blocked for {blocked_s:.3g} s\n".encode())
    faulthandler.dump_traceback(all_threads=True)
    os._exit(1)


_BEAT_S: Final = 0.25
LATE_S: Final = 1.0
"""Seconds after which a watched call is reported as late."""
HUNG_S: Final = 3.0
"""Seconds after which a watched call is taken for one that never returns."""
# What counts of a time in which the call waited for a core throughout: on a machine that is much too small
# for its processes, too, a call that never returns is found.
_LEAST_SHARE: Final = 0.2


@contextmanager
def watched_calls(
    current: Callable[[], object | None],
    on_late: Callable[[object], None],
    on_hung: Callable[[object, float], None],
    hung_s: float = HUNG_S,
    thread_of: Callable[[object], int] | None = None,
) -> Iterator[None]:
    """Watch calls during the block, if it is in a block of `watched_loop`.

    `current` returns the call in progress, an object of its own for each, or None; `thread_of` the native id
    of the thread that makes it (None: this one makes all). A call is timed while the process runs and
    without the time in which its thread waited for a core: a process that was stopped, or a busy machine,
    makes no call late. `on_late` is called in the watching thread after LATE_S, `on_hung` with the seconds
    after `hung_s`.
    """
    if not _watching:
        yield
        return
    stopped = threading.Event()
    own_id = threading.get_native_id()
    arguments = (stopped, thread_of or (lambda _: own_id), hung_s, current, on_late, on_hung)
    # A daemon: it must not keep a process alive whose main thread has ended.
    thread = threading.Thread(target=_watch_calls, args=arguments, name="watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def _watch_calls(
    stopped: threading.Event,
    thread_of: Callable[[object], int],
    hung_s: float,
    current: Callable[[], object | None],
    on_late: Callable[[object], None],
    on_hung: Callable[[object, float], None],
) -> None:
    last: object | None = None
    own_s = seen_s = waited_s = 0.0
    while not stopped.wait(_BEAT_S):
        call = current()
        now_s = time.monotonic()
        now_waited_s = 0.0 if call is None else waited_for_core_s(thread_of(call))
        if call is None or call is not last:
            own_s = 0.0
        else:
            # A beat that took much longer was one in which this thread did not run either.
            passed_s = min(now_s - seen_s, 2 * _BEAT_S)
            own_s += max(passed_s * _LEAST_SHARE, passed_s - (now_waited_s - waited_s))
            if own_s >= LATE_S:
                on_late(call)
            if own_s >= hung_s:
                on_hung(call, own_s)
                own_s = 0.0
        last, seen_s, waited_s = call, now_s, now_waited_s


def waited_for_core_s(thread_id: int | None = None) -> float:
    """Return for how many seconds a thread of this process (None: this one) was ready to run, but another
    one had the core. 0 where the kernel does not say."""
    of = threading.get_native_id() if thread_id is None else thread_id
    try:
        with open(f"/proc/self/task/{of}/schedstat", "rb") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def restart_process() -> NoReturn:
    """Run this process's command again in its place, with the present environment.

    It keeps its process id, so whoever started it, supervisor or not, need not start it again. May be called
    from any thread.
    """
    try:
        sys.stderr.flush()
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2:
                # One of them was that of the listing.
                with suppress(OSError):
                    os.set_inheritable(int(name), False)
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    finally:
        # Could not be run again: whoever watches this process sees it end.
        os._exit(1)
