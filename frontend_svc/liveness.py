"""Finds streams that nobody runs any more: those without a token for longer than their instance's steps
explain.

Their owner is asked whether it still has them. It answers on the stream that carries its outputs, after
all of them: what it does not have then, it will not send.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Final

from frontend_svc.links import Outbox
from frontend_svc.streams import StreamTable
from tailrace.v1 import worker_pb2

# Seconds without a token after which a stream's owner is asked, at least; and after how many of its steps.
ASK_AFTER_S: Final = 5.0
ASK_AFTER_STEPS: Final = 50
# Weight of the latest step in the mean.
_LATEST: Final = 0.1


@dataclass(slots=True)
class _Pace:
    """An instance's steps, as far as their outputs came here."""

    step: int
    at_s: float
    # Mean seconds a step; 0: not known yet.
    mean_s: float = 0.0


class Liveness:
    """Pure but for the queries that it sends; times are seconds of one monotonic clock."""

    def __init__(self, table: StreamTable, outbox: Outbox) -> None:
        self._table = table
        self._outbox = outbox
        self._paces: dict[str, _Pace] = {}

    def stepped(self, instance_id: str, step: int, now_s: float) -> None:
        """Outputs of this step of an instance have come."""
        pace = self._paces.get(instance_id)
        if pace is None or step <= pace.step:
            self._paces[instance_id] = _Pace(step, now_s)
            return
        each_s = (now_s - pace.at_s) / (step - pace.step)
        pace.mean_s = pace.mean_s + _LATEST * (each_s - pace.mean_s) if pace.mean_s else each_s
        pace.step, pace.at_s = step, now_s

    def lost(self, instance_id: str) -> None:
        """The instance is gone; if it comes back it counts its steps anew."""
        self._paces.pop(instance_id, None)

    def tick(self, now_s: float) -> None:
        """Look at all streams; ask about those that have stood still for long."""
        doubtful: defaultdict[str, worker_pb2.HeldQuery] = defaultdict(worker_pb2.HeldQuery)
        for stream in self._table:
            owner = stream.owner
            if owner is None:
                continue
            seen = (stream.epoch, stream.accepted)
            if seen != stream.seen:
                stream.seen, stream.seen_s = seen, now_s
            elif now_s - stream.seen_s > self._patience_s(owner):
                # Asked again after the same time, should it still stand still.
                stream.seen_s = now_s
                doubtful[owner].handles.append(stream.handle)
                doubtful[owner].epochs.append(stream.epoch)
        for instance_id, query in doubtful.items():
            self._outbox.send(instance_id, worker_pb2.AttachUp(held_query=query))

    def _patience_s(self, instance_id: str) -> float:
        pace = self._paces.get(instance_id)
        return max(ASK_AFTER_S, ASK_AFTER_STEPS * pace.mean_s if pace is not None else 0.0)
