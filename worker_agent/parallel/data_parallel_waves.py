"""Waves: the periods in which all ranks of a data-parallel deployment step together.

In a mixture of experts with data parallelism, each forward pass has collectives across all ranks, so a rank
without work runs a dummy batch. The protocol is that of vLLM's `DPEngineCoreProc` and its coordinator: the
ranks compare after the first step of a wave, and after every `interval` steps, whether any has work left. If
none has, the wave ends on all of them at the same step, and they block. Work that arrives at an idle rank
starts the next wave, and the rank calls the others.
"""

from __future__ import annotations


class Waves:
    """One rank's state in the protocol. Pure: the caller steps, compares, and passes the calls on.

    Waves are numbered from 0 on all ranks alike, because every rank takes part in every wave.
    """

    def __init__(self, interval: int) -> None:
        """`interval`: steps between two comparisons, the same on all ranks."""
        self._interval = interval
        # Of the wave in progress, or of the next one.
        self._number = 0
        self._running = False
        self._steps = 0

    @property
    def number(self) -> int:
        """Number of the wave in progress, or of the next one."""
        return self._number

    @property
    def running(self) -> bool:
        """Whether this rank has to step, with or without work."""
        return self._running

    @property
    def steps(self) -> int:
        """Steps of the wave so far; the same on all ranks between two steps, and 0 if none is in progress."""
        return self._steps

    def start(self) -> int:
        """Start the next wave, for work that has arrived; return its number, to be sent to all peers.

        Raise RuntimeError if a wave is in progress.
        """
        if self._running:
            raise RuntimeError(f"wave {self._number} is in progress")
        self._running = True
        return self._number

    def call(self, number: int) -> None:
        """Take part in a wave that a peer has started.

        A call of a wave that is in progress or has ended is ignored: several ranks may start the same one,
        and their calls may arrive late. Calls are read between steps, so none is early: no rank leaves a wave
        before this one has compared for the last time. Raise RuntimeError if one is.
        """
        if number > self._number:
            raise RuntimeError(f"called to wave {number}, but the next one is {self._number}")
        if number == self._number:
            self._running = True

    def step(self) -> bool:
        """Count a step, with work or without; return whether the ranks compare their work after it."""
        self._steps += 1
        # After the first step too, as vLLM does: a single request that ends at once needs no more.
        return self._steps == 1 or self._steps % self._interval == 0

    def compare(self, unfinished: bool) -> None:
        """Take the result of a comparison, `unfinished` if any rank has work left; else the wave ends."""
        if unfinished:
            return
        self._number += 1
        self._steps = 0
        self._running = False
