"""Decide how a request moves: with its KV, by recomputing, or not at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tailrace.handover import LIVE, Handover, Way, by_replay
from tailrace.model_identity import ModelIdentity, difference
from tailrace.v1 import worker_pb2
from worker_agent.engine.base import EngineInfo
from worker_agent.migration.messages import layout_difference


class CannotMove(Exception):
    """The request can move neither way; the message names the setting."""


def way_of(info: EngineInfo, opened: worker_pb2.ExportOpened) -> Handover:
    """Return the way to an engine of this kind. Raise CannotMove. Pure.

    A replay needs the same model computed in the same number formats; otherwise the answer would continue
    differently.
    """
    if info.handover.way is Way.STAYS:
        raise CannotMove(f"target: {info.handover.reason}")
    layouts = layout_difference(info.kv_shape, opened.layout)
    if opened.replay_reason:
        way = by_replay(f"source: {opened.replay_reason}")
    elif info.handover.way is Way.REPLAY:
        way = by_replay(f"target: {info.handover.reason}")
    elif layouts:
        way = by_replay(layouts)
    else:
        return LIVE
    if opened.layout.model_fingerprint != info.kv_shape.model_fingerprint:
        models = difference(_identity(opened), info.identity)
        if models:
            raise CannotMove(models)
    return way


def identity_message(identity: ModelIdentity | None) -> worker_pb2.ModelIdentity | None:
    """Return the identity as a message."""
    if identity is None:
        return None
    return worker_pb2.ModelIdentity(
        text=identity.text, weights=identity.weights, precision=identity.precision
    )


def _identity(opened: worker_pb2.ExportOpened) -> ModelIdentity | None:
    """Return the source's identity; None if its version does not send one."""
    model = opened.model
    return ModelIdentity(model.text, model.weights, model.precision) if opened.HasField("model") else None


_STOP_BLOCKS: Final = 2
_ROUNDS: Final = 8
_ROUNDS_MAX: Final = 32
_TIMEOUT_MAX_S: Final = 600.0
# Less than a source waits for a silent target (WorkerSettings.export_idle_s).
_ROOM_WAIT_MAX_S: Final = 25.0


@dataclass(frozen=True, slots=True)
class ImportPlan:
    """The rounds, the blocks to leave for the pause, and time limits.

    `stop_blocks`: a rest of at most this many blocks is copied during the pause. `room_wait_s`: seconds to
    wait for room (0: do not wait). `timeout_s`: seconds from then until the commit.
    """

    rounds: int
    stop_blocks: int
    room_wait_s: float
    timeout_s: float


def plan_of(request: worker_pb2.ImportRequest, timeout_s: float) -> ImportPlan:
    """Return the plan; zeroes in the request mean the defaults."""
    rounds = min(request.max_rounds or _ROUNDS, _ROUNDS_MAX)
    if request.mode == worker_pb2.COPY_MODE_STOP_AND_COPY:
        rounds = 0
    return ImportPlan(
        rounds=rounds,
        stop_blocks=request.stop_threshold_blocks or _STOP_BLOCKS,
        room_wait_s=min(max(0.0, request.room_wait_s), _ROOM_WAIT_MAX_S),
        timeout_s=min(request.timeout_s or timeout_s, _TIMEOUT_MAX_S),
    )
