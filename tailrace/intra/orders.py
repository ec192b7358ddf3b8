"""Batch orders of a few lines: first come, first served; by turns; and Arrow's, decodes first."""

from __future__ import annotations

from tailrace.cluster import Phase
from tailrace.intra.base import PASS_OVER, QUANTUM, QUANTUM_TOKENS, WATERMARK, IntraPolicy, JobView, Rank


class Fcfs(IntraPolicy):
    """Decodes first, then prompts in order of arrival, with chunked prefill.

    Admission stops at the first request that finds no room; when the KV of running requests outgrows the
    device, the last to arrive is preempted, and returns before any later one is admitted (PASCAL, sections
    II-C and V-A). With `pass_over` above 0 it is no longer vLLM's order.
    """

    parameters = (WATERMARK, PASS_OVER)
    summary = "arrival order; preempts the last when KV is short"

    def __init__(self, *, watermark: float = 0.01, pass_over: float = 0.0) -> None:
        """See `parameters`."""
        self.watermark = watermark
        self.pass_over = pass_over

    def rank(self, job: JobView) -> Rank:
        """By arrival alone."""
        return (job.arrival,)


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


class DecodeFirst(IntraPolicy):
    """Arrow's local scheduler (section 5.4): decode requests first, chunked prefill in what is left of the
    step, KV migrations in FCFS order.

    Decode-first holds for memory too: a request that is decoding or wants to go on decoding ranks before
    every prompt, so that a prompt is what gives way when KV is short. Nobody is preempted for an admission.
    """

    parameters = (WATERMARK, PASS_OVER)
    summary = "decodes before prompts, chunked prefill in the rest, KV migrations in order"

    def __init__(self, *, watermark: float = 0.01, pass_over: float = 0.0) -> None:
        """See `parameters`."""
        self.watermark = watermark
        self.pass_over = pass_over

    def rank(self, job: JobView) -> Rank:
        """(prefill after decode, arrival)."""
        return (1 if job.phase is Phase.PREFILL else 0, job.arrival)
