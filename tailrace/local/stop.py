"""Stop the parts of a local cluster, and nothing else."""

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
"""How long the parts of a tier may take to finish or hand over what is under way, and end."""
CLOSE_S: Final = 5.0
"""How long they may then take to end without."""
_KILL_S: Final = 5.0
_POLL_S: Final = 0.05
_TIERS: Final = {tier.value: order for order, tier in enumerate(Tier)}


def stop_parts(parts: Sequence[Part], reap: Callable[[], None] = lambda: None) -> list[str]:
    """End every process of every part, front ends first and etcd last. Returns the names of those that ran.

    SIGTERM to the part itself, and again when its time to drain is up; then SIGKILL to what is left of its
    session. `reap` is called while waiting, for a caller whose children the parts are.
    """
    stopped: list[str] = []
    order = sorted(parts, key=lambda part: -_TIERS.get(part.tier, 0))
    for _, tier in groupby(order, key=lambda part: part.tier):
        stopped += _stop_tier(list(tier), reap, GRACE_S)
    return stopped


def stop_part(part: Part, drain_s: float, reap: Callable[[], None] = lambda: None) -> None:
    """End one part, which may drain for so long. See stop_parts."""
    _stop_tier([part], reap, drain_s)


def _stop_tier(tier: list[Part], reap: Callable[[], None], drain_s: float) -> list[str]:
    running = [part.name for part in tier if part.identity.session_members()]
    for patience_s in (drain_s, CLOSE_S):
        for part in tier:
            if part.identity.alive():
                _signal(part.identity.pid, signal.SIGTERM)
        _wait(lambda: any(part.identity.alive() for part in tier), patience_s, reap)
    # What is left: a part that did not end, or children that it left behind.
    for part in tier:
        for pid in part.identity.session_members():
            _signal(pid, signal.SIGKILL)
    _wait(lambda: any(part.identity.session_members() for part in tier), _KILL_S, reap)
    return running


def _wait(going: Callable[[], bool], timeout_s: float, reap: Callable[[], None]) -> None:
    deadline = time.monotonic() + timeout_s
    reap()
    while going() and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        reap()


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # it ended meanwhile, which is what was wanted
