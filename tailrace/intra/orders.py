"""The simple batch orders: first come, first served; round robin by quanta; and Arrow's, decodes first."""

from __future__ import annotations

from tailrace.cluster import Phase
from tailrace.intra.base import PASS_OVER, QUANTUM, WATERMARK, IntraPolicy, JobView, Rank
from tailrace.policy.parameters import Value


class Fcfs(IntraPolicy):
    """First come, first served: decodes first, then prompts in order of arrival, with chunked prefill.

    Admission stops at the first request that does not fit. If the KV of running requests outgrows the device,
    the last to arrive is preempted, and is admitted again before any later one (PASCAL, sections II-C and
    V-A). This is vLLM's order unless `pass_over` is above 0.
    """

    watermark: float = WATERMARK
    pass_over: float = PASS_OVER
    summary = "arrival order; preempts the last when KV is short"

    def rank(self, job: JobView) -> Rank:
        """Return (arrival,)."""
        return (job.arrival,)


class QuantumRoundRobin(IntraPolicy):
    """PASCAL's RR baseline (sections II-C, V-A, V-B).

    "Progressively lower priority as the request consumes more time quanta": the level is the number of
    quanta used up, over both phases; within a level, order of arrival. A request is thus preempted only for
    one that has used fewer quanta.
    """

    quantum_tokens: int = QUANTUM
    watermark: float = WATERMARK
    pass_over: float = PASS_OVER
    summary = "fewest token quanta used goes first"
    preemptive = True

    def __init__(self, **parameters: Value) -> None:
        super().__init__(**parameters)
        if self.quantum_tokens < 1:
            raise ValueError(f"a quantum has at least one token, not {self.quantum_tokens}")

    def rank(self, job: JobView) -> Rank:
        """Return (quanta used up, arrival)."""
        return (job.output_tokens // self.quantum_tokens, job.arrival)

    def rank_holds(self, job: JobView) -> int:
        """Return the tokens left in the quantum."""
        return self.quantum_tokens - job.output_tokens % self.quantum_tokens


class DecodeFirst(IntraPolicy):
    """Arrow's local scheduler (section 5.4): decode requests first, chunked prefill in the rest of the step,
    KV migrations in FCFS order.

    Decode-first applies to memory too: a request that decodes, or waits to continue decoding, ranks before
    every prompt, so that prompts are preempted first if KV is short. Admissions do not preempt.
    """

    watermark: float = WATERMARK
    pass_over: float = PASS_OVER
    summary = "decodes before prompts, chunked prefill in the rest, KV migrations in order"

    def rank(self, job: JobView) -> Rank:
        """Return (1 for prefill or 0 for decode, arrival)."""
        return (1 if job.phase is Phase.PREFILL else 0, job.arrival)
