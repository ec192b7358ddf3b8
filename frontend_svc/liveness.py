"""Find streams that no engine runs: those without a token for longer than their instance's steps explain.

The owner is asked whether it still has them. It replies on the stream that carries its outputs, after all of
them: what it does not have at that point, it will not send.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Final

from frontend_svc.links import Outbox
from frontend_svc.streams import StreamTable
from tailrace.v1 import worker_pb2

# Time without a token after which a stream's owner is asked: at least so many seconds, and so many of its
# steps.
QUERY_AFTER_S: Final = 5.0
QUERY_AFTER_STEPS: Final = 50
# Weight of the latest step in the moving average.
_LATEST: Final = 0.1


@dataclass(slots=True)
class _StepRate:
    """An instance's step rate as observed from its outputs."""

    step: int
    at_s: float
    # Mean seconds per step; 0: unknown yet.
    mean_s: float = 0.0


class Liveness:
    """Track progress of all streams. Pure but for the queries that it sends; times are seconds of one
    monotonic clock."""

    def __init__(self, table: StreamTable, outbox: Outbox) -> None:
        self._table = table
        self._outbox = outbox
        self._rates: dict[str, _StepRate] = {}

    def step_received(self, instance_id: str, step: int, now_s: float) -> None:
        """Record that outputs of this step of an instance arrived."""
        rate = self._rates.get(instance_id)
        if rate is None or step <= rate.step:
            self._rates[instance_id] = _StepRate(step, now_s)
            return
        each_s = (now_s - rate.at_s) / (step - rate.step)
        rate.mean_s = rate.mean_s + _LATEST * (each_s - rate.mean_s) if rate.mean_s else each_s
        rate.step, rate.at_s = step, now_s

    def lost(self, instance_id: str) -> None:
        """Drop the step rate of an instance that was lost; a new process counts its steps from zero."""
        self._rates.pop(instance_id, None)

    def tick(self, now_s: float) -> None:
        """Query the owners of streams that have made no progress for too long."""
        queries: defaultdict[str, worker_pb2.HeldQuery] = defaultdict(worker_pb2.HeldQuery)
        for stream in self._table:
            owner = stream.owner
            if owner is None:
                continue
            progress = (stream.epoch, stream.accepted)
            if progress != stream.last_progress:
                stream.last_progress, stream.last_progress_s = progress, now_s
            elif now_s - stream.last_progress_s > self._silence_limit_s(owner):
                # Without progress, ask again after the same time.
                stream.last_progress_s = now_s
                queries[owner].handles.append(stream.handle)
                queries[owner].epochs.append(stream.epoch)
        for instance_id, query in queries.items():
            self._outbox.send(instance_id, worker_pb2.AttachUp(held_query=query))

    def _silence_limit_s(self, instance_id: str) -> float:
        rate = self._rates.get(instance_id)
        return max(QUERY_AFTER_S, QUERY_AFTER_STEPS * rate.mean_s if rate is not None else 0.0)
