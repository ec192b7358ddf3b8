"""Round robin by token quanta, whatever the phase."""

from __future__ import annotations

from tailrace.intra.base import PASS_OVER, QUANTUM, QUANTUM_TOKENS, WATERMARK, IntraPolicy, JobView, Rank


class QuantumRoundRobin(IntraPolicy):
    """PASCAL's RR baseline (sections II-C, V-A, V-B).

    "Progressively lower priority as the request consumes more time quanta": the level is the number of
    quanta used up, over both phases; within a level, order of arrival. A request is thus preempted only when
    somebody who has had less wants its place.
    """

    parameters = (QUANTUM, WATERMARK, PASS_OVER)
    summary = "fewest token quanta used goes first"
    preemptive = True

    def __init__(
        self, *, quantum_tokens: int = QUANTUM_TOKENS, watermark: float = 0.01, pass_over: float = 0.0
    ) -> None:
        """See `parameters`."""
        if quantum_tokens < 1:
            raise ValueError(f"a quantum has at least one token, not {quantum_tokens}")
        self.quantum_tokens = quantum_tokens
        self.watermark = watermark
        self.pass_over = pass_over

    def rank(self, job: JobView) -> Rank:
        """(quanta used up, arrival)."""
        return (job.output_tokens // self.quantum_tokens, job.arrival)

    def rank_holds(self, job: JobView) -> int:
        """Until the quantum ends."""
        return self.quantum_tokens - job.output_tokens % self.quantum_tokens
