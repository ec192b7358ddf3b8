"""Streams whose instance was lost, or gave them up, go on elsewhere from the next index.

The new instance gets every accepted token, computes the KV anew and emits from there; the epoch was raised
when the stream was taken from its owner, so nothing that the old instance still says counts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Final

from frontend_svc.dispatch import Dispatch
from frontend_svc.outbox import abort
from frontend_svc.streams import Stream, StreamTable
from frontend_svc.workers import Workers

log = logging.getLogger(__name__)

# A request that instances keep giving up is at fault itself.
MAX_FAILURES: Final = 3
# One that is there whenever an instance dies may be what kills them.
MAX_LOSSES: Final = 16


class Recovery:
    """Restarts streams, within bounds."""

    def __init__(
        self,
        table: StreamTable,
        dispatch: Dispatch,
        workers: Workers,
        give_up: Callable[[Stream, str], None],
    ) -> None:
        """`give_up(stream, reason)` ends a stream as an error."""
        self._table = table
        self._dispatch = dispatch
        self._workers = workers
        self._give_up = give_up

    def instance_lost(self, instance_id: str) -> list[Stream]:
        """Take everything from the instance; returns the streams that were on it."""
        lost = self._table.orphan_all(instance_id)
        if lost:
            log.warning("%d streams of %s go on elsewhere", len(lost), instance_id)
            # If it was only stopped, it finds this when it wakes up.
            self._workers.send_on_wakeup(instance_id, abort([stream.handle for stream in lost]))
        self._restart(lost, instance_id)
        return lost

    def failed(self, streams: Iterable[Stream], instance_id: str) -> None:
        """The instance gave these streams up, or lost or repeated a token of theirs."""
        streams = list(streams)
        self._workers.send(instance_id, abort([stream.handle for stream in streams]))
        self._restart(streams, instance_id)

    def turned_away(self, stream: Stream, instance_id: str) -> None:
        """The instance has as many requests as it may."""
        self._table.orphan(stream)
        self._dispatch.start_again(stream, instance_id)

    def _restart(self, streams: Iterable[Stream], instance_id: str) -> None:
        for stream in streams:
            if stream.failures > MAX_FAILURES:
                self._give_up(stream, f"failed {stream.failures} times, last on {instance_id}")
            elif stream.losses > MAX_LOSSES:
                self._give_up(stream, f"its instance was lost {stream.losses} times")
            else:
                self._dispatch.start(stream, frozenset({instance_id}))
