"""The other ranks of a deployment once all have met: calls of waves, and the loss of a rank.

Rank 0 is the hub. A call goes from the rank that starts a wave to rank 0, and from there to the others.
A rank that dies takes the deployment with it, because the others would wait for it in a collective without
end. Its host's kernel closes its link, so the others know at once; of a vanished host, they know after 8 s.
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
from collections.abc import Callable
from typing import Final

from worker_agent.parallel.data_parallel_meeting import Leave, Link, LinkLost, Meeting, Message, Start

_log = logging.getLogger(__name__)

_JOIN_S: Final = 5.0


class RankPeers:
    """The links of one rank, and the thread that reads them.

    The callbacks are called on that thread: `on_start` with the number of a wave that a peer has started, and
    `on_lost` at most once, with a sentence about the rank that has gone.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        meeting: Meeting,
        on_start: Callable[[int], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._rank = rank
        self._size = size
        self._links = dict(meeting.links)
        self._on_start = on_start
        self._on_lost = on_lost
        self._loss = ""
        self._leaving = False
        # Set once the others are told, because the thread closes the links.
        self._told = False
        self._lost = threading.Event()
        self._losing = threading.Lock()
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="data-parallel-peers", daemon=True)
        self._thread.start()

    def start(self, wave: int) -> None:
        """Call all other ranks to a wave that this one has started. Any thread."""
        self._send_all(Start(wave), but=self._rank)

    def lost_within(self, timeout_s: float) -> str:
        """Return which rank is lost, or an empty text if none is within `timeout_s`. Any thread; blocks."""
        self._lost.wait(timeout_s)
        return self._loss

    def leave(self, how: str) -> None:
        """Tell the others, unless another rank left first, that this rank `how` (`was stopped`), and end the
        thread. May be called again. Blocks for at most 5 s, plus 5 s for each peer that does not read."""
        with self._losing:
            if self._leaving:
                return
            self._leaving = True
            others = not self._loss
        if others:
            self._send_all(Leave(self._rank, how), but=self._rank)
        self._told = True
        self._wake.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)

    # ---- the thread

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            for rank, link in self._links.items():
                selector.register(link, selectors.EVENT_READ, rank)
            while not self._loss and not self._told:
                for key, _ in selector.select():
                    if isinstance(key.fileobj, Link):
                        self._read(key.data, key.fileobj)
        self._woken.close()
        for link in self._links.values():
            link.close()

    def _read(self, rank: int, link: Link) -> None:
        try:
            for message in link.receive():
                self._hear(rank, message)
        except LinkLost as lost:
            self._lose(Leave(rank, str(lost)), told_by=rank)

    def _hear(self, sender: int, message: Message) -> None:
        match message:
            case Start(wave):
                if self._rank == 0:
                    self._send_all(message, but=sender)
                self._on_start(wave)
            case Leave():
                self._lose(message, told_by=sender)
            case _:
                raise LinkLost(f"sent a {type(message).__name__.lower()} after the meeting")

    # ---- any thread

    def _send_all(self, message: Message, but: int) -> None:
        for rank, link in self._links.items():
            if rank == but:
                continue
            try:
                link.send(message)
            except LinkLost as lost:
                self._lose(Leave(rank, str(lost)), told_by=rank)

    def _lose(self, leave: Leave, told_by: int) -> None:
        with self._losing:
            if self._loss or self._leaving:
                return
            self._loss = (
                f"rank {leave.rank} of {self._size} of the data-parallel deployment {leave.how}; "
                "the other ranks cannot go on without it"
            )
        if self._rank == 0:
            self._send_all(leave, but=told_by)
        self._lost.set()
        self._on_lost(self._loss)
