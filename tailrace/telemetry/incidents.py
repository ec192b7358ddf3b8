"""What went wrong in a process without ending it: counted, and logged, a few a minute of each kind.

The counters belong to the process; `new_registry` exports them.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from prometheus_client import Counter, Gauge

from tailrace.bounded import printable

_INTERVAL_S: Final = 10.0


@dataclass(slots=True)
class _Kind:
    """When the interval began with a message of this kind, and how many were logged and left out in it."""

    began_s: float
    logged: int = 1
    left_out: int = 0


class LimitedLog:
    """Log the first messages of each kind at once, at most `burst` per interval; the first of a later one
    says how many were left out. Kinds must be few."""

    def __init__(
        self,
        log: logging.Logger,
        interval_s: float = _INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
        burst: int = 1,
    ) -> None:
        """`clock` returns seconds."""
        self._log = log
        self._burst = burst
        self._interval_s = interval_s
        self._clock = clock
        self._kinds: dict[str, _Kind] = {}

    def write(self, level: int, kind: str, message: str) -> None:
        """Log a message of this kind at a level of `logging`, or count it."""
        now_s = self._clock()
        known = self._kinds.get(kind)
        if known is None or now_s - known.began_s >= self._interval_s:
            self._kinds[kind] = _Kind(now_s)
            if known is not None and known.left_out:
                seconds = now_s - known.began_s
                message = f"{message} (and {known.left_out} more such messages in the last {seconds:.0f} s)"
        elif known.logged < self._burst:
            known.logged += 1
        else:
            known.left_out += 1
            return
        self._log.log(level, "%s", message)


LOOP_FAILURES: Final = Counter(
    "tailrace_loop_failures",
    "Unexpected exceptions of loops and tasks, without which the process goes on; a loop is started again.",
    ["loop"],
    registry=None,
)
UNREADABLE: Final = Counter(
    "tailrace_unreadable",
    "Records in etcd and messages of other processes that cannot be read, and were skipped.",
    ["what"],
    registry=None,
)
UNREADABLE_NOW: Final = Gauge(
    "tailrace_unreadable_records",
    "Records that are in etcd now and are skipped.",
    ["what"],
    registry=None,
)
TAKEN_NAME: Final = "adapter under a taken name"
# Known beforehand, so that the first one is an increase; membership says `... record` by what it reads.
RECORD_KINDS: Final = (
    *(
        f"{area} record"
        for area in [
            "instances",
            "services",
            "leader",
            "profiles",
            "pools",
            "rollouts",
            "adapters",
            "stages",
            "policy",
            "slo",
            "withdrawn",
        ]
    ),
    TAKEN_NAME,
)
ODD_KEY: Final = "key in etcd"
ODD_VALUE: Final = "value in etcd"
LASTING_KINDS: Final = (*RECORD_KINDS, ODD_KEY, ODD_VALUE)
"""Those that stay until somebody deletes them."""
UNREADABLE_KINDS: Final = (
    *LASTING_KINDS,
    "answer of a rank",
    "message of a front end",
    "message of a worker",
    "report of a worker",
    "reply of a service",
    "message of a stream",
    "message of the API server",
    "outputs of a worker",
    "rollout of a scheduler",
)
for _kind in UNREADABLE_KINDS:
    UNREADABLE.labels(_kind)
for _kind in LASTING_KINDS:
    UNREADABLE_NOW.labels(_kind)

_SHOWN: Final = 200

_limited: Final = LimitedLog(logging.getLogger(__name__), interval_s=60.0)
# A record is there until it is deleted, so that each must be named.
_skipped: Final = LimitedLog(logging.getLogger(__name__), interval_s=60.0, burst=20)


def loop_named(name: str) -> str:
    """Return the name of a loop or a kind of tasks, and export its counter, so that the first failure is an
    increase."""
    LOOP_FAILURES.labels(name)
    return name


def loop_failed(loop: str, which: str, error: BaseException) -> None:
    """Count and log an unexpected exception of a loop or task.

    `loop` is one of few names, `which` says more.
    """
    LOOP_FAILURES.labels(loop).inc()
    text = "".join(traceback.format_exception(error)).rstrip()
    name = f"{loop} ({shown(which)})" if which else loop
    _limited.write(logging.ERROR, f"{loop} {type(error).__name__}", f"{name} failed; it goes on: {text}")


@contextmanager
def guarded(loop: str, which: str = "") -> Iterator[None]:
    """Count and log an unexpected exception of the block as one of the loop, which goes on after it."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - see above
        loop_failed(loop, which, error)


def unreadable(what: str, which: str, reason: object) -> None:
    """Count and log something from outside that is skipped. `what` is one of UNREADABLE_KINDS, `which` names
    it."""
    UNREADABLE.labels(what).inc()
    _skipped.write(
        logging.WARNING, f"unreadable {what}", f"{what} {shown(which)} is skipped: {shown(reason)}"
    )


def shown(text: object) -> str:
    """Return a text from outside in one short printable line."""
    line = str(text)
    return printable(line if len(line) <= _SHOWN else f"{line[:_SHOWN]}... ({len(line)} characters)")
