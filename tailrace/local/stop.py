"""Stop the parts of a local cluster."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Final

from tailrace.local.plan import Tier
from tailrace.local.state import Part

GRACE_S: Final = 8.0
"""Time for the parts of a tier to finish or hand over their work and exit, in seconds."""
CLOSE_S: Final = 5.0
"""Time to exit without that, after a second SIGTERM."""
_KILL_S: Final = 5.0
_POLL_S: Final = 0.05
_TIERS: Final = {tier.value: order for order, tier in enumerate(Tier)}


def stop_parts(parts: Sequence[Part], reap: Callable[[], None] = lambda: None) -> list[str]:
    """Stop all processes of all parts, front ends first and etcd last; return the names of those that ran.

    Send SIGTERM to the part itself, and again after its time to drain; then SIGKILL to the rest of its
    session. `reap` is called while waiting, for callers whose children the parts are.
    """
    stopped: list[str] = []
    order = sorted(parts, key=lambda part: -_TIERS.get(part.tier, 0))
    for _, tier in groupby(order, key=lambda part: part.tier):
        stopped += _stop_tier(list(tier), reap, GRACE_S)
    return stopped


def stop_part(part: Part, drain_s: float, reap: Callable[[], None] = lambda: None) -> None:
    """Stop one part, which may drain for `drain_s` seconds, as `stop_parts` does."""
    _stop_tier([part], reap, drain_s)


def _stop_tier(tier: list[Part], reap: Callable[[], None], drain_s: float) -> list[str]:
    running = [part.name for part in tier if part.identity.session_members()]
    for patience_s in (drain_s, CLOSE_S):
        for part in tier:
            if part.identity.alive():
                _signal(part.identity.pid, signal.SIGTERM)
        _wait(lambda: any(part.identity.alive() for part in tier), patience_s, reap)
    # The rest: parts that did not exit, and children that they left behind.
    for part in tier:
        for pid in part.identity.session_members():
            _signal(pid, signal.SIGKILL)
    _wait(lambda: any(part.identity.session_members() for part in tier), _KILL_S, reap)
    return running


def _wait(running: Callable[[], bool], timeout_s: float, reap: Callable[[], None]) -> None:
    deadline = time.monotonic() + timeout_s
    reap()
    while running() and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        reap()


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # it has exited in the meantime
