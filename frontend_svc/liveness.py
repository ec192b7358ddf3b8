"""Find streams that no engine runs: those without a token for longer than their instance's steps explain.

How long that is follows from what the owner says of its own steps; the time between its outputs does not
tell, as it may have had nothing to run. The owner is asked whether it still has them. It replies on the
stream that carries its outputs, after all of them: what it does not have at that point, it will not send.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Final

from frontend_svc.links import SILENCE_S, Outbox
from frontend_svc.streams import Stream, StreamTable
from tailrace.v1 import worker_pb2

# A stream's owner is asked once there was no token for so many seconds and so many of the owner's steps.
QUERY_AFTER_S: Final = 5.0
QUERY_AFTER_STEPS: Final = 50
# It is asked after this time in any case: its steps can be slow, or it can be mistaken about them.
QUERY_LATEST_S: Final = 60.0
# What a worker says of its steps holds for this long; it does so with every heartbeat and every output.
_SAID_S: Final = SILENCE_S


@dataclass(slots=True)
class _Said:
    """What an instance said last of its own steps."""

    steps: int
    # Whether it had requests to run.
    running: bool
    at_s: float


class Liveness:
    """Track progress of all streams. Pure but for the queries that it sends; times are seconds of one
    monotonic clock."""

    def __init__(self, table: StreamTable, outbox: Outbox) -> None:
        self._table = table
        self._outbox = outbox
        self._said: dict[str, _Said] = {}

    def step_received(self, instance_id: str, step: int, now_s: float) -> None:
        """Record that outputs of this step of an instance arrived."""
        self.heartbeat_received(instance_id, step, True, now_s)

    def heartbeat_received(self, instance_id: str, steps: int, running: bool, now_s: float) -> None:
        """Record how many steps an instance has finished, and whether it has requests to run."""
        said = self._said.get(instance_id)
        if said is None:
            self._said[instance_id] = _Said(steps, running, now_s)
        else:
            said.steps, said.running, said.at_s = steps, running, now_s

    def lost(self, instance_id: str) -> None:
        """Forget what an instance that was lost has said; a new process counts its steps from zero."""
        self._said.pop(instance_id, None)

    def tick(self, now_s: float) -> None:
        """Query the owners of streams that have made no progress for too long."""
        queries: defaultdict[str, worker_pb2.HeldQuery] = defaultdict(worker_pb2.HeldQuery)
        for stream in self._table:
            owner = stream.owner
            if owner is None:
                continue
            progress = (stream.epoch, stream.accepted)
            if progress != stream.last_progress:
                stream.last_progress = progress
                self._observed(stream, owner, now_s)
            elif self._silent(stream, owner, now_s):
                # Without progress, ask again after the same time.
                self._observed(stream, owner, now_s)
                queries[owner].handles.append(stream.handle)
                queries[owner].epochs.append(stream.epoch)
        for instance_id, query in queries.items():
            self._outbox.send(instance_id, worker_pb2.AttachUp(held_query=query))

    def _observed(self, stream: Stream, owner: str, now_s: float) -> None:
        said = self._said.get(owner)
        stream.last_progress_s, stream.last_progress_step = now_s, 0 if said is None else said.steps

    def _silent(self, stream: Stream, owner: str, now_s: float) -> bool:
        """Return whether the stream had no token for longer than its owner's steps explain."""
        silent_s = now_s - stream.last_progress_s
        if silent_s <= QUERY_AFTER_S:
            return False
        said = self._said.get(owner)
        if said is None or not said.running or now_s - said.at_s > _SAID_S:
            return True
        return said.steps - stream.last_progress_step >= QUERY_AFTER_STEPS or silent_s > QUERY_LATEST_S
