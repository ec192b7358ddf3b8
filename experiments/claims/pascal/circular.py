"""PASCAL's RR in circular order: its definition in section V-A, and figure 2c."""

from __future__ import annotations

from itertools import count

from tailrace.intra.base import PASS_OVER, QUANTUM, WATERMARK, IntraPolicy, JobView, Rank


class CircularRoundRobin(IntraPolicy):
    """Requests take turns of one quantum: whoever has used it up goes to the end of the queue.

    `QuantumRoundRobin` is the same by section V-B, where priority falls with the quanta used: there, a
    request with many of them waits for all that have fewer, in circular order only for those ahead of it.

    A request's place in the queue is when its turn began, which a JobView does not have, so this order
    remembers it: one object serves one simulation. Turns begin when a rank is read, which is at once while a
    request waits; of a request whose turn ended while none did, it is the next time that one does.
    """

    quantum_tokens: int = QUANTUM
    watermark: float = WATERMARK
    pass_over: float = PASS_OVER
    summary = "turns of one token quantum, in circular order"
    preemptive = True

    def __init__(self, quantum_tokens: int = 500) -> None:
        super().__init__(quantum_tokens=quantum_tokens)
        self._turns = count()
        # By request, as its arrival: the quanta that it had used when its turn began, and the turn.
        self._begun: dict[int, tuple[int, int]] = {}

    def rank(self, job: JobView) -> Rank:
        """Return (turn, arrival)."""
        used = job.output_tokens // self.quantum_tokens
        begun = self._begun.get(job.arrival)
        if begun is None or begun[0] != used:
            begun = self._begun[job.arrival] = used, next(self._turns)
        return (begun[1], job.arrival)

    def rank_holds(self, job: JobView) -> int:
        """Return the tokens left in the quantum."""
        return self.quantum_tokens - job.output_tokens % self.quantum_tokens
