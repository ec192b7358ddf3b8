"""How an import is to be done, with defaults for what its request leaves open."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tailrace.v1 import worker_pb2

_STOP_BLOCKS: Final = 2
_ROUNDS: Final = 8
_ROUNDS_MAX: Final = 32
_TIMEOUT_MAX_S: Final = 600.0
# Less than a source waits for a target that says nothing (WorkerSettings.export_idle_s).
_ROOM_WAIT_MAX_S: Final = 25.0


@dataclass(frozen=True, slots=True)
class ImportPlan:
    """Rounds, the number of blocks that are copied under the pause, seconds to wait for room (0: not at all),
    seconds from then until the commit."""

    rounds: int
    stop_blocks: int
    room_wait_s: float
    timeout_s: float


def plan_of(request: worker_pb2.ImportRequest, timeout_s: float) -> ImportPlan:
    """Zeroes in the request mean the defaults."""
    rounds = min(request.max_rounds or _ROUNDS, _ROUNDS_MAX)
    if request.mode == worker_pb2.COPY_MODE_STOP_AND_COPY:
        rounds = 0
    return ImportPlan(
        rounds=rounds,
        stop_blocks=request.stop_threshold_blocks or _STOP_BLOCKS,
        room_wait_s=min(max(0.0, request.room_wait_s), _ROOM_WAIT_MAX_S),
        timeout_s=min(request.timeout_s or timeout_s, _TIMEOUT_MAX_S),
    )
